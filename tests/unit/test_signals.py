"""What asks a process to stop, what ends it at once, and that it ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from tests.specs import REPOSITORY
from trainers.__main__ import main
from trainers.launch import local, signals
from trainers.launch.signals import StopSignals, follow, stop_signals

ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("second", ALL)
def test_only_a_second_interrupt_ends_it(first: signal.Signals, second: signal.Signals) -> None:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ALL}
    told: list[str] = []
    try:
        with StopSignals(told.append) as stop:
            assert not stop.asked
            signal.raise_signal(first)
            assert stop.asked
            if second == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(second)
            else:
                signal.raise_signal(second)
        assert told == [first.name]
        assert [signal.getsignal(number) for number in ALL] == [signal.SIG_DFL] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_under_nohup_a_hang_up_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_ends_after_its_last_act_when_the_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    over, done, acts = threading.Event(), threading.Event(), []
    monkeypatch.setattr(signals.os, "_exit", lambda code: (acts.append(code), done.set()))
    follow(over.wait, lambda: acts.append("last"))
    assert acts == []
    over.set()
    assert done.wait(60)
    assert acts == ["last", 1]


def test_a_script_that_sets_torchruns_variables_may_end_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[object] = []
    monkeypatch.setattr(signals, "follow", followed.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    signals.follow_agent()
    assert followed == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    signals.follow_agent()
    assert len(followed) == 1


def test_a_spawned_worker_ends_with_its_driver_and_takes_the_directory_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, done = threading.Event(), threading.Event()
    monkeypatch.setattr(local.multiprocessing, "parent_process", lambda: SimpleNamespace(join=over.wait))
    monkeypatch.setattr(signals.os, "_exit", lambda code: done.set())
    monkeypatch.setattr(local, "setup_logging", lambda *_: None)

    def trains(*args: object) -> None:
        over.set()  # its driver is killed
        assert done.wait(60), "it trains on"

    monkeypatch.setattr(local, "_run_in_group", trains)
    directory = tmp_path / "paceline-spawn-x"
    directory.mkdir()
    job: Any = SimpleNamespace(storage=None, quiet=False, told="")
    _prctl_pr_set_pdeathsig(signal.SIGINT)  # as torch does in each process that it spawns
    with local.multiprocessing.Pipe(duplex=False)[1] as records:
        local._spawned(1, job, 2, str(directory), records)
    assert list(tmp_path.iterdir()) == []
    if sys.platform == "linux":  # else each thread of a killed driver interrupts it, which a second Ctrl-C alone should
        number, pr_get_pdeathsig = ctypes.c_int(-1), 2
        ctypes.CDLL(None).prctl(pr_get_pdeathsig, ctypes.byref(number))
        assert number.value == 0


def test_a_rank_writes_nothing_into_a_directory_that_another_one_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, delete = tmp_path / "paceline-spawn-x", shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool) -> None:
        with pytest.raises(FileNotFoundError):
            (directory / "failed-0").touch()
        delete(path, ignore_errors)

    monkeypatch.setattr(local.shutil, "rmtree", rmtree)
    directory.mkdir()
    (directory / "rendezvous").touch()
    local._delete(str(directory))
    local._delete(str(directory))  # both ranks do
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [["a.yaml"], ["evaluate", "run"], ["predict", "run", "--out=x"]])
def test_every_command_of_torchruns_follows_its_agent(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Followed(BaseException):
        pass

    def follow_agent() -> None:
        raise Followed

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("trainers.__main__.follow_agent", follow_agent)
    with pytest.raises(Followed):
        main(args)


class Ranks:
    """A group of spawn's in which every rank that is asked to stop keeps its state and leaves."""

    def __init__(self, directory: str) -> None:
        self.processes = [self, self]
        self.directory, self.looks, self.told, self.exitcode = directory, 0, 0, 0

    def join(self, timeout: float | None = None) -> bool:
        self.looks += 1
        assert self.looks < 9, "nobody has told them"
        if self.looks == 1:
            signal.raise_signal(signal.SIGTERM)  # to the driver alone
        if self.told == 2:
            Path(self.directory, "result.json").write_text("kept")
        return self.told == 2

    def terminate(self) -> None:
        self.told += 1

    def is_alive(self) -> bool:
        return False


def test_a_driver_of_spawn_s_passes_sigterm_on_and_waits_for_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Ranks] = []

    def start(function: object, arguments: tuple[object, int, str], **options: object) -> Ranks:
        groups.append(Ranks(arguments[2]))
        return groups[0]

    monkeypatch.setattr(local, "start_processes", start)
    config = SimpleNamespace(scaling=SimpleNamespace(max_workers=2))
    job = SimpleNamespace(config=config, read_result=lambda data: data)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert local.run_spawn(job) == b"kept"  # type: ignore[arg-type, comparison-overlap]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not Path(groups[0].directory).exists()


WORKER = """
import time
from trainers.launch.signals import follow_agent
follow_agent()
print("follows", flush=True)
time.sleep(3600)
"""
AGENT = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True) as worker:
    print(worker.stdout.readline().strip(), worker.pid, flush=True)
"""


def test_a_worker_ends_with_torchruns_agent() -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1"},
    )
    assert agent.stdout is not None
    words, pid = agent.stdout.readline().split()
    assert words == "follows"
    worker = os.pidfd_open(int(pid))
    agent.kill()
    agent.wait()
    gone, _, _ = select.select([worker], [], [], 120)
    os.close(worker)
    assert gone, "it outlives its agent"
