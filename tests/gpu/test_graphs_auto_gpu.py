"""Steps that are captured by themselves: proved against the steps that they
replace, given up where those differ.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torchmetrics
from torch import nn

from tests.gpu.runs import CUDA, Images, train
from tests.specs import curve
from tests.tasks import Blobs
from trainers.step import cuda_graphs as graphs

pytestmark = pytest.mark.gpu

OPTIONS = {"deterministic": True, "max_steps": 40, "microbatch_size": 24}
CALLS = {"all": 0}


class Points(Blobs):
    """Nothing in a step but the model and the loss."""

    factor = 1.0

    def __init__(self):
        super().__init__(samples=24 * 10)

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * self.scale()

    def scale(self):
        return self.factor


class CountsItself(Points):
    calls = 0

    def scale(self):
        self.calls += 1
        return 1.0 / self.calls


class CountsInModule(Points):
    def forward(self, model, batch):
        model[1].calls = getattr(model[1], "calls", 0) + 1
        return (
            model(batch[0]) if model[1].calls < 20 else 0.5 * model(batch[0])
        )


class CountsInGlobal(Points):
    def scale(self):
        CALLS["all"] += 1
        return 1.0 if CALLS["all"] < 20 else 0.5


class CountsOnHost(Points):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def scale(self):
        self.count += 1
        return 1.0 if self.count < 20 else 0.5


class Draws(Points):
    def scale(self):
        return random.random()


class SetBetweenSteps(Points):
    def after_step(self, model, step):
        self.factor = 1.0 / step


class Rebinds(Points):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones((), device="cuda")

    def scale(self):
        self.mean = 0.5 * self.mean + 0.25
        return self.mean


class SetLate(Points):
    def after_step(self, model, step):
        self.factor = 0.5 if step >= 50 else 1.0


class SetByTheData(Points):
    def __init__(self):
        super().__init__()
        self.ticks = itertools.count()

    def transform(self, batch, training):
        if next(self.ticks) == 55:
            self.factor = 0.5
        return batch


class Notes(Points):
    steps = 0

    def after_step(self, model, step):
        self.steps = step


class Reads(Points):
    """Waits for its loss on the host."""

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return loss * (2.0 if float(loss.detach()) > 100.0 else 1.0)


class Measures(Images):
    """Evaluations that write into what the task holds."""

    def __init__(self, **options):
        super().__init__(**options)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)

    def metrics(self, outputs, batch):
        self.accuracy.to(outputs.device).update(outputs, batch[1])
        return {"accuracy": self.accuracy}


class Wide(Points):
    """A step holds 200 MB for a while."""

    def forward(self, model, batch):
        outputs = model(batch[0])
        held = (
            torch.zeros(len(outputs), 2_000_000, device=outputs.device)
            if model.training
            else outputs
        )
        return outputs + held[:, :1] * 0


def as_they_are(task, monkeypatch, **options):
    """The run of the same steps, of which none is captured."""
    CALLS["all"] = 0
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "CAPTURE_AFTER_STEPS", 10**9)
        return train(CUDA, task=task, **OPTIONS | options)


@pytest.fixture
def worthwhile(monkeypatch):
    """Whatever it brings: no clock decides."""
    monkeypatch.setattr(graphs, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(graphs, "_HOST_SHARE", 0.0)
    CALLS["all"] = 0


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_are_captured_and_proved(precision, tmp_path, monkeypatch):
    """Dropout, BatchNorm, clipping and a loss scaler among what is proved; the
    curve is that of the plain steps.
    """
    options = {"precision": precision, "clip_grad_norm": 1.0, "max_steps": 120}
    options |= {"evaluate": {"every_steps": 15}}
    task = Measures(samples=120)
    captured = train(CUDA, tmp_path / "captured", task, **OPTIONS | options)
    assert captured.cuda_graphs.startswith("captured: ")
    assert captured.cuda_graphs.endswith("proved after 100 replays")
    assert captured.cuda_graphs in str(captured)
    monkeypatch.setattr(graphs, "CAPTURE_AFTER_STEPS", 10**9)
    eager = train(CUDA, tmp_path / "eager", task, **OPTIONS | options)
    assert eager.cuda_graphs == ""
    assert curve(tmp_path / "captured") == curve(tmp_path / "eager")
    assert captured.metrics == eager.metrics


PLANTED = {
    CountsItself: "`CountsItself.calls`",
    CountsInModule: "`model.1.calls`",
    CountsInGlobal: "CALLS.all`",
    CountsOnHost: "`CountsOnHost.count`",
    Draws: "differs from",
    SetBetweenSteps: "after 1 replays `0.weight` differs",
    SetLate: "after 47 replays `0.weight` differs",
    SetByTheData: "after 60 replays `0.weight` differs",
    Notes: "`Notes.steps` changes between steps",
    Rebinds: "`Rebinds.mean`",
}


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize("kind", PLANTED)
def test_python_that_a_replay_leaves_out_is_found_before_it_has_trained(
    kind, caplog, monkeypatch
):
    """What neither a step nor after_step() changes: within twenty replays."""
    options = OPTIONS | {"max_steps": 80}
    result = train(CUDA, task=kind(), **options)
    assert result.cuda_graphs.startswith("not captured: ")
    assert PLANTED[kind] in result.cuda_graphs
    differs = "differs" in result.cuda_graphs
    assert caplog.text.count("not replayed any more") == differs
    if kind is not SetByTheData:
        eager = as_they_are(kind(), monkeypatch, **options)
        assert result.metrics == eager.metrics


@pytest.mark.usefixtures("worthwhile")
@pytest.mark.parametrize(
    "options", [{}, {"cuda_graphs": True}], ids=["auto", "asked"]
)
def test_a_graph_that_leaves_something_else_is_given_up(options, monkeypatch):
    """As a capture that missed an operation would: also where it was asked for."""
    record = graphs.CudaCapture.record

    def spoilt(self, work):
        record(self, work)
        return lambda: None

    monkeypatch.setattr(graphs.CudaCapture, "record", spoilt)
    result = train(CUDA, task=Points(), **OPTIONS | options)
    assert result.cuda_graphs.startswith(
        "not captured: after 0 replays `0.weight`"
    )
    assert result.metrics == as_they_are(Points(), monkeypatch).metrics


@pytest.mark.usefixtures("worthwhile")
def test_without_room_steps_run_as_they_are(monkeypatch):
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 360 * 2**20) / total
    )
    result = train(CUDA, task=Wide(), **OPTIONS | {"max_steps": 12})
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.cuda_graphs == "not captured: there is no memory for it"
    assert (
        result.metrics
        == as_they_are(Wide(), monkeypatch, max_steps=12).metrics
    )


@pytest.mark.usefixtures("worthwhile")
def test_a_step_that_cannot_be_captured_runs_as_it_is(
    monkeypatch,
):
    """With dropout after it: random numbers go on."""

    class Both(Reads):
        def model(self):
            return nn.Sequential(nn.Dropout(0.2), super().model())

    result = train(CUDA, task=Both(), **OPTIONS)
    assert result.cuda_graphs.startswith("not captured: ")
    assert "captur" in result.cuda_graphs.removeprefix("not captured")
    assert result.metrics == as_they_are(Both(), monkeypatch).metrics


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("LEAST_GAIN", 1e9, "a step takes"),
        ("_HOST_SHARE", 2.0, "the device is busy"),
    ],
)
def test_what_brings_little_is_not_captured(limit, value, said, monkeypatch):
    monkeypatch.setattr(graphs, "_HOST_SHARE", 0.0)
    monkeypatch.setattr(graphs, limit, value)
    result = train(CUDA, task=Points(), **OPTIONS)
    assert result.cuda_graphs.startswith(f"not captured: {said}")
    assert result.metrics == as_they_are(Points(), monkeypatch).metrics
