"""Killed, and resumed on another number of workers: the same samples, the same curve."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.specs import REPOSITORY, evaluations, losses, tree
from trainers.data.stream_reader import digest
from trainers.errors import RunFailedError
from trainers.launch.local import run_local, run_spawn
from trainers.launch.spec import RunSpec, make_spec


def spec(tmp_path: Path, name: str, workers: int, kill_at: Sequence[int] = (), **changes: Any) -> RunSpec:
    args: dict[str, Any] = {"dtype": "float64"}
    if kill_at:
        args |= {"fail_at": list(kill_at), "failure": "kill", "marker": str(tmp_path / f"{name}-killed")}
    changes = {"name": name, "launcher": "spawn", "max_steps": 40, "checkpoint__every_steps": 3, **changes}
    made = tree(tmp_path, task_args=args, scaling__num_workers=workers, **changes)
    return make_spec(made, "test", REPOSITORY, own_workers=False)  # three workers on two cores will do


def run_killed(killed: RunSpec, marker: str) -> None:
    with pytest.raises(RunFailedError) as met:
        run_spawn(killed)
    assert met.value.status == "node_lost"
    assert Path(killed.config.task_args["marker"]).with_name(marker).exists()


def test_killed_and_resumed_on_other_numbers_of_workers(tmp_path: Path) -> None:
    unbroken = spec(tmp_path, "unbroken", 1, launcher="local")
    run_local(unbroken)
    kills = {1: 8, 2: 9, 3: 10}
    for workers, kill_at in kills.items():
        run_killed(spec(tmp_path, "moved", workers, [*kills.values()]), f"moved-killed-{kill_at}")
    last = spec(tmp_path, "moved", 2, [*kills.values()])
    result = run_spawn(last)

    assert result.status == "done"
    assert losses(last) == pytest.approx(losses(unbroken), rel=1e-12)
    assert len(losses(last)) == 40
    for ours, theirs in zip(evaluations(last), evaluations(unbroken), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def test_so_is_a_run_whose_batch_size_changes_in_mid_epoch(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "batch_schedule": [{"until_samples": 130, "size": 12}, {"until_samples": 300, "size": 31}, {"size": 50}],
        "global_batch_size": None,
        "microbatch_size": 7,
        "lr_scaling": {"rule": "linear", "base_batch_size": 12},
        "lr_schedule__name": "cosine",
        "lr_schedule__warmup": 0.1,
        "max_steps": None,
        "epochs": 6,
    }
    unbroken = spec(tmp_path, "unbroken", 1, launcher="local", **changes)
    result = run_local(unbroken)
    run_killed(spec(tmp_path, "moved", 2, [24], **changes), "moved-killed")
    moved = spec(tmp_path, "moved", 3, [24], **changes)
    assert run_spawn(moved).samples == result.samples == 6 * 203
    assert losses(moved) == pytest.approx(losses(unbroken), rel=1e-12)
    assert len(losses(moved)) == result.steps


def state(of: RunSpec) -> Any:
    """All that the last checkpoint holds but the time that it took."""
    kept = torch.load(io.BytesIO(of.storage.read("checkpoints/step-000000000040/state.pt")), weights_only=True)
    assert kept["position"].pop("train_time_s") > 0
    return kept


def test_at_a_fixed_number_of_workers_the_curve_is_bit_equal(tmp_path: Path) -> None:
    unbroken, broken = spec(tmp_path, "unbroken", 3), spec(tmp_path, "broken", 3, kill_at=[22])
    run_spawn(unbroken)
    run_killed(broken, "broken-killed")
    run_spawn(broken)
    assert losses(broken) == losses(unbroken)
    assert evaluations(broken) == evaluations(unbroken)
    ours, theirs = (state(one) for one in (broken, unbroken))
    assert digest(ours) == digest(theirs)
