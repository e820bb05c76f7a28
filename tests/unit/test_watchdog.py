"""A hang is noticed from inside, in any phase: stacks are saved, the sentence
is told, and the process ends.
"""

import contextlib
import queue
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.specs import REPOSITORY
from tests.waits import HANG_S
from trainers.config import sections
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.loop.watchdog import (
    HUNG_EXIT_CODE,
    Watchdog,
    read_hang,
    saved_hangs,
    watched,
)
from trainers.storage import Storage

HANGS = """
import sys, time, types
import trainers.config.sections as sections
import trainers.loop.watchdog as watchdog
from pathlib import Path
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.storage import Storage
sections.LEAST_PHASE_S = 0.4
watchdog.GRACE_S = {grace_s}
if watchdog.GRACE_S > 1:  # there are no other ranks to wait for
    watchdog.time = types.SimpleNamespace(**vars(time) | {"sleep": print})
class Context(RunContext):
    is_heard = {heard}
    def hung(self, failure, stack):
        Path(sys.argv[1], "told").write_text(f"{failure}\\n{stack}")
def waits_for_ever():
    {wait}
failure = FailureConfig({budgets})
with watchdog.watched(failure, Context(Storage(sys.argv[1] + "/run"), "local", 3)) as dog:
    waits_for_ever()
"""
STEPS = "hang_timeout_s=0.4"
PHASES = "hang_timeout_s=0.1"
OF_STEPS = "failure.hang_timeout_s 0.4"
OF_PHASES = "failure.hang_timeout_s 0.1 allows a phase 0.4 s"


def run(tmp_path, wait, budgets=PHASES, grace_s=60, heard=False):
    """With a grace that no busy machine exceeds: the C-level timer must not be
    the first.
    """
    script = (
        HANGS.replace("{wait}", wait)
        .replace("{grace_s}", str(grace_s))
        .replace("{budgets}", budgets)
    )
    script = script.replace("{heard}", str(heard))
    return subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("wait", "budgets", "words"),
    [
        (
            "dog.enter('training', steps=True); time.sleep(3600)",
            STEPS,
            f"in training (at <string>:18; {OF_STEPS})",
        ),
        (
            "time.sleep(3600)",
            PHASES,
            f"in the start (at <string>:18; {OF_PHASES})",
        ),
        (
            "dog.enter('setup'); time.sleep(3600)",
            PHASES,
            f"in setup (at <string>:18; {OF_PHASES})",
        ),
    ],
)
def test_a_hang_saves_the_stacks_and_ends_the_process(
    tmp_path, wait, budgets, words
):
    done = run(tmp_path, wait, budgets)
    assert done.returncode == HUNG_EXIT_CODE
    assert (
        "error: the run ended as `hung`: rank 3 made no step for "
        in done.stderr
    )
    assert words in done.stderr
    storage = Storage(tmp_path / "run")
    [name] = saved_hangs(storage)
    assert name.endswith("-rank-00003.txt")
    stacks = storage.read(f"hangs/{name}").decode()
    assert "rank 3 made no step for " in stacks
    assert "waits_for_ever" in stacks
    assert words in read_hang(storage, name).message
    told = (tmp_path / "told").read_text()
    assert words in told
    assert "in waits_for_ever" in told
    assert not list(tmp_path.glob("paceline-stacks-*"))


def test_a_call_that_keeps_the_interpreters_lock_is_ended_too(tmp_path):
    """No thread can run then: the C-level timer prints the stacks and leaves."""
    done = run(
        tmp_path, "import ctypes; ctypes.PyDLL(None).sleep(3600)", grace_s=0.2
    )
    assert done.returncode == 1
    assert "waits_for_ever" in done.stderr


PLACES = [
    "Storage.write",
    "Context.hung",
    "watchdog.print",
    "watchdog.line_of_task",
]
"""Storage, the launcher, the terminal; the watchdog itself."""


@pytest.mark.parametrize("place", PLACES)
def test_whatever_hangs_as_well_does_not_keep_the_process(tmp_path, place):
    done = run(
        tmp_path,
        f"{place} = lambda *args, **_: time.sleep(3600); time.sleep(3600)",
        grace_s=0.5,
    )
    assert done.returncode == (
        1 if place == "watchdog.line_of_task" else HUNG_EXIT_CODE
    ), "1: by the C-level timer"


class Clock:
    """Time that a test moves; `looks` waits until the watchdog has looked at it twice."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        self._looks = queue.SimpleQueue[None]()
        monkeypatch.setattr(
            "trainers.loop.watchdog.time",
            SimpleNamespace(monotonic=self._monotonic, sleep=time.sleep),
        )

    def _monotonic(self):
        if threading.current_thread().name == "watchdog":
            self._looks.put(None)
        return self.now_s

    def looks(self):
        while not self._looks.empty():
            self._looks.get()
        for _ in range(2):
            self._looks.get(timeout=HANG_S)


def ends(monkeypatch):
    """What the watchdog says, in place of ending this process."""
    said = []
    monkeypatch.setattr(
        Watchdog, "_end", lambda self, where, budget: said.append(where)
    )
    return said


def test_a_slow_loop_is_no_hang(monkeypatch):
    """Ten steps of almost the timeout each, and several looks at every one of them."""
    before = set(threading.enumerate())
    clock = Clock(monkeypatch)
    said = ends(monkeypatch)
    with watched(
        FailureConfig(hang_timeout_s=0.1), RunContext(None, "local")
    ) as dog:
        dog.enter("training", steps=True)
        for _ in range(10):
            clock.now_s += 0.099
            clock.looks()
            dog.beat()
        assert not said
        clock.now_s += 0.11
        clock.looks()
        assert said
        assert said[0].endswith("s in training")
    assert set(threading.enumerate()) <= before


def test_a_write_amid_the_steps_has_the_budget_of_a_phase(monkeypatch):
    clock = Clock(monkeypatch)
    said = ends(monkeypatch)
    monkeypatch.setattr(sections, "LEAST_PHASE_S", 100.0)
    with watched(
        FailureConfig(hang_timeout_s=0.1), RunContext(None, "local")
    ) as dog:
        dog.enter("training", steps=True)
        with dog.phase("checkpoint"):
            clock.now_s += 99
            clock.looks()
        clock.looks()
        assert not said, "the step after it begins with a beat"
        with dog.phase("checkpoint"):
            clock.now_s += 101
            clock.looks()
    assert said
    assert said[0].endswith("s in checkpoint")


def test_every_second_is_of_one_phase(monkeypatch):
    clock = Clock(monkeypatch)
    with watched(FailureConfig(), RunContext(None, "local")) as dog:
        clock.now_s += 1
        dog.enter("training", steps=True)
        for _ in range(2):
            clock.now_s += 10
            dog.beat()
            with dog.phase("evaluation"):
                clock.now_s += 100
        dog.enter("the end")
        assert dog.spent_s == {
            "the start": 1.0,
            "training": 20.0,
            "evaluation": 200.0,
        }


def test_a_stopped_loader_process_does_not_outlive_a_hang(tmp_path):
    fork = "p = multiprocessing.get_context('fork').Process(target=time.sleep, args=[99]); p.start()"
    stop = "os.kill(p.pid, signal.SIGSTOP); print(p.pid, flush=True)"
    done = run(
        tmp_path,
        f"import multiprocessing, os, signal; {fork}; {stop}; time.sleep(3600)",
    )
    assert done.returncode == HUNG_EXIT_CODE
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout.split()[0])).wait(timeout=HANG_S)
