"""Data and losses as users write them at the first try, on two ranks: as on one, or refused on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import run_processes
from tests.distributed.test_collectives import run
from tests.unit.test_first_try import Imbalanced, Table, Weighted
from trainers.errors import ConfigError

TASKS = {
    "random_split": Table("random_split"),
    "constructor": Table("numpy"),
    "weighted": Weighted("classes"),
    "entropy": Table("entropy in tensors"),
    "classes": Imbalanced("classes"),
    "rare": Imbalanced("rare"),
}


def train(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, task in TASKS.items():
        try:
            metrics = run(task, rank, world_size, **{"log_every_steps": 4, "checkpoint.every_steps": 3}).metrics  # type: ignore[arg-type]
            found[name] = metrics["train_loss"], metrics["val_loss"]
        except ConfigError as error:
            found[name] = error.field
    return found


def test_two_ranks_have_the_splits_and_losses_of_one(tmp_path: Path) -> None:
    [alone] = run_processes(1, train, tmp_path)
    for found in run_processes(2, train, tmp_path):
        for name in ("random_split", "constructor", "weighted"):
            assert found[name] == pytest.approx(alone[name], rel=1e-5), name
        assert found["entropy"] == 'dataset("train")'
        assert found["classes"] == found["rare"] == "loss()"
