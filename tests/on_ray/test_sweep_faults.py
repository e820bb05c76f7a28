"""What befalls a sweep's own processes and its storage: no trial is lost, none runs twice, none is called stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.on_ray.embedded import actors
from tests.on_ray.test_lanes import TRAIN, run, sweep
from tests.specs import REPOSITORY
from tests.waits import HANG_S, until, when
from trainers.errors import PacelineError
from trainers.on_ray import vital_signs
from trainers.storage import Storage
from tune.trials.journal import Journal

pytestmark = [pytest.mark.ray, pytest.mark.full]


def kill(class_name: str, how: int = signal.SIGKILL) -> None:
    """A signal to the actors of a class."""
    found = [actor for actor in actors(("state", "=", "ALIVE")) if actor.class_name.rpartition(".")[2] == class_name]
    assert found
    for actor in found:
        os.kill(actor.pid, how)


def lines(file: Path) -> int:
    return len(file.read_text().split()) if file.exists() else 0


def test_a_killed_trial_actor_costs_nothing(tmp_path: Path, driver: Any) -> None:
    pids = tmp_path / "pids"
    train = {"task_args": {"pids": str(pids), "pause_s": 0.1}, "evaluate": {"every_steps": 4}}
    spec = sweep(tmp_path, {"seed": [1, 2, 3]}, train)
    thread = when(lambda: lines(pids) == 2, lambda: kill("ResourceTrainable"))
    records = run(spec)
    thread.join()
    assert {record.status for record in records} == {"done"}
    assert len(records) == lines(pids) == 3, "what the dead actor had submitted was heard to its end, not run again"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.campaign)])
def test_a_dead_or_stopped_mailbox_ends_the_sweep_in_a_sentence_and_resume_goes_on(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch, how: int
) -> None:
    monkeypatch.setattr(vital_signs, "_LOOKS", 3)
    pids = tmp_path / "pids"
    spec = sweep(tmp_path, {"seed": [1, 2, 3]}, {"task_args": {"pids": str(pids), "pause_s": 0.1}})
    thread = when(lambda: lines(pids) == 2, lambda: kill("Mailbox", how))
    with pytest.raises(PacelineError, match="mailbox, an actor, has died") as error:
        run(spec)
    thread.join()
    # Of those that still call Ray any would end the process, without the sentence, once it has left the cluster.
    assert not [one.name for one in threading.enumerate() if one.name.startswith("lane-")]
    assert error.value.exit_code == 1
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(f"`python -m tune resume {spec.uri}` goes on")
    [first] = Journal(spec.storage).records()
    again = run(spec)
    assert [record.status for record in again] == ["done"] * 3
    assert first in again


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["gcs_server", "raylet"])
def test_a_dead_embedded_cluster_ends_the_command_in_a_sentence(tmp_path: Path, kind: str) -> None:
    file, pids = tmp_path / "sweep.yaml", tmp_path / "pids"
    tree = {
        "name": "sweep",
        "storage_path": str(tmp_path),
        "train": {**TRAIN, "task_args": {"pids": str(pids), "pause_s": 0.3}},
        "space": {"seed": [1, 2, 3]},
        "objective": {"metric": "val_loss"},
    }
    file.write_text(yaml.safe_dump(tree))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tune", str(file)]
    running = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: lines(pids) >= 2, "two trials", process=running)
    family = psutil.Process(running.pid).children(recursive=True)
    [victim] = [process for process in family if process.name() == kind]
    victim.kill()
    _, err = running.communicate(timeout=HANG_S)
    assert running.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(said) == 1, err
    assert f"Ray's {kind} was killed by SIGKILL" in said[0]
    assert said[0].endswith(f"`python -m tune resume {tmp_path}/sweep` goes on")
    assert len(Journal(Storage(str(tmp_path / "sweep"))).records()) == 1
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
