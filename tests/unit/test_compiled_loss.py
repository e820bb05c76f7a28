"""`compile` with the loss inside: what a user's loss may do stays allowed, and what it
computes stays the same.
"""

import functools
import logging
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from tests.tasks import Blobs
from tests.unit.test_profiling import losses, train


class Counting(Blobs):
    """Reads and changes a counter and a running mean of the outputs in every call."""

    def __init__(self, **args):
        super().__init__(**args)
        self.calls = 0
        self.centre = torch.zeros(4)

    def loss(self, outputs, batch):
        self.calls += 1
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return F.cross_entropy(outputs - self.centre / self.calls, batch[1])


class Talking(Blobs):
    """Reads a value, branches by it and prints."""

    def loss(self, outputs, batch):
        loss = F.cross_entropy(outputs, batch[1])
        if loss.item() > 0.5:
            print(f"far: {loss.item():.3f}")
            return loss + outputs.square().mean()
        return loss


class Named(Blobs):
    """Reads a text that is another in every call: each would be compiled for itself."""

    def loss(self, outputs, batch):
        self.name = f"{getattr(self, 'name', '')}+"
        return F.cross_entropy(outputs, batch[1]) * (
            2 if self.name.endswith("++++") else 1
        )


class Disabled(Blobs):
    @torch.compiler.disable
    def loss(self, outputs, batch):
        assert not torch.compiler.is_compiling()
        return super().loss(outputs, batch)


@pytest.fixture(autouse=True)
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Graphs as ever, which run as they are: no code is generated."""
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )


@pytest.mark.parametrize(
    ("task", "graphs"),
    [
        # two of the model (training, evaluation), of the loss one for the counter at 0, 1
        # and any
        (Counting, 5),
        (Talking, 6),
        # torch's own limit: from then on as it is
        pytest.param(Named, 10, marks=pytest.mark.full),
        (Disabled, 2),
    ],
)
def test_what_a_loss_does_in_python_is_allowed(task, graphs, traced, tmp_path, caplog):
    """With `fullgraph` too; and torch says once, not in each step, what it cannot
    compile.
    """
    eager = task()
    compiled = task()
    settings = {"precision": "bf16"}
    train(tmp_path / "eager", eager, **settings)
    logging.getLogger("torch._dynamo").addHandler(caplog.handler)
    try:
        result = train(
            tmp_path / "compiled",
            compiled,
            **settings,
            compile="default",
            fullgraph=True,
        )
    finally:
        logging.getLogger("torch._dynamo").removeHandler(caplog.handler)
    assert losses(tmp_path / "compiled") == pytest.approx(
        losses(tmp_path / "eager"), rel=1e-5
    )
    for name in ("calls", "name"):
        assert vars(compiled).get(name) == vars(eager).get(name)
    assert result.compile["graphs"] <= graphs
    said = Counter(one.msg for one in caplog.records if one.levelno >= logging.WARNING)
    assert set(said.values()) <= {1}, said


@pytest.mark.parametrize(
    ("mode", "loss_mode"),
    [
        ("default", "default"),
        ("reduce-overhead", "default"),
        ("max-autotune", "max-autotune-no-cudagraphs"),
    ],
)
def test_cuda_graphs_are_left_to_the_model(mode, loss_mode, monkeypatch):
    """What the loss keeps would be overwritten by the next pass; a graph break in it is
    no error with `fullgraph`.
    """
    asked = compilations(monkeypatch)
    train(None, compile=mode, fullgraph=True, max_steps=2)
    assert asked == [
        {"mode": mode, "fullgraph": True, "dynamic": False},  # the model
        {"mode": loss_mode},
    ]


def compilations(monkeypatch):
    """The options of everything that is compiled from now on; it runs as it is."""
    asked = []

    def compile_nothing(called, **options):
        asked.append(options)
        return called

    monkeypatch.setattr(torch, "compile", compile_nothing)
    return asked
