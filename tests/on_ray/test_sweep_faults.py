"""What befalls a sweep's own processes and its storage: no trial is lost, none runs
twice, none is called stopped.
"""

import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest

from tests.on_ray.embedded import actors
from tests.on_ray.test_lanes import rows, run, sweep
from tests.waits import when
from trainers import lease
from trainers.errors import LeaseError, PacelineError
from trainers.lease import held
from trainers.on_ray import vital_signs
from tune.sweeps.spec import SAVED, prepare
from tune.trials.journal import Journal

pytestmark = [pytest.mark.ray, pytest.mark.full]


def kill(class_name, how=signal.SIGKILL):
    """A signal to the actors of a class."""
    found = [
        actor
        for actor in actors(("state", "=", "ALIVE"))
        if actor.class_name.rpartition(".")[2] == class_name
    ]
    assert found
    for actor in found:
        os.kill(actor.pid, how)


def lines(file):
    return len(file.read_text().split()) if file.exists() else 0


def test_a_killed_trial_actor_costs_nothing(tmp_path, driver):
    pids = tmp_path / "pids"
    train = {
        "task_args": {"pids": str(pids), "pause_s": 0.1},
        "evaluate": {"every_steps": 4},
    }
    spec = sweep(tmp_path, {"seed": [1, 2, 3]}, train)
    thread = when(lambda: lines(pids) == 2, lambda: kill("ResourceTrainable"))
    records = run(spec)
    thread.join()
    assert {record.status for record in records} == {"done"}
    assert len(records) == lines(pids) == 3, (
        "what the dead actor had submitted was heard to its end, not run again"
    )


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.campaign)]
)
def test_a_dead_or_stopped_mailbox_ends_the_sweep_in_a_sentence_and_resume_goes_on(
    tmp_path, driver, monkeypatch, how
):
    monkeypatch.setattr(vital_signs, "_LOOKS", 3)
    pids = tmp_path / "pids"
    spec = sweep(
        tmp_path,
        {"seed": [1, 2, 3]},
        {"task_args": {"pids": str(pids), "pause_s": 0.1}},
    )
    thread = when(lambda: lines(pids) == 2, lambda: kill("Mailbox", how))
    with pytest.raises(PacelineError, match="mailbox, an actor, has died") as error:
        run(spec)
    thread.join()
    # Of those that still call Ray any would end the process, without the sentence, once
    # it has left the cluster.
    assert not [
        one.name for one in threading.enumerate() if one.name.startswith("lane-")
    ]
    assert error.value.exit_code == 1
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(f"`python -m tune {spec.uri}` goes on")
    [first] = Journal(spec.storage).records()
    again = run(spec)
    assert [record.status for record in again] == ["done"] * 3
    assert first in again


@pytest.mark.campaign
def test_a_killed_sweep_around_a_rate_tries_the_same_rates_and_none_twice(
    tmp_path, driver
):
    space = {"global_batch_size": [12, 24], "optimizer.lr": "around"}
    train = {"optimizer": {"lr": 0.0005}}
    whole = run(sweep(tmp_path / "whole", space, train))
    assert len(whole) > 6, "the first rate and its neighbours were not enough"
    pids = tmp_path / "pids"
    task_args = {"pids": str(pids), "pause_s": 0.1}
    spec = sweep(tmp_path / "killed", space, {**train, "task_args": task_args})
    in_last_but_one = len(whole) - 1
    thread = when(lambda: lines(pids) == in_last_but_one, lambda: kill("Mailbox"))
    with pytest.raises(PacelineError):
        run(spec)
    thread.join()
    again = run(spec)
    curves = {record.id: rows(record.curve) for record in whole}
    assert {record.id: rows(record.curve) for record in again} == curves
    assert lines(pids) == len(whole) + 1, "only what was cut off began again"


def test_a_sweep_whose_directory_is_deleted_says_so(tmp_path, driver, monkeypatch):
    from tune.sweeps._run import run_sweep

    monkeypatch.setattr(lease, "BEAT_S", 0.2)
    spec = sweep(tmp_path, {"seed": [1, 2, 3, 4]}, {"task_args": {"pause_s": 0.02}})
    thread = when(
        lambda: len(spec.storage.names("trials")) == 2,
        lambda: shutil.rmtree(spec.storage.path, ignore_errors=True),
    )
    with pytest.raises(LeaseError, match=r"is gone: the directory was deleted"):  # noqa: PT012, SIM117
        with held(spec.storage, SAVED) as token:
            prepare(spec, fresh=False)
            run_sweep(replace(spec, token=token))
    thread.join()
