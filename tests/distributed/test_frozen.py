"""`checkpoint.parameters: trained` on two ranks, replicated and sharded: the frozen part stays out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.distributed.processes import run_processes
from tests.specs import BASE, whole_state
from tests.tasks import Blobs
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.storage import Storage

STEPS = 12


class Based(Blobs):
    """The first layer is a frozen base."""

    def __init__(self) -> None:
        super().__init__(samples=96, dtype="float64")

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model


def train(rank: int, world_size: int, path: Path) -> list[str]:
    for name, strategy, steps in (
        ("ddp", "ddp", STEPS),
        ("fsdp", "fsdp", STEPS),
        ("cut", "fsdp", 7),
        ("cut", "ddp", 9),
        ("cut", "fsdp", STEPS),
    ):
        dotted = {"max_steps": steps, "strategy": strategy, "ema.decay": 0.9, "checkpoint.parameters": "trained"}
        config = build(TrainConfig, override(TrainConfig, BASE, dotted), "test")
        context = LocalContext(Storage(str(path / name)), "spawn", rank, world_size, rank, world_size)
        fit(Based(), config, context)
    return []


def state(path: Path) -> dict[str, Any]:
    return whole_state(Storage(str(path)), STEPS)


def test_the_frozen_part_stays_out_of_replicas_and_shards(tmp_path: Path) -> None:
    run_processes(2, train, tmp_path, tmp_path)
    expected = state(tmp_path / "ddp")
    assert list(expected["model"]) == ["2.weight", "2.bias"]
    assert list(expected["frozen"]) == ["0.weight", "0.bias"]
    for name in ("fsdp", "cut"):
        found = state(tmp_path / name)
        assert found["frozen"] == expected["frozen"]
        for one, other in ((found["model"], expected["model"]), (found["ema"]["own"], expected["ema"]["own"])):
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                torch.testing.assert_close(tensor, other[key], rtol=1e-10, atol=1e-12)
