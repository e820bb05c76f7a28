"""Captured steps, with a capture that replays Python in place of kernels: what
is replayed when, and on which data.

What only CUDA can show is in tests/gpu/test_graphs_gpu.py.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.model.optimizer import JoinedOptimizer
from trainers.model.precision import resolve_precision
from trainers.step.cuda_graphs import GraphedStep
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep
from trainers.task import Task

CPU = torch.device("cpu")
EPOCH = [[4, 4], [4, 4], [4, 4], [3]]  # three full steps and a short one
# Exact in float32, the format of a captured learning rate, so that eager and
# captured steps agree to the last bit.
LR = 0.125
FACTORS = [0.25, 0.5, 1.0, 0.75, 0.5, 0.25, 0.125]


class Fake:
    """A capture as CUDA's: recording does nothing, and what is replayed has
    only what it was recorded with.
    """

    def __init__(self, failure=None):
        self.events = []
        self.failure = failure
        self.recording = lambda: None

    def run(self, work):
        self.events.append("run")
        work()

    def record(self, work):
        self.events.append("record")
        self.recording()
        if self.failure is not None:
            raise self.failure

        def replay():
            self.events.append("replay")
            work()

        return replay


class Step(GraphedStep):
    """Leaves no events of the passes that are thrown away: these are proofs."""

    def _pass(self, step):
        events = self._capture.events
        before = list(events)
        found = super()._pass(step)
        events[:] = before
        return found


class Regression(Task):
    def loss(self, outputs, batch):
        targets = batch["y"] if isinstance(batch, dict) else batch[1]
        return (outputs.squeeze(-1) - targets).square().mean()

    def forward(self, model, batch):
        return model(batch["x"] if isinstance(batch, dict) else batch[0])


class Weighted(Regression):
    """Another weight than samples, so that shares are tensors."""

    def weight(self, batch):
        return batch[1].abs().sum()


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
    )


def adamw(parameters):
    return AdamW(parameters, lr=LR, fused=True)


def adam(parameters):
    return Adam(parameters, lr=LR, fused=True)


def sgd(parameters):
    return SGD(parameters, lr=LR, momentum=0.5, fused=True)


def several(parameters):
    first, *others = parameters
    return JoinedOptimizer({"first": sgd([first]), "others": adam(others)})


def make(capture, optimizer=adamw, task=None, precision="fp32"):
    net = model()
    forward = ForwardPass(
        net, task or Regression(), resolve_precision(precision, CPU), CPU
    )
    group = Group(0, 1, CPU)
    if capture is None:
        return TrainStep(forward, optimizer(net.parameters()), group, 1.0)
    return Step(forward, optimizer(net.parameters()), group, 1.0, capture)


def data(sizes, generator):
    for size in sizes:
        yield (
            torch.randn(size, 4, generator=generator),
            torch.randn(size, generator=generator),
        )


def train(step, plans, factors=FACTORS):
    """The loss of every step; other data in each."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout
    losses = []
    for number, sizes in enumerate(plans):
        step.set_lr(factors[number % len(factors)])
        step(data(sizes, generator), sizes, sum(sizes), idle=False)
        losses.append(step.take_losses(1)()["train_loss"][0])
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "task", [Regression(), Weighted()], ids=["samples", "weights"]
)
@pytest.mark.parametrize("optimizer", [adamw, adam, sgd, several])
def test_captured_training_is_training(optimizer, task, precision):
    """New data, a learning rate that changes with every step, accumulation,
    and a short step between the replays.
    """
    capture = Fake()
    captured = make(capture, optimizer, task, precision)
    plain = make(None, optimizer, task, precision)
    assert train(captured, EPOCH * 3) == train(plain, EPOCH * 3)
    assert capture.events.count("replay") == 6
    for ours, theirs in zip(
        captured.forward.model.parameters(),
        plain.forward.model.parameters(),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "varied", ["shape", "format", "layout", "word", "nesting", "unknown"]
)
def test_batches_that_differ_are_not_replayed(varied):
    def batch(number):
        x = torch.ones(4, 4)
        y = torch.ones(4)
        if number < 4:
            return {"x": x, "y": y, "name": "a"}
        other = {
            "shape": {"x": torch.ones(4, 1, 4), "y": torch.ones(4, 1)},
            "format": {"x": x, "y": y.double()},
            "layout": {"x": x.T, "y": y},
            "word": {"x": x, "y": y, "name": "b"},
            "nesting": {"x": x, "y": y, "more": [x]},
            "unknown": {"x": x, "y": y, "name": {1}},
        }
        return {"name": "a"} | other[varied]

    capture = Fake()
    step = make(capture)
    for number in range(7):
        step(iter([batch(number)]), [4], 4, idle=False)
    assert capture.events == ["run"] * 3 + ["record", "replay"] + ["run"] * 3


def test_a_step_of_another_size_is_captured_in_its_place():
    capture = Fake()
    step = make(capture)
    train(step, [[8]] * 5)
    step.resized()
    train(step, [[4, 4]] * 5)
    first = capture.events[:6]
    second = capture.events[6:]
    assert first == second == ["run"] * 3 + ["record", "replay", "replay"]


def test_what_a_graph_writes_is_what_others_read():
    """A graph writes to addresses: a step that rebinds one of these would
    leave them stale.
    """
    step = make(Fake(), precision="fp16")
    train(step, [[4, 4]] * 2)

    def places():
        state = [
            value
            for moments in step.optimizer.state.values()
            for value in moments.values()
        ]
        scaler = [step.scaler._scale, step.scaler._growth_tracker]
        own = [
            value for value in vars(step).values() if isinstance(value, Tensor)
        ]
        rates = [group["lr"] for group in step.optimizer.param_groups]
        tensors = [
            *step.forward.model.parameters(),
            *state,
            *scaler,
            *own,
            *rates,
        ]
        assert all(isinstance(tensor, Tensor) for tensor in tensors)
        return [tensor.data_ptr() for tensor in tensors]

    before = places()
    train(step, [[4, 4]] * 2)
    assert places() == before
    assert len(before) > 15


def test_a_loaded_checkpoint_does_not_take_the_learning_rate_away():
    """Loading replaces the tensors of the groups, and a graph reads the old ones."""
    capture = Fake()
    plain = make(None)
    step = make(capture)
    first = train(step, [[4]] * 5)
    second = train(plain, [[4]] * 5)
    for one in (step, plain):
        one.optimizer.load_state_dict(
            copy.deepcopy(one.optimizer.state_dict())
        )
    rates = [group["lr"] for group in step.optimizer.param_groups]
    assert first + train(step, [[4]] * 5) == second + train(plain, [[4]] * 5)
    assert all(
        group["lr"] is not rate
        for group, rate in zip(step.optimizer.param_groups, rates, strict=True)
    )


def test_a_step_that_cannot_be_captured_is_an_error_with_torchs_reason():
    failure = RuntimeError(
        "CUDA error: operation failed due to a previous error during capture"
    )
    failure.__context__ = RuntimeError(
        "CUDA error: operation not permitted when stream is capturing\nmore words"
    )
    step = make(Fake(failure))
    with pytest.raises(ConfigError) as raised:
        train(step, [[4]] * 5)
    text = str(raised.value)
    assert text.startswith(
        "`cuda_graphs: true` needs a step in which the host never waits for the device"
    )
    assert (
        "(CUDA error: operation not permitted when stream is capturing)"
        in text
    )
    assert "set `cuda_graphs: false`" in text
    assert [group["capturable"] for group in step.optimizer.param_groups] == [
        False
    ]
