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
from tests.waits import HANG_S, until
from trainers import residents

pytestmark = [pytest.mark.ray, pytest.mark.full]

GONE_S = 100.0
"""How long lanes may take to be gone: by themselves they would be after 300."""

MINE = """
import os
import torch
from tests.tasks import Blobs

class Mine(Blobs):
    def metrics(self, outputs, batch):
        shape = (len(outputs),)
        return {"process": torch.full(shape, float(os.getpid()), dtype=torch.float64), "edit": torch.ones(shape)}
"""

FUNCTION = """
import os, tempfile
from pathlib import Path
import ray.train

def train(config):
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "weights").write_text("7")
        stored = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"loss": config["lr"], "process": float(os.getpid())}, checkpoint=stored)
    assert Path(ray.train.get_checkpoint().path).parents[2].name == config["sweep"], ray.train.get_checkpoint()
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
        return command(*given, env=environment, ray_address=cluster.address, cwd=tmp_path, forked=True)

    return run


def found(directory: Path, sweep: str, metric: str) -> set[float]:
    """A metric of all trials of a sweep."""
    records = [json.loads(file.read_text()) for file in (directory / "runs" / sweep / "trials").iterdir()]
    return {record["metrics"][metric] for record in records}


def status() -> dict[str, Any] | None:
    """What the resident driver says of itself."""
    return next(iter(residents.drivers().values()), None)


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
        timeout=HANG_S,
        check=False,
    )
    assert job.stdout.strip() == "7", job.stderr
    until(gone, within_s=GONE_S)


def test_a_sweep_of_another_function_takes_them_over_in_a_fresh_process(
    tmp_path: Path, sweep: Callable[..., Done]
) -> None:
    (tmp_path / "function.py").write_text(FUNCTION)
    tree = yaml.safe_load((tmp_path / "sweep.yaml").read_text())
    tree |= {"space": {"train_loop_config.lr": [0.1, 0.2]}, "objective": {"metric": "loss", "mode": "min"}}
    for name in ("first", "second"):
        tree["train"] = {"train_func": "function:train", "train_loop_config": {"lr": 0.1, "sweep": name}}
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
        done = sweep("--name", name, "--keep_lanes_s", "20" if name == "first" else "1")
        assert done.code == 0, done.err
        assert "lanes started again" not in done.out + done.err
    [first], [second] = found(tmp_path, "first", "process"), found(tmp_path, "second", "process")
    assert first != second
    until(gone, within_s=GONE_S)  # also while they start again


def test_an_elastic_run_that_reserves_nothing_yet_gets_what_they_hold(sweep: Callable[..., Done]) -> None:
    assert sweep().code == 0
    assert status() is not None
    coordinator = get_or_create_autoscaling_coordinator()
    ask = {"requester_id": "an elastic run", "resources": [{"CPU": 1}], "expire_after_s": HANG_S}
    ray.get(coordinator.request_resources.remote(**ask))
    try:
        until(gone, within_s=GONE_S)
    finally:
        ray.get(coordinator.cancel_request.remote("an elastic run"))


@pytest.mark.campaign
def test_they_end_after_their_time(sweep: Callable[..., Done]) -> None:
    done = sweep("--keep_lanes_s", "1")
    assert done.code == 0, done.err
    until(gone, within_s=GONE_S)
    assert sweep("--name", "other", "--keep_lanes_s", "0").code == 0
    assert gone()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.campaign)])
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
    until(lambda: trials.exists() and any(trials.iterdir()))
    process.send_signal(number)
    out, _ = process.communicate(timeout=HANG_S)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "resume" in out
    until(gone, within_s=GONE_S)
    ended = len(list(trials.iterdir()))
    time.sleep(1.0)
    assert len(list(trials.iterdir())) == ended < 8


@pytest.fixture
def train(tmp_path: Path, sweep: Callable[..., Done], command: Callable[..., Done], cluster: Cluster) -> Any:
    """Run `python -m trainers` with the best of a user's sweep, which has left its lanes."""
    assert sweep().code == 0
    best = tmp_path / "runs" / "first" / "best.yaml"

    def run(*arguments: str, whole: bool = False) -> Done:
        environment = {"PACELINE_RESIDENT": "1", "PYTHONPATH": str(REPOSITORY)}
        given = ["-m", "trainers", *([] if whole else [str(best)]), *arguments]
        return command(*given, env=environment, ray_address=cluster.address, cwd=tmp_path, forked=True)

    return run


def test_a_run_takes_the_lane_over_and_gives_it_back(tmp_path: Path, train: Callable[..., Done]) -> None:
    process = found(tmp_path, "first", "val_process")
    done = train("--name", "warm")
    assert done.code == 0, done.err
    assert "step " in done.out, "the terminal shows what the run says"
    assert "checkpoint " in done.out.splitlines()[-1], "the result"
    result = json.loads((tmp_path / "runs" / "warm" / "result.json").read_text())
    assert {result["metrics"]["val_process"]} == process
    known = status()
    assert known is not None
    assert (known["busy"], known["lanes"]) == (False, 1)

    best = str(tmp_path / "runs" / "first" / "best.yaml")
    done = train("explain", best, "--seconds", "0.2", whole=True)
    assert done.code == 0, done.err
    assert "%  forward" in done.out
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "warm"], "and deleted"
    assert status() == pytest.approx(known, abs=60), "in the lane, which is as before"

    failed = train("--name", "failing", "--task_args.fail_at", "3", "--task_args.failure", "raise")
    assert failed.code == 1
    assert "ValueError: injected: the task fails here" in failed.err
    assert "in _fail" in failed.out, "the traceback"
    assert status() is not None

    # Workers of its own go on where a process that dies has left it.
    died = tmp_path / "died"
    at = ["--task_args.fail_at", "12", "--task_args.failure", "kill", "--task_args.marker", str(died)]
    done = train("--name", "killed", *at, "--checkpoint.every_steps", "5")
    assert done.code == 0, done.err
    assert died.exists()
    assert "going on from the newest checkpoint with workers of its own" in done.out
    again = json.loads((tmp_path / "runs" / "killed" / "result.json").read_text())
    assert {again["metrics"]["val_process"]} != process
    assert again["metrics"]["val_loss"] == result["metrics"]["val_loss"]
    until(gone, within_s=GONE_S)
