"""Inputs made of reports that users of other trainers have filed in public: each beside a plain loop of PyTorch's.

A report is named as project#number. What other tests have already (schedules, the best checkpoint, early stopping,
several ranks) is not here again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from tests.unit.test_loop import Context, Power, config, curve, weights
from trainers.errors import ConfigError
from trainers.loop.fit import fit
from trainers.measure.run_log import read_log
from trainers.storage import Storage
from trainers.task import Task

torch.set_num_threads(1)
SAMPLES, SEED, RATE = 10, 3, 0.1
BASE: dict[str, Any] = {
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

    dtype = torch.float64

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 1).to(self.dtype)

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randn(SAMPLES, 3, generator=generator, dtype=self.dtype)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 1)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


class Single(Line):
    dtype = torch.float32


class Tokens(Task):
    """A language model of padded sequences, whose ends are tied."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)).double()
        model[1].weight = model[0].weight
        return model

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(len(split))
        inputs, labels = torch.randint(0, 11, (2, SAMPLES, 6), generator=generator)
        lengths = torch.randint(1, 7, (SAMPLES, 1), generator=generator)
        return TensorDataset(inputs, labels.masked_fill(torch.arange(6) >= lengths, -100))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    def weight(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


class Masked(Tokens):
    """The samples of some steps have no label at all."""

    def dataset(self, split: str) -> Any:
        inputs, labels = super().dataset(split).tensors
        labels[: SAMPLES - 2] = -100
        return TensorDataset(inputs, labels)


class Read(IterableDataset[Any]):
    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[row] for row in range(SAMPLES)])


class Streamed(Line):
    def stream(self, split: str) -> Any:
        return Read(super().dataset(split))


@dataclass(frozen=True)
class Report:
    words: str
    task: type[Task]
    changes: dict[str, Any] = field(default_factory=dict)
    cuts: tuple[int, ...] = ()
    """The steps after which it is cut off, and begun again."""


STREAM: dict[str, Any] = {"epochs": None, "max_steps": 7}
LOADER = {"data": {"num_workers": 1}}
REPORTS = {
    "transformers#35203": Report("accumulation takes means of means", Tokens),
    "Lightning#20350": Report(
        "so do microbatches of two sizes", Tokens, {"global_batch_size": 7, "microbatch_size": 3}
    ),
    "trl#6668": Report("a step without a label has a loss of zero", Masked, {"global_batch_size": 2}),
    "Lightning#19987": Report("an epoch's short last step is divided by the usual number", Line),
    "Lightning#681": Report("uneven pieces, clipped", Line, {"global_batch_size": 7, "clip_grad_norm": 0.5}),
    "Lightning#9599": Report(
        "clipped before it is unscaled", Single, {"precision": "fp16", "clip_grad_norm": 0.1, "microbatch_size": 4}
    ),
    "transformers#40691": Report("order of the first epoch after a resume in the second", Line, LOADER, (4,)),
    "verl#7401": Report("the epoch after an epoch's checkpoint is skipped", Line, {"checkpoint": {}}, (3, 6)),
    "composer#3725": Report("other losses after several resumes", Line, {"microbatch_size": "auto"}, (2, 5, 7, 8)),
    "transformers#11666": Report("tied weights come apart in a resume", Tokens, {}, (2,)),
    "accelerate#209": Report("the end of a pass over a stream is short or lost", Streamed, STREAM),
    "streaming#437": Report("a stream begins again in a resume", Streamed, STREAM | LOADER, (2, 4)),
}


def rows_of_steps(changes: dict[str, Any]) -> Iterator[Tensor]:
    size = changes["global_batch_size"]
    if "max_steps" in changes:
        yield from (torch.arange(changes["max_steps"] * size) % SAMPLES).split(size)
        return
    for epoch in range(changes["epochs"]):
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)).split(size)


