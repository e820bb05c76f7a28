"""A sweep whose driver is killed, again and again: no finished trial runs again, and none is lost."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
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
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.campaign)])
def test_a_killed_driver_costs_no_finished_trial(tmp_path: Path, cluster: Cluster, driver: Any, kills: int) -> None:
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
    draw = random.Random(4)
    finished: dict[str, str] = {}
    command = [str(file)]
    for _ in range(kills):
        killed = start(command, cluster)
        wanted = len(finished) + draw.randint(1, 3)
        until(lambda number=wanted: len(names(journal)) >= number, "its records", process=killed, every_s=0.01)
        time.sleep(draw.random() * 0.5)
        killed.kill()
        killed.communicate()
        await_end_of_trials()
        before, finished = finished, {name: (journal / name).read_text() for name in names(journal)}
        assert before.items() <= finished.items(), "a record is never changed"
        command = ["resume", str(tmp_path / "sweep")]
    kept = {json.loads(text)["config"]["seed"] for text in finished.values()}
    runs_before = ran.read_text().split()
    last = start(command, cluster)
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
