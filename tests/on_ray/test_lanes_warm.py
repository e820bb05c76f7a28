"""Warm equals fresh: after all that trials can do to a process, a lane's next one has the first one's losses."""

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

pytestmark = pytest.mark.ray

MILD = ["flags", "dtype", "module_hooks", "torch_code", "seeds", "environment", "child_of_multiprocessing"]
"""From which the process recovers."""
TRAIN = {"task": "tests.lane_tasks:Poison", "max_steps": 6, "evaluate": {"every_steps": 3}, "log_every_steps": 3}


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
def test_a_poisoned_lane_trains_as_a_new_process(tmp_path: Path, driver: Any) -> None:
    """One configuration first, after what can be put back, after what costs a new process, and in one of its own."""
    pids, first = tmp_path / "pids", {"drawn": 5}
    trials = [
        first,
        *({"poison": [name], "samples": 100 + number} for number, name in enumerate(MILD)),
        {"drawn": 5, "samples": 203},
        {"poison": ["thread"], "samples": 99},
        {"drawn": 5, "features": 12},
    ]
    records = run(sweep(tmp_path, {"task_args": [{**args, "pids": str(pids)} for args in trials]}, TRAIN))
    healthy = [record for record in records if "poison" not in record.config["task_args"]]
    assert [record.status for record in healthy] == ["done"] * 3
    assert len(records) == len(trials)
    assert [rows(record.curve) for record in healthy] == [alone(tmp_path, first)] * 3
    *ran, last = pids.read_text().split()
    assert (len(ran), len(set(ran)), last in ran) == (len(trials) - 1, 1, False)
