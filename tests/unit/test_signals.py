"""What asks a process to stop, what ends it at once, and that it ends with the process that started it."""

from __future__ import annotations

import ctypes
import os
import select
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
from trainers.launch import local, signals
from trainers.launch.signals import StopSignals, stop_signals

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
