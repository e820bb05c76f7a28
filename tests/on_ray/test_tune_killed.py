"""A sweep whose driver is killed, again and again: no finished trial runs again, and none is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Cluster
from tests.on_ray.embedded import await_end_of_trials
from tests.specs import BASE, REPOSITORY
from tests.waits import HANG_S, until

pytestmark = pytest.mark.ray

TRIALS = 16


@pytest.mark.full
def test_a_killed_driver_costs_no_finished_trial(tmp_path: Path, cluster: Cluster, driver: Any) -> None:
    ran, file = tmp_path / "ran", tmp_path / "sweep.yaml"
    keys = {key: value for key, value in BASE.items() if key not in ("launcher", "checkpoint")}
    tree = {
        "name": "sweep",
        "storage_path": str(tmp_path),
        "train": {**keys, "task": "tests.lane_tasks:Signed", "task_args": {"file": str(ran), "pause_s": 0.02}},
        "space": {"seed": list(range(TRIALS))},
        "objective": {"metric": "val_loss"},
        "lanes": 1,
    }
    file.write_text(yaml.safe_dump(tree))
    journal = tmp_path / "sweep" / "trials"
    killed = start([str(file)], cluster)
    until(lambda: len(names(journal)) >= 2, "its records", process=killed, every_s=0.01)
    killed.kill()
    killed.communicate()
    await_end_of_trials()
    finished = {name: (journal / name).read_text() for name in names(journal)}
    kept = {json.loads(text)["config"]["seed"] for text in finished.values()}
    runs_before = ran.read_text().split()
    last = start(["resume", str(tmp_path / "sweep")], cluster)
    out, _ = last.communicate(timeout=HANG_S)
    assert last.returncode == 0, out
    assert len(names(journal)) == TRIALS
    assert all((journal / name).read_text() == text for name, text in finished.items())
    again = {int(seed) for seed in ran.read_text().split()[len(runs_before) :]}
    assert again == set(range(TRIALS)) - kept, "only what had not finished runs"


def names(journal: Path) -> list[str]:
    return [path.name for path in journal.glob("*.json")]


def start(arguments: list[str], cluster: Cluster) -> subprocess.Popen[Any]:
    return subprocess.Popen(
        [sys.executable, "-m", "tune", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
