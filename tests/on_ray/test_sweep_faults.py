"""What befalls a sweep's own processes and its storage: no trial is lost, none
runs twice, none is called stopped.
"""

import os
import signal
import threading

import pytest

from tests.on_ray.embedded import actors
from tests.on_ray.test_lanes import rows, run, sweep
from tests.waits import when
from trainers.errors import PacelineError
from trainers.on_ray import vital_signs
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


def ended(error, spec):
    """What a driver says whose mailbox has died."""
    # Of those that still call Ray any would end the process, without the
    # sentence, once it has left the cluster.
    assert not [
        one.name
        for one in threading.enumerate()
        if one.name.startswith("lane-")
    ]
    assert error.exit_code == 1
    assert "mailbox, an actor, has died" in str(error)
    assert "\n" not in str(error)
    assert str(error).endswith(
        f"`python -m tune {spec.uri}` continues the sweep"
    )


@pytest.mark.campaign  # test_steering kills one
def test_a_stopped_mailbox_ends_the_sweep_in_a_sentence_and_resume_goes_on(
    tmp_path, driver, monkeypatch
):
    monkeypatch.setattr(vital_signs, "_LOOKS", 3)
    pids = tmp_path / "pids"
    spec = sweep(
        tmp_path,
        {"seed": [1, 2, 3]},
        {"task_args": {"pids": str(pids), "pause_s": 0.1}},
    )
    thread = when(
        lambda: lines(pids) == 2, lambda: kill("Mailbox", signal.SIGSTOP)
    )
    with pytest.raises(PacelineError) as error:
        run(spec)
    thread.join()
    ended(error.value, spec)
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
    thread = when(
        lambda: lines(pids) == in_last_but_one, lambda: kill("Mailbox")
    )
    with pytest.raises(PacelineError):
        run(spec)
    thread.join()
    again = run(spec)
    curves = {record.id: rows(record.curve) for record in whole}
    assert {record.id: rows(record.curve) for record in again} == curves
    assert lines(pids) == len(whole) + 1, "only what was cut off began again"
