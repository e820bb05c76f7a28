"""A hang is noticed from inside: stacks are saved, the sentence is told, and the process ends; a slow loop lives."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.specs import REPOSITORY
from trainers.loop.watchdog import HUNG_EXIT_CODE, Watchdog, count_hangs
from trainers.storage import Storage

HANGS = """
import sys, time, types
import trainers.loop.watchdog as watchdog
from pathlib import Path
from trainers.storage import Storage
watchdog.GRACE_S = {grace_s}
if watchdog.GRACE_S > 1:  # there are no other ranks to wait for
    watchdog.time = types.SimpleNamespace(**vars(time) | {"sleep": print})
told = Path(sys.argv[1], "told")
dog = watchdog.Watchdog(0.4, 3, Storage(sys.argv[1] + "/run"), told.write_text)
def waits_for_ever():
    {wait}
waits_for_ever()
"""


def run(tmp_path: Path, wait: str, grace_s: float = 60) -> subprocess.CompletedProcess[str]:
    """With a grace that no busy machine exceeds: the C-level timer must not be the first."""
    script = HANGS.replace("{wait}", wait).replace("{grace_s}", str(grace_s))
    return subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_hang_saves_the_stacks_and_ends_the_process(tmp_path: Path) -> None:
    done = run(tmp_path, "time.sleep(3600)")
    assert done.returncode == HUNG_EXIT_CODE
    storage = Storage(str(tmp_path / "run"))
    assert count_hangs(storage) == 1
    [name] = storage.names("hangs")
    assert name.endswith("-rank-00003.txt")
    stacks = storage.read(f"hangs/{name}").decode()
    assert "rank 3 made no step for " in stacks
    assert "waits_for_ever" in stacks
    assert name in (tmp_path / "told").read_text()
    assert not list(tmp_path.glob("paceline-stacks-*"))


def test_a_call_that_keeps_the_interpreters_lock_is_ended_too(tmp_path: Path) -> None:
    """No thread can run then: the C-level timer prints the stacks and leaves."""
    done = run(tmp_path, "import ctypes; ctypes.PyDLL(None).sleep(3600)", grace_s=0.2)
    assert done.returncode == 1
    assert "waits_for_ever" in done.stderr


def test_a_slow_loop_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of almost the timeout each, and several looks at every one of them."""
    before, now_s, looks = set(threading.enumerate()), [0.0], queue.SimpleQueue[None]()

    def monotonic() -> float:
        if threading.current_thread().name == "watchdog":
            looks.put(None)
        return now_s[0]

    monkeypatch.setattr("trainers.loop.watchdog.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    dog = Watchdog(0.1, 0, Storage(str(tmp_path)))
    for _ in range(10):
        now_s[0] += 0.099
        for _ in range(2):
            looks.get(timeout=60)
        dog.beat()
    dog.close()
    assert count_hangs(Storage(str(tmp_path))) == 0
    assert set(threading.enumerate()) <= before


def test_stacks_that_cannot_be_saved_do_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    assert run(tmp_path, "time.sleep(3600)").returncode == HUNG_EXIT_CODE


@pytest.mark.parametrize("exists", [True, False])
def test_hangs_are_counted(tmp_path: Path, exists: bool) -> None:
    storage = Storage(str(tmp_path))
    if exists:
        storage.write("hangs/a.txt", b"")
        storage.write("hangs/b.txt", b"")
    assert count_hangs(storage) == (2 if exists else 0)
