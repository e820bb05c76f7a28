"""Every function of `tests/on_ray/functions` does its work with its first configuration, without Ray."""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from ray.train.v2.api.context import LocalTrainContext

from tests.on_ray.functions import pytorch
from tests.on_ray.functions.table import TRAIN, TUNE


class Shard:
    """Iterates as a dataset of Ray does."""

    def iter_torch_batches(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        points, labels = pytorch.rows().tensors
        for start in range(0, len(points), batch_size):
            yield {"points": points[start : start + batch_size], "label": labels[start : start + batch_size]}


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What Ray's local mode reads and lacks; the process is left as it was."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    storage = SimpleNamespace(experiment_fs_path=str(tmp_path))
    monkeypatch.setattr(LocalTrainContext, "get_storage", lambda self: storage)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.mark.parametrize("name", TRAIN)
def test_a_function_for_ray_train(name: str, tmp_path: Path) -> None:
    case = TRAIN[name]
    shards: dict[str, Any] = {"train": Shard()} if case.trainer else {}
    trainer = TorchTrainer(
        case.function,
        train_loop_config=case.grid[0],
        scaling_config=ray.train.ScalingConfig(num_workers=0),
        run_config=ray.train.RunConfig(name=name, storage_path=str(tmp_path)),
        datasets=shards,
    )
    result = trainer.fit()
    assert result.metrics is not None
    assert math.isfinite(result.metrics["loss"])


@pytest.mark.parametrize("name", TUNE)
def test_a_function_for_tune(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.tune.report", lambda metrics, checkpoint=None: reports.append(metrics))
    monkeypatch.setattr("ray.tune.get_checkpoint", lambda: None)
    returned = TUNE[name].function(TUNE[name].grid[0])
    assert math.isfinite((returned or reports[-1])["loss"])


@pytest.mark.parametrize("place", TRAIN["refuses"].fails)
def test_what_is_expected_to_fail_fails(place: int) -> None:
    case = TRAIN["refuses"]
    local = ray.train.ScalingConfig(num_workers=0)
    trainer = TorchTrainer(case.function, train_loop_config=case.grid[place], scaling_config=local)
    with pytest.raises((ValueError, MemoryError)):
        trainer.fit()