def plain(task: Task, changes: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of a plain loop."""
    model: nn.Module = task.model()
    data: Any = task.dataset("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    half = changes.get("precision") == "fp16"
    scaler, losses = torch.amp.GradScaler("cpu", enabled=half), []
    for rows in rows_of_steps(changes):
        batch = [tensor[rows] for tensor in data.tensors]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = task.loss(model(batch[0]), batch)
        assert loss is not None
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if most := changes["clip_grad_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_training(report: Report, tmp_path: Path) -> None:
    changes = {key: value for key, value in (BASE | report.changes).items() if value is not None or key != "epochs"}
    losses, expected = plain(report.task(), changes)
    for cut in (*report.cuts, None):
        with contextlib.suppress(Power):
            fit(report.task(), config(**changes), Context(tmp_path, cut_at_step=cut))
    assert [loss for _, _, loss in curve(tmp_path)] == pytest.approx(losses, rel=1e-6, nan_ok=True)
    found = weights(tmp_path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


class Another(Line):
    """A run that goes on, and is not what it was: by `what`, from its second start on or in the middle."""

    def __init__(self, what: str, start: int = 0) -> None:
        self.what, self.start = what, start

    def dataset(self, split: str) -> Any:
        data = super().dataset(split)
        if self.what == "grows" and split == "train":
            self.samples = [data[row] for row in range(SAMPLES)]
            return self.samples
        rows = torch.arange(SAMPLES).flip(0) if self.what == "order" and self.start else torch.arange(SAMPLES)
        return TensorDataset(*(tensor[rows] for tensor in data.tensors))

    def on_evaluate(self, metrics: dict[str, float], step: int) -> None:
        if self.what == "grows":
            self.samples.append(self.samples[0])

    def schedule(self, optimizer: Any, config: Any) -> Any:
        if self.what == "one cycle":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=3 * config.epochs)
        return None


COSINE = {"name": "cosine"}


@pytest.mark.parametrize(
    ("what", "changes", "warnings"),
    [
        ("same", {}, 0),
        ("longer", {"epochs": 4}, 0),
        ("longer", {"epochs": 4, "lr_schedule": COSINE}, 1),  # composer#1384, transformers#27749
        ("order", {}, 1),  # of files, as a directory lists them
    ],
)
def test_what_a_run_that_goes_on_is_told(
    what: str, changes: dict[str, Any], warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {key: value for key, value in changes.items() if key != "epochs"}
    with contextlib.suppress(Power):
        fit(Another(what), config(**BASE | keys), Context(tmp_path, cut_at_step=4))
    caplog.clear()
    fit(Another(what, start=1), config(**BASE | changes), Context(tmp_path))
    assert [record.levelname for record in caplog.records].count("WARNING") == warnings


@pytest.mark.parametrize(
    ("what", "changes", "refused"),
    [
        ("one cycle", {"epochs": 4}, "schedule()"),  # torch's ValueError, steps after the resume
        ("grows", {"evaluate": {"every_epochs": 1}}, 'dataset("train")'),  # new samples were left out
    ],
)
def test_what_cannot_go_on_is_refused(what: str, changes: dict[str, Any], refused: str, tmp_path: Path) -> None:
    with contextlib.suppress(Power):
        fit(Another(what), config(**BASE), Context(tmp_path, cut_at_step=4))
    with pytest.raises(ConfigError) as raised:
        fit(Another(what, start=1), config(**BASE | changes), Context(tmp_path))
    assert raised.value.field == refused


def test_steps_without_a_label_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """trl#6668: their loss was logged as zero."""
    fit(Masked(), config(**BASE | {"global_batch_size": 2}), Context(tmp_path))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(self.inner(inputs))


class Deep(Line):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(3, 1)).double()


def test_activations_that_are_computed_again_have_the_same_dropout(tmp_path: Path) -> None:
    """OLMo-core#828, guided-diffusion#167: they had other masks in the backward pass."""
    for mode in ("none", "full"):
        fit(Deep(), config(**BASE, activation_checkpointing=mode), Context(tmp_path / mode))
    assert curve(tmp_path / "none") == curve(tmp_path / "full")


class Figures(Line):
    """Figures by the sign of a sample's first input, as of several validation sets in one (Lightning#9683)."""

    def __init__(self, names: str) -> None:
        self.names, self.calls = names, 0

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        self.calls += 1
        error, high = (outputs - batch[1]).abs()[:, 0], batch[0][:, 0] > 0
        if self.names == "one of two":
            return {"high" if high[0] else "low": error}
        if self.names == "other order":
            both = {"high": error * high, "low": error * ~high}
            return both if self.calls % 2 else dict(reversed(both.items()))
        found = {"high": torchmetrics.MeanMetric(), "low": torchmetrics.MeanMetric()}
        for metric, rows in zip(found.values(), (high, ~high), strict=True):
            metric.update(error[rows])
        return {name: metric for name, metric in found.items() if metric.update_called and metric.weight}


@pytest.mark.parametrize("names", ["one of two", "other order", "torchmetrics"])
def test_metrics_whose_names_differ_between_batches(names: str, tmp_path: Path) -> None:
    """Lightning#21409: figures were given under each other's names."""
    size = {"one of two": 1}.get(names, 3)
    fit(Figures(names), config(**BASE | {"evaluate": {"microbatch_size": size}}), Context(tmp_path))
    model, (inputs, targets) = Line().model(), Line().dataset("val").tensors
    model.load_state_dict(weights(tmp_path))
    error, high = (model(inputs) - targets).abs()[:, 0], inputs[:, 0] > 0
    found = [row for row in read_log(Storage(str(tmp_path))) if "val_loss" in row][-1]
    for name, rows in (("high", high), ("low", ~high)):
        expected = error[rows].sum() / (SAMPLES if names == "other order" else rows.sum())
        assert found[f"val_{name}"] == pytest.approx(expected.item(), rel=1e-6)
