"""Activation checkpointing: less is kept, and losses, gradients and buffers
are those of keeping everything.
"""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tests.unit.test_step import CPU, Regression, make_step, run_step
from trainers.errors import ConfigError
from trainers.model.activations import checkpoint_activations
from trainers.model.precision import TABLE
from trainers.step.flops import count_flops
from trainers.step.forward import ForwardPass

WIDTH = 16


class Block(nn.Module):
    """Products, a nonlinearity, what is drawn, statistics, and a buffer that a
    forward reads and changes.
    """

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("direction", torch.ones(WIDTH))
        self.calls = 0

    def forward(self, rows, scale=1.0):
        self.calls += 1
        with torch.no_grad():
            self.direction.mul_(0.9).add_(rows.mean(0), alpha=0.1)
        hidden = nn.functional.gelu(self.into(rows * self.direction.clone()))
        return rows + scale * self.dropout(self.norm(self.out(hidden)))


def model(block=Block):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, WIDTH),
        nn.Sequential(*(block() for _ in range(3))),
        nn.Linear(WIDTH, 1),
    ).double()


def data(samples=24):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        torch.randn(samples, generator=generator, dtype=torch.float64),
    )


def trained(mode, sizes, block=Block, compiled=False):
    net = model(block)
    checkpoint_activations(net, mode, compiled)
    if compiled:
        net.compile(backend="aot_eager", dynamic=False)
    step = make_step(
        net, Regression(), AdamW(net.parameters(), lr=0.01, fused=True)
    )
    curve = []
    torch.manual_seed(5)
    for _ in range(4):
        run_step(step, data(), sizes)
        curve.append(step.take_losses(1)()["train_loss"][0])
    return curve, net.state_dict()


@pytest.mark.parametrize("sizes", [[24], [12, 12]], ids=str)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_training_is_that_of_keeping_everything_to_the_last_bit(mode, sizes):
    curve, state = trained("none", sizes)
    again, other = trained(mode, sizes)
    assert again == curve
    assert other.keys() == state.keys()
    assert all(torch.equal(other[name], state[name]) for name in state), (
        "buffers change once a step"
    )


class Calm(Block):
    """The same without a buffer that a forward changes and reads."""

    def forward(self, rows, scale=1.0):
        return rows + self.dropout(
            self.norm(self.out(nn.functional.gelu(self.into(rows))))
        )


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_compiled_model_trains_the_same(mode):
    curve, state = trained("none", [24], Calm, compiled=True)
    again, other = trained(mode, [24], Calm, compiled=True)
    assert again == pytest.approx(curve, rel=1e-12)
    for name in state:
        torch.testing.assert_close(
            other[name], state[name], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_buffer_that_a_graph_would_read_changed_is_refused(mode):
    """torch computes again with what the first pass has left, and says nothing."""
    net = model()
    checkpoint_activations(net, mode, compiled=True)
    with pytest.raises(
        ConfigError,
        match=r"whose forward\(\) changes a buffer, here `direction`",
    ):
        net(data()[0])


def test_a_block_runs_once_more_and_not_where_no_gradient_is_wanted():
    net = model()
    checkpoint_activations(net, "full", compiled=False)
    with torch.no_grad():
        net(data()[0])
    assert [block.calls for block in net[1]] == [1, 1, 1]
    net(data()[0]).sum().backward()
    assert [block.calls for block in net[1]] == [3, 3, 3]


def test_what_is_computed_again_is_no_flop_of_the_model():
    task = Regression()
    dataset = torch.utils.data.TensorDataset(*data())

    def count(mode):
        net = model()
        checkpoint_activations(net, mode, compiled=False)
        return count_flops(
            ForwardPass(net, task, TABLE["fp32"], CPU),
            dataset,
            torch.arange(8),
        )

    assert count("full") == count("none") is not None
