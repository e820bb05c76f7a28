"""A Task's hooks on two ranks: each rank calls them, with the same figures, and they may meet the other rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.processes import run_processes
from tests.distributed.test_collectives import run
from tests.tasks import Blobs


class Told(Blobs):
    def __init__(self) -> None:
        super().__init__(samples=96, dtype="float64")
        self.told: list[Any] = []

    def after_step(self, model: nn.Module, step: int) -> None:
        total = torch.tensor(float(step))
        dist.all_reduce(total)
        self.told.append((step, float(total)))

    def on_evaluate(self, metrics: dict[str, float], step: int) -> None:
        self.told.append((step, metrics))


def train(rank: int, world_size: int) -> list[Any]:
    task = Told()
    result = run(task, rank, world_size, **{"microbatch_size": 5, "evaluate.every_steps": 7})
    assert task.told[-1] == (7, {name: one for name, one in result.metrics.items() if name.startswith("val_")})
    return task.told


def test_every_rank_is_told_the_same(tmp_path: Path) -> None:
    first, second = run_processes(2, train, tmp_path)
    assert first == second
    assert first[:-1] == [(step, 2.0 * step) for step in range(1, 8)]
