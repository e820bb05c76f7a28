"""What a trial does to its process ends with it: the next has the losses that it has
alone.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.lane_tasks import POISON, Poison
from tests.on_ray.test_lanes import rows, run, sweep
from tests.specs import BASE, REPOSITORY
from tests.waits import HANG_S
from trainers.measure.run_log import read_log
from trainers.storage import Storage

pytestmark = pytest.mark.ray

ENDED = {
    "exit": ("error", "exit code 0"),
    "system exit": ("error", "exit code 3"),
    "interrupt": ("error", "KeyboardInterrupt was raised"),
    "abort": ("error", "SIGABRT"),
    "crash": ("error", "SIGSEGV"),
    "kill": ("error", "SIGKILL"),
    "kill group": ("error", "SIGKILL"),
    "alarm": ("error", "SIGALRM"),
    "stop": ("hung", ""),
}
"""The status of each, and what its message names."""
METHODS = [
    name[1:]
    for name in vars(Poison)
    if name.startswith("_") and not name.startswith("__")
]
TRAIN = {
    "task": "tests.lane_tasks:Poison",
    "max_steps": 6,
    "evaluate": {"every_steps": 3},
    "log_every_steps": 3,
}
TRAIN |= {"failure": {"hang_timeout_s": 20.0}}


def of(records, args):
    return next(record for record in records if record.config["task_args"] == args)


def alone(tmp_path, args):
    """The evaluations of the same run in a process of its own, by the command that
    trains.
    """
    file = tmp_path / "alone.yaml"
    keys = {
        key: value
        for key, value in BASE.items()
        if key not in ("checkpoint", "evaluate")
    }
    tree = {
        **keys,
        **TRAIN,
        "task_args": args,
        "storage_path": str(tmp_path / "runs"),
        "name": "alone",
    }
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
    return rows(
        [
            record
            for record in read_log(Storage(str(tmp_path / "runs" / "alone")))
            if "val_loss" in record
        ]
    )


@pytest.mark.full
def test_a_hostile_trial_affects_itself_only(tmp_path, driver):
    kinds = [*METHODS, *POISON]
    assert len(kinds) >= 40
    clean = {"drawn": 5}
    trials = [clean]
    for number, kind in enumerate(kinds, 1):
        trials.append({"poison": kind})
        if number % 10 == 0 or kind in ENDED or kind == kinds[-1]:
            trials.append({**clean, "after": kind})
    records = run(sweep(tmp_path, {"task_args": trials}, TRAIN))
    expected = rows(of(records, clean).curve)
    assert expected == alone(tmp_path, clean)
    for trial in trials:
        assert "poison" in trial or rows(of(records, trial).curve) == expected, trial
    for kind, (status, named) in ENDED.items():
        hostile = of(records, {"poison": kind})
        assert hostile.status == status, f"{kind}: {hostile.message}"
        assert named in hostile.message
