"""Warm equals fresh: a lane's 50th trial, after all that trials can do to a process, has the first one's losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.test_lanes import rows, run, sweep
from tests.specs import BASE, REPOSITORY
from tests.waits import HANG_S
from trainers.measure.run_log import read_log
from trainers.storage import Storage
from tune.trials.record import TrialRecord

pytestmark = pytest.mark.ray

# Those from which the process recovers, and those that make the lane start again.
MILD = ["flags", "grad", "rng", "hooks", "process", "child"]
TRAIN = {"task": "tests.lane_tasks:Poison", "max_steps": 6, "evaluate": {"every_steps": 3}, "log_every_steps": 3}


def of(records: list[TrialRecord], args: dict[str, Any]) -> TrialRecord:
    return next(record for record in records if record.config["task_args"] == args)


def alone(tmp_path: Path, args: dict[str, Any]) -> list[dict[str, float]]:
    """The evaluations of the same run in a process of its own, by the command that trains."""
    file = tmp_path / "alone.yaml"
    keys = {key: value for key, value in BASE.items() if key not in ("checkpoint", "evaluate")}
    tree = {**keys, **TRAIN, "task_args": args, "storage_path": str(tmp_path / "runs"), "name": "alone"}
    file.write_text(json.dumps(tree))
    done = subprocess.run(
        [sys.executable, "-m", "trainers", str(file)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return rows([record for record in read_log(Storage(str(tmp_path / "runs" / "alone"))) if "val_loss" in record])


@pytest.mark.full
def test_the_fiftieth_trial_is_the_first(tmp_path: Path, driver: Any) -> None:
    """Poison that can be put back, over and over; the same configuration first, last, and in a process of its own."""
    first, last = {"drawn": 5}, {"drawn": 5, "samples": 203}
    poisoned = [{"poison": [MILD[index % len(MILD)]], "samples": 100 + index} for index in range(48)]
    records = run(sweep(tmp_path, {"task_args": [first, *poisoned, last]}, TRAIN))
    assert len(records) == 50
    assert {record.status for record in records if "poison" not in record.config["task_args"]} == {"done"}
    assert rows(of(records, last).curve) == rows(of(records, first).curve) == alone(tmp_path, first)


@pytest.mark.full
def test_what_cannot_be_put_back_costs_a_restart_and_nothing_else(tmp_path: Path, driver: Any) -> None:
    """A leaked thread, a replaced module: the trial's own result stands, and the next one has a new process."""
    pids = tmp_path / "pids"
    trials: list[dict[str, Any]] = [
        {"drawn": 5},
        {"poison": ["thread"], "samples": 100},
        {"drawn": 5, "samples": 203},
        {"poison": ["modules"], "samples": 101},
        {"drawn": 5, "features": 12},
    ]
    records = run(sweep(tmp_path, {"task_args": [{**args, "pids": str(pids)} for args in trials]}, TRAIN))
    assert [record.status for record in records] == ["done"] * 5
    assert rows(records[0].curve) == rows(records[2].curve) == rows(records[4].curve)
    ran = pids.read_text().split()
    assert len(ran) == 5
    assert ran[0] == ran[1] != ran[2] == ran[3] != ran[4]
