"""Evaluation against a plain computation: every sample once, whatever the
batches and the ranks are.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.unit.test_loop import Tiny, curve, evaluations, train
from trainers.config.sections import DataConfig
from trainers.devices.group import Group
from trainers.model.precision import resolve_precision
from trainers.step.evaluation import evaluate
from trainers.step.forward import ForwardPass
from trainers.task import Task, task_feed

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)


class Labels(Task):
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {
            "accuracy": outputs.argmax(1) == batch[1],
            "confidence": outputs.softmax(1).amax(1),
        }


class Weighted(Labels):
    """The loss of a batch is a mean over weights, as over tokens."""

    def loss(self, outputs, batch):
        each = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
        return (each * batch[2]).sum() / batch[2].sum()

    def weight(self, batch):
        return batch[2].sum()


def data(size):
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return TensorDataset(
        inputs,
        labels,
        torch.randint(1, 9, (size,), generator=generator).double(),
    )


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
    ).double()


def run(task, dataset, size, model=None, group=None):
    feed = task_feed(dataset, task, DataConfig(), CPU, sharers=1, seed=0)
    forward = ForwardPass(model or small_model(), task, FP32, CPU)
    return evaluate(forward, feed, size, group or Group(0, 1, CPU))


@pytest.mark.parametrize(
    "task", [Labels(), Weighted()], ids=["samples", "weights"]
)
@pytest.mark.parametrize("size", [1, 7, 64, 1797])
@pytest.mark.parametrize("microbatch", [1, 3, 64, 256, 5000])
def test_the_figures_are_those_of_one_plain_pass(task, size, microbatch):
    if size // microbatch > 600:
        microbatch = size // 600
    dataset = data(size)
    model = small_model().eval()
    inputs, labels, weights = dataset.tensors
    with torch.no_grad():
        outputs = model(inputs)
        each = nn.functional.cross_entropy(outputs, labels, reduction="none")
    counted = (
        weights
        if isinstance(task, Weighted)
        else torch.ones(size, dtype=torch.float64)
    )
    assert run(task, dataset, microbatch) == pytest.approx(
        {
            "val_loss": float((each * counted).sum() / counted.sum()),
            "val_accuracy": float(
                (outputs.argmax(1) == labels).double().mean()
            ),
            "val_confidence": float(outputs.softmax(1).amax(1).mean()),
        },
        rel=1e-12,
    )


class Detector(Labels):
    """As torchvision's: losses in training alone, predictions in evaluation;
    `sometimes` not even that.
    """

    def __init__(self, sometimes=False):
        self.sometimes = sometimes

    def loss(self, outputs, batch):
        return outputs.mean() if self.sometimes and len(outputs) < 7 else None


@pytest.mark.parametrize("size", [1, 64])
def test_a_task_without_a_loss_in_evaluation_has_its_metrics(size):
    expected = run(Labels(), data(size), 7)
    del expected["val_loss"]
    assert run(Detector(), data(size), 7) == expected


class WithTorchmetrics(Labels):
    """One metric made anew for each batch, one that the task keeps."""

    def __init__(self):
        self.auroc = torchmetrics.classification.MulticlassAUROC(3)

    def metrics(self, outputs, batch):
        self.auroc.update(outputs.softmax(1), batch[1])
        return {
            **super().metrics(outputs, batch),
            **all_metrics(outputs, batch[1]),
            "auroc": self.auroc,
        }


def all_metrics(outputs, labels):
    """Of every kind of state: counts, floating sums, whole data, states that
    torchmetrics itself merges.
    """
    made = {
        "recall": torchmetrics.classification.MulticlassRecall(
            3, average=None
        ),
        "calibration": torchmetrics.classification.MulticlassCalibrationError(
            3
        ),
    }
    for metric in made.values():
        metric.update(outputs.softmax(1), labels)
    error = torchmetrics.MeanSquaredError()
    error.update(outputs[:, 0].float(), labels.float())
    correlation = torchmetrics.PearsonCorrCoef()
    correlation.update(outputs[:, 0].float(), labels.float())
    return {**made, "error": error, "correlation": correlation}


@pytest.mark.parametrize("microbatch", [7, 64, 500])
def test_torchmetrics_give_what_they_give_in_one_pass(microbatch):
    dataset = data(300)
    model = small_model()
    figures = run(WithTorchmetrics(), dataset, microbatch, model)
    with torch.no_grad():
        outputs = model.eval()(dataset.tensors[0])
    expected = {
        f"val_{name}": metric.compute()
        for name, metric in all_metrics(outputs, dataset.tensors[1]).items()
    }
    for index, value in enumerate(expected.pop("val_recall")):
        expected[f"val_recall_{index}"] = value
    auroc = torchmetrics.classification.MulticlassAUROC(3)
    expected["val_auroc"] = auroc(outputs.softmax(1), dataset.tensors[1])
    assert set(figures) == {
        "val_loss",
        "val_accuracy",
        "val_confidence",
        *expected,
    }
    for name, value in expected.items():
        assert figures[name] == pytest.approx(float(value), rel=1e-5), name


class Drawing(Tiny):
    """Draws from every generator wherever it can, and leaves a module in
    evaluation mode.
    """

    def model(self):
        self.net = super().model()
        return self.net

    def dataset(self, split):
        return Jittered(super().dataset(split))

    def transform(self, batch, training):
        return batch[0] + torch.randn_like(batch[0]) * random.random(), batch[
            1
        ]

    def forward(self, model, batch):
        model[1].eval()
        return model(batch[0]) + np.random.rand()

    def metrics(self, outputs, batch):
        return {"noise": torch.rand(len(outputs))}


class Jittered(Dataset[Any]):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, label = self.data[index]
        return inputs + random.random() + torch.randn(4), label


@pytest.mark.parametrize("loaders", [0, 1])
def test_evaluation_does_not_change_training(loaders, tmp_path):
    """However often it happens and whatever it draws; and its own figures do
    not follow from those before them.
    """
    changes = {
        "max_steps": 6,
        "data": {"num_workers": loaders},
        "checkpoint": {"every_steps": 99},
    }
    for every in (1, 3, 6):
        task = Drawing()
        train(
            tmp_path / str(every),
            task,
            evaluate={"every_steps": every},
            **changes,
        )
        assert [module.training for module in task.net] == [
            True,
            False,
            True,
            True,
            True,
        ]
    assert (
        curve(tmp_path / "1") == curve(tmp_path / "3") == curve(tmp_path / "6")
    )
    often = dict(evaluations(tmp_path / "1"))
    assert evaluations(tmp_path / "3") == [
        (step, often[step]) for step in (3, 6)
    ]
    assert evaluations(tmp_path / "6") == [(6, often[6])]


class Small(Labels):
    """A device that holds `fits` samples at once; with a metric that keeps all
    that it has seen.
    """

    def __init__(self, fits):
        self.fits = fits
        self.sizes = []
        self.curve = torchmetrics.classification.MulticlassAUROC(num_classes=3)

    def forward(self, model, batch):
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1 GiB"
            )
        return super().forward(model, batch)

    def metrics(self, outputs, batch):
        self.curve.update(outputs.softmax(1), batch[1])
        return {**super().metrics(outputs, batch), "auroc": self.curve}


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0, "resident": False},
        {"num_workers": 1},
        {"resident": True},
    ],
)
def test_a_batch_that_runs_out_of_memory_is_taken_in_halves(options, caplog):
    dataset = data(100)
    model = small_model()
    group = Group(0, 1, CPU)
    expected = run(Small(100), dataset, 40, model)
    task = Small(12)
    feed = task_feed(
        dataset, task, DataConfig(**options), CPU, sharers=1, seed=0
    )
    try:
        with caplog.at_level("INFO"):
            found = evaluate(
                ForwardPass(model, task, FP32, CPU), feed, 40, group
            )
        assert found == pytest.approx(expected, rel=1e-12)
        assert task.sizes == [40, 20, *[10] * 10], "none is tried twice"
        assert (
            "an evaluation batch of 40 does not fit (CUDA out of memory"
            in caplog.text
        )
        assert (
            "does not fit (CUDA out of memory. Tried to allocate 1 GiB): trying 10 at a time"
            in caplog.text
        )
        task.sizes.clear()
        assert (
            evaluate(ForwardPass(model, task, FP32, CPU), feed, 40, group)
            == found
        )
        assert task.sizes == [10] * 10, "what did not fit is known"
    finally:
        feed.close()
