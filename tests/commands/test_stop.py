"""Stopped, killed, started twice, and its directory deleted: real commands, and what they leave behind."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands.endless import Command

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a command would inherit that it is ignored
    commands: list[Command] = []

    def begin(launcher: str, *options: str, **changes: Any) -> Command:
        commands.append(Command(tmp_path, launcher, *options, **changes))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()
    signal.signal(signal.SIGHUP, hang_up)


def nothing_is_left(command: Command) -> None:
    assert not (command.run / "lease.json").exists()
    assert not [path for path in command.temporary.iterdir() if path.name.startswith("paceline")]


STOPS = [
    ("spawn", [signal.SIGTERM]),
    pytest.param("spawn", [signal.SIGTERM, signal.SIGTERM], marks=pytest.mark.campaign),
    pytest.param("spawn", [signal.SIGINT], marks=pytest.mark.full),
    pytest.param("spawn", [signal.SIGHUP], marks=pytest.mark.campaign),
    pytest.param("local", [signal.SIGTERM, signal.SIGTERM], marks=pytest.mark.full),
    pytest.param("local", [signal.SIGHUP], marks=pytest.mark.campaign),
    pytest.param("torchrun", [signal.SIGTERM], marks=pytest.mark.full),
]


@pytest.mark.parametrize(("launcher", "numbers"), STOPS)
def test_told_to_stop_it_keeps_what_it_has(start: Start, launcher: str, numbers: list[signal.Signals]) -> None:
    """The process that was started alone is told, as `docker stop`, systemd and `kill` do."""
    command = start(launcher).trains()
    command.tell(*numbers)
    code = command.ends()
    assert code == 0 or launcher == "torchrun", command.said  # torchrun's own code for a signal
    assert len(command.kept()) == 1, command.said
    assert "stopped: " in command.said
    assert "Traceback" not in command.said or launcher == "torchrun"
    nothing_is_left(command)


@pytest.mark.full
def test_a_second_interrupt_leaves_at_once(start: Start) -> None:
    command = start("spawn").trains()
    command.tell(signal.SIGINT)
    command.until(lambda: "asked to stop" in command.said)
    command.tell(signal.SIGINT)
    assert command.ends() in (0, 130)  # it may have been done by then
    nothing_is_left(command)


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.campaign) for one in (signal.SIGINT, signal.SIGHUP))],
)
def test_told_while_its_workers_start_it_leaves_nothing(start: Start, number: signal.Signals) -> None:
    command = start("spawn")
    command.until(lambda: len(psutil.Process(command.process.pid).children()) >= 2)  # they import torch
    command.tell(number)
    assert command.ends() == 130, command.said
    assert "error: interrupted" in command.said
    assert "Traceback" not in command.said
    nothing_is_left(command)


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "stuck"),
    [
        ("spawn", True),
        pytest.param("torchrun", False, marks=pytest.mark.campaign),
        pytest.param("spawn", False, marks=pytest.mark.campaign),
        pytest.param("torchrun", True, marks=pytest.mark.campaign),
    ],
)
def test_workers_end_with_the_process_that_has_started_them(
    start: Start, launcher: str, stuck: bool, tmp_path: Path
) -> None:
    """Also one that waits in a collective, where no handler of Python's runs; and the next start need not wait."""
    if stuck:
        (tmp_path / "stuck").touch()
    command = start(launcher).trains()
    command.tell(signal.SIGKILL)
    assert command.ends() == -signal.SIGKILL
    if launcher == "spawn":
        assert not [path for path in command.temporary.iterdir() if path.name.startswith("paceline")]
    for mark in command.training.iterdir():
        mark.unlink()
    (tmp_path / "stuck").unlink(missing_ok=True)
    again = start(launcher).trains()
    again.tell(signal.SIGTERM)
    again.ends()
    assert len(again.kept()) == 1, again.said
    nothing_is_left(again)


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ("local", []),
        pytest.param("spawn", ["--fresh"], marks=pytest.mark.campaign),
        pytest.param("torchrun", [], marks=pytest.mark.campaign),
    ],
)
def test_a_second_start_is_refused_and_the_first_goes_on(start: Start, launcher: str, options: list[str]) -> None:
    first = start(launcher).trains()
    second = start("local", *options)
    assert second.ends() == 2
    assert "is in use: process " in second.said
    first.tell(signal.SIGTERM)
    first.ends()
    assert "stopped: " in first.said
    assert len(first.kept()) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "lost"),
    [
        ("spawn", ""),
        pytest.param("torchrun", "", marks=pytest.mark.campaign),
        ("local", "config.yaml"),
        ("local", "lease.json"),
    ],
)
def test_a_run_whose_directory_is_deleted_says_so(start: Start, launcher: str, lost: str) -> None:
    command = start(launcher).trains()
    if lost:
        (command.run / lost).unlink()
    else:
        shutil.rmtree(command.run)
    if lost == "config.yaml":
        command.tell(signal.SIGTERM)  # what it writes then is refused
    assert command.ends() not in (0, 2)
    assert f"{lost or 'lease.json'} is gone: the directory was deleted" in command.said
    assert not command.kept()
