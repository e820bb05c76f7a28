"""Stopped, killed, started twice, and its directory deleted: real commands,
and what they leave behind.
"""

import shutil
import signal

import psutil
import pytest

from tests.commands.endless import Command


@pytest.fixture
def start(tmp_path):
    hang_up = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # under nohup a command would inherit that it is ignored
    commands = []

    def begin(launcher, *options, **changes):
        commands.append(Command(tmp_path, launcher, *options, **changes))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()
    signal.signal(signal.SIGHUP, hang_up)


def nothing_is_left(command):
    assert not (command.run / "lease.json").exists()
    assert not [
        path
        for path in command.temporary.iterdir()
        if path.name.startswith("paceline")
    ]


def stopped(command, *signals):
    """Told to stop, as by `docker stop` or `kill`, the process that was
    started keeps what it has.
    """
    command.tell(*signals)
    code = command.ends()
    assert code == 0 or command.launcher == "torchrun", (
        command.said
    )  # torchrun's own code for a signal
    assert len(command.kept()) == 1, command.said
    assert "stopped: " in command.said
    assert "Traceback" not in command.said or command.launcher == "torchrun"
    nothing_is_left(command)


@pytest.mark.full
def test_told_to_stop_under_torchrun(start):
    stopped(start("torchrun").trains(), signal.SIGTERM)


@pytest.mark.full
def test_a_second_interrupt_leaves_at_once(start):
    command = start("spawn", forked=True).trains()
    command.tell(signal.SIGINT)
    command.until(lambda: "asked to stop" in command.said)
    command.tell(signal.SIGINT)
    assert command.ends() in (0, 130)  # it may have been done by then
    nothing_is_left(command)


@pytest.mark.full
def test_told_while_its_workers_start_it_leaves_nothing(start):
    command = start("spawn")
    command.until(
        lambda: len(psutil.Process(command.process.pid).children()) >= 2
    )  # they import torch
    command.tell(signal.SIGTERM)
    assert command.ends() == 130, command.said
    assert "error: interrupted" in command.said
    assert "Traceback" not in command.said
    nothing_is_left(command)


@pytest.mark.full
def test_workers_end_with_the_process_that_has_started_them(start, tmp_path):
    """Also one that waits in a collective, where no handler of Python's runs;
    and the next start need not wait.
    """
    (tmp_path / "stuck").touch()
    command = start("spawn").trains()
    command.tell(signal.SIGKILL)
    assert command.ends() == -signal.SIGKILL
    assert not [
        path
        for path in command.temporary.iterdir()
        if path.name.startswith("paceline")
    ]
    for mark in command.training.iterdir():
        mark.unlink()
    (tmp_path / "stuck").unlink()
    stopped(start("spawn", forked=True).trains(), signal.SIGTERM)


def test_a_second_start_is_refused_and_the_first_goes_on(start):
    first = start("local", forked=True).trains()
    second = start("local", forked=True)
    assert second.ends() == 2
    assert "is in use: process " in second.said
    stopped(first, signal.SIGTERM, signal.SIGTERM)


@pytest.mark.full
def test_a_run_whose_directory_is_deleted_says_so(start):
    command = start("spawn", forked=True).trains()
    shutil.rmtree(command.run)
    assert command.ends() not in (0, 2)
    assert "lease.json is gone: the directory was deleted" in command.said
    assert not command.kept()
