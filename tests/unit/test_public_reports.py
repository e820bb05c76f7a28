"""Inputs made of reports that users of other trainers have filed in public,
named as project#number.

What other tests have already (accumulation, short steps, resumes, schedules,
several ranks) is not here again.
"""

import contextlib

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.specs import error_of, logged
from tests.unit.test_loop import Context, Power, config, weights
from trainers.loop.fit import fit
from trainers.task import Task

SAMPLES = 10
SEED = 3
RATE = 0.1
BASE = {
    "seed": SEED,
    "epochs": 3,
    "global_batch_size": 4,
    "microbatch_size": 1,
    "optimizer": {"name": "sgd", "lr": RATE},
    "lr_schedule": {},
    "clip_grad_norm": None,
    "checkpoint": {"every_steps": 1},
    "evaluate": {"every_steps": 99},
}


class Line(Task):
    """A linear regression."""

    def model(self):
        torch.manual_seed(0)
        return nn.Linear(3, 1).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randn(
            SAMPLES, 3, generator=generator, dtype=torch.float64
        )
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 1)

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[1])


class Masked(Line):
    """No sample has a label."""

    def weight(self, batch):
        return torch.zeros(())


class Another(Line):
    """A run that goes on, and is not what it was: by `what`, from its second
    start on or in the middle.
    """

    def __init__(self, what, start=0):
        self.what = what
        self.start = start

    def dataset(self, split):
        data = super().dataset(split)
        if self.what == "grows" and split == "train":
            self.samples = [data[row] for row in range(SAMPLES)]
            return self.samples
        rows = (
            torch.arange(SAMPLES).flip(0)
            if self.what == "order" and self.start
            else torch.arange(SAMPLES)
        )
        return TensorDataset(*(tensor[rows] for tensor in data.tensors))

    def on_evaluate(self, metrics, step):
        if self.what == "grows":
            self.samples.append(self.samples[0])

    def schedule(self, optimizer, config):
        if self.what == "one cycle":
            return torch.optim.lr_scheduler.OneCycleLR(
                optimizer, RATE, total_steps=3 * config.epochs
            )
        return None


COSINE = {"name": "cosine"}


@pytest.mark.parametrize(
    ("what", "changes", "warnings"),
    [
        ("same", {}, 0),
        ("longer", {"epochs": 4}, 0),
        (
            "longer",
            {"epochs": 4, "lr_schedule": COSINE},
            1,
        ),  # composer#1384, transformers#27749
        ("order", {}, 1),  # of files, as a directory lists them
    ],
)
def test_what_a_run_that_goes_on_is_told(
    what, changes, warnings, tmp_path, caplog
):
    keys = {key: value for key, value in changes.items() if key != "epochs"}
    with contextlib.suppress(Power):
        fit(
            Another(what),
            config(**BASE | keys),
            Context(tmp_path, cut_at_step=4),
        )
    caplog.clear()
    fit(Another(what, start=1), config(**BASE | changes), Context(tmp_path))
    assert [record.levelname for record in caplog.records].count(
        "WARNING"
    ) == warnings


@pytest.mark.parametrize(
    ("what", "changes", "refused"),
    [
        (
            "one cycle",
            {"epochs": 4},
            "schedule()",
        ),  # torch's ValueError, steps after the resume
        (
            "grows",
            {"evaluate": {"every_epochs": 1}},
            'dataset("train")',
        ),  # new samples were left out
    ],
)
def test_what_cannot_go_on_is_refused(what, changes, refused, tmp_path):
    with contextlib.suppress(Power):
        fit(Another(what), config(**BASE), Context(tmp_path, cut_at_step=4))
    with error_of(refused):
        fit(
            Another(what, start=1), config(**BASE | changes), Context(tmp_path)
        )


def test_steps_without_a_label_are_said(tmp_path, caplog):
    """trl#6668: their loss was logged as zero."""
    fit(Masked(), config(**BASE), Context(tmp_path))
    assert [record.levelname for record in caplog.records].count(
        "WARNING"
    ) == 1


class Figures(Line):
    """Figures by the sign of a sample's first input, as of several validation
    sets in one (Lightning#9683).
    """

    def __init__(self, names):
        self.names = names
        self.calls = 0

    def metrics(self, outputs, batch):
        self.calls += 1
        error = (outputs - batch[1]).abs()[:, 0]
        high = batch[0][:, 0] > 0
        if self.names == "one of two":
            return {"high" if high[0] else "low": error}
        if self.names == "other order":
            both = {"high": error * high, "low": error * ~high}
            return both if self.calls % 2 else dict(reversed(both.items()))
        found = {
            "high": torchmetrics.MeanMetric(),
            "low": torchmetrics.MeanMetric(),
        }
        for metric, rows in zip(found.values(), (high, ~high), strict=True):
            metric.update(error[rows])
        return {
            name: metric
            for name, metric in found.items()
            if metric.update_called and metric.weight
        }


@pytest.mark.parametrize(
    "names", ["one of two", "other order", "torchmetrics"]
)
def test_metrics_whose_names_differ_between_batches(names, tmp_path):
    """Lightning#21409: figures were given under each other's names."""
    size = {"one of two": 1}.get(names, 3)
    fit(
        Figures(names),
        config(**BASE | {"evaluate": {"microbatch_size": size}}),
        Context(tmp_path),
    )
    model, (inputs, targets) = Line().model(), Line().dataset("val").tensors
    model.load_state_dict(weights(tmp_path))
    error = (model(inputs) - targets).abs()[:, 0]
    high = inputs[:, 0] > 0
    found = logged(tmp_path, "val_loss")[-1]
    for name, rows in (("high", high), ("low", ~high)):
        expected = error[rows].sum() / (
            SAMPLES if names == "other order" else rows.sum()
        )
        assert found[f"val_{name}"] == pytest.approx(expected.item(), rel=1e-6)
