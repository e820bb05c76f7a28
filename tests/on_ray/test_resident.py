"""Lanes that outlive their sweep, on a cluster that does (tune/lanes/kept.py, tune/sweeps/resident.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator

from tests.conftest import Cluster, Done
from tests.specs import BASE, REPOSITORY
from trainers import residents

pytestmark = [pytest.mark.ray, pytest.mark.full]

MINE = """
import os
import torch
from tests.tasks import Blobs

class Mine(Blobs):
    def metrics(self, outputs, batch):
        shape = (len(outputs),)
        return {"process": torch.full(shape, float(os.getpid()), dtype=torch.float64), "edit": torch.ones(shape)}
"""


@pytest.fixture
def sweep(tmp_path: Path, command: Callable[..., Done], cluster: Cluster, driver: Any) -> Callable[..., Done]:
    """Run `python -m tune` with a user's sweep; lanes may outlive it."""
    (tmp_path / "mine.py").write_text(MINE)
    keys = {key: value for key, value in BASE.items() if key not in ("launcher", "checkpoint")}
    tree = {
        "name": "first",
        "storage_path": str(tmp_path / "runs"),
        "train": {**keys, "task": "mine:Mine"},
        "space": {"seed": [0, 1]},
        "objective": {"metric": "val_loss"},
        "lanes": 1,
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))

    def run(*arguments: str) -> Done:
        environment = {"PACELINE_RESIDENT": "1", "PYTHONPATH": str(REPOSITORY)}
        given = ["-m", "tune", str(tmp_path / "sweep.yaml"), *arguments]
        return command(*given, env=environment, ray_address=cluster.address, cwd=tmp_path)

    return run


def found(directory: Path, sweep: str, metric: str) -> set[float]:
    """A metric of all trials of a sweep."""
    records = [json.loads(file.read_text()) for file in (directory / "runs" / sweep / "trials").iterdir()]
    return {record["metrics"][metric] for record in records}


def status() -> dict[str, Any] | None:
    """What the resident driver says of itself."""
    return next(iter(residents.drivers().values()), None)


def wait(condition: Callable[[], bool], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def gone() -> bool:
    return status() is None and not residents.sockets()


def test_the_next_sweep_takes_the_lanes_over_and_anybody_else_gets_what_they_hold(
    tmp_path: Path, sweep: Callable[..., Done], cluster: Cluster
) -> None:
    done = sweep()
    assert done.code == 0, done.err
    assert "report.html" in done.out
    known = status()
    assert known is not None
    assert (known["busy"], known["lanes"]) == (False, 1)
    assert 200 < known["for_s"] <= 300

    (tmp_path / "mine.py").write_text(MINE.replace("torch.ones(shape)", "2 * torch.ones(shape)"))
    done = sweep("--name", "second")
    assert done.code == 0, done.err
    assert found(tmp_path, "first", "val_edit") == {1.0}
    assert found(tmp_path, "second", "val_edit") == {2.0}
    processes = found(tmp_path, "first", "val_process")
    assert len(processes) == 1
    assert found(tmp_path, "second", "val_process") == processes
    again = status()
    assert again is not None
    assert again["pid"] == known["pid"]

    done = sweep("--name", "third", "--train.task", "mine:Nothing")
    assert done.code == 2
    assert "Nothing" in done.err

    script = "import ray; ray.init(); print(ray.get(ray.remote(num_cpus=2)(lambda: 7).remote()))"
    job = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.stdout.strip() == "7", job.stderr
    wait(gone, 30)


def test_an_elastic_run_that_reserves_nothing_yet_gets_what_they_hold(sweep: Callable[..., Done]) -> None:
    assert sweep().code == 0
    assert status() is not None
    coordinator = get_or_create_autoscaling_coordinator()
    ask = {"requester_id": "an elastic run", "resources": [{"CPU": 1}], "expire_after_s": 60}
    ray.get(coordinator.request_resources.remote(**ask))
    try:
        wait(gone, 30)
    finally:
        ray.get(coordinator.cancel_request.remote("an elastic run"))


def test_they_end_after_their_time(sweep: Callable[..., Done]) -> None:
    done = sweep("--keep_lanes_s", "1")
    assert done.code == 0, done.err
    wait(gone, 60)
    assert sweep("--name", "other", "--keep_lanes_s", "0").code == 0
    assert gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_interrupted_or_killed_interrupts_its_sweep(
    number: signal.Signals, tmp_path: Path, sweep: Callable[..., Done], cluster: Cluster
) -> None:
    environment = os.environ | {"PACELINE_RESIDENT": "1", "RAY_ADDRESS": cluster.address}
    slow = ["--space.seed", "[0, 1, 2, 3, 4, 5, 6, 7]", "--train.task_args.pause_s", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tune", str(tmp_path / "sweep.yaml"), *slow],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    trials = tmp_path / "runs" / "first" / "trials"
    wait(lambda: trials.exists() and any(trials.iterdir()), 120)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "resume" in out
    wait(gone, 60)
    ended = len(list(trials.iterdir()))
    time.sleep(1.0)
    assert len(list(trials.iterdir())) == ended < 8
