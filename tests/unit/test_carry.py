"""Truncated backpropagation through time beside a plain PyTorch loop: what is carried, kept, and left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import TensorDataset

from tests.unit.test_loop import Context, Power, assert_same_run, config
from tests.unit.test_recipes import BATCH, SEED, SETTINGS, descend
from trainers.errors import ConfigError
from trainers.loop.fit import fit
from trainers.task import Task

IN_ORDER: dict[str, Any] = SETTINGS | {"data": {"shuffle": False}}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 9)
        self.double()

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(self.words(words), state)
        return self.out(hidden), state


class Text(Task):
    """Six texts side by side, five words of each in a step; the last step of an epoch has three of them."""

    def model(self) -> nn.Module:
        return Words()

    def dataset(self, split: str) -> TensorDataset:
        words = torch.randint(9, (33, 6), generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(words[:, :-1], words[:, 1:])

    def initial_carry(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(len(batch[0]), 1, 6, dtype=torch.float64)
        return zeros, zeros.clone()

    def forward_carried(self, model: nn.Module, batch: Any, carry: Any) -> tuple[Tensor, Any]:
        outputs, state = model(batch[0], tuple(one.transpose(0, 1).contiguous() for one in carry))
        return outputs, tuple(one.transpose(0, 1) for one in state)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


def plain() -> list[float]:
    torch.manual_seed(SEED)
    task = Text()
    model: Any = task.model()
    optimizer, losses = SGD(model.parameters(), 0.2), []
    words, targets = task.dataset("train").tensors
    for _ in range(2):
        state = (torch.zeros(1, BATCH, 6).double(), torch.zeros(1, BATCH, 6).double())
        for at in torch.arange(33).split(BATCH):
            outputs, state = model(words[at], tuple(one[:, : len(at)].detach().contiguous() for one in state))
            losses.append(descend(optimizer, F.cross_entropy(outputs.flatten(0, 1), targets[at].flatten())))
    return losses


@pytest.mark.parametrize("microbatch", [1, 4, 6])
def test_the_curve_is_that_of_a_plain_loop(microbatch: int, tmp_path: Path) -> None:
    context = Context(tmp_path)
    fit(Text(), config(**IN_ORDER, microbatch_size=microbatch, evaluate={"every_steps": 2}), context)
    found = [row["train_loss"] for row, checkpoint in context.reports if checkpoint]
    assert len(found) == 12
    assert found == pytest.approx(plain(), rel=1e-12)


@pytest.mark.parametrize(("at_step", "microbatch"), [(2, 6), (5, 4), (6, 6), (9, 1)])
def test_a_power_cut_changes_nothing(at_step: int, microbatch: int, tmp_path: Path) -> None:
    """In the middle of an epoch, before its short last step, and at its end."""
    settings = config(**IN_ORDER, microbatch_size=microbatch)
    fit(Text(), settings, Context(tmp_path / "whole"))
    with pytest.raises(Power):
        fit(Text(), settings, Context(tmp_path / "cut", cut_at_step=at_step))
    fit(Text(), settings, Context(tmp_path / "cut"))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_carry_that_is_not_of_samples_is_refused() -> None:
    class Layers(Text):
        def forward_carried(self, model: nn.Module, batch: Any, carry: Any) -> tuple[Tensor, Any]:
            outputs, state = super().forward_carried(model, batch, carry)
            return outputs, tuple(one.transpose(0, 1) for one in state)

    with pytest.raises(ConfigError, match="must have a row for each of the 6 samples"):
        fit(Layers(), config(**IN_ORDER, microbatch_size=6), Context(None))


@pytest.mark.parametrize("changes", [
    {"data": {"shuffle": True}}, {"noise_scale": True}, {"strategy": "fsdp"}, {"cuda_graphs": True, "device": "auto"},
])  # fmt: skip
def test_what_would_break_the_order_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a task that carries something from step to step"):
        fit(Text(), config(**IN_ORDER | changes), Context(None))
