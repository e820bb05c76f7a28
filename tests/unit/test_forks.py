"""A zygote and its forks, without Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.waits import HANG_S, until
from tune.forks import client
from tune.forks.assignment import Place
from tune.forks.client import NoOutcomeError, Zygote
from tune.forks.zygote import Preload, import_users


@pytest.fixture
def name():
    """Of a sweep."""
    return uuid.uuid4().hex[:12]


@pytest.fixture
def parent(name):
    """A zygote, whose trials start at once: no import, a new interpreter each."""
    with contextlib.closing(Zygote(name, Preload(forks=False))) as one:
        yield one


def ask(channel, *arguments):
    """Run in a trial: ask the other side, and return its answer."""
    return channel.call("answer", *arguments)


def die(channel, number):
    """Run in a trial: print a line, and end by a signal."""
    print("epoch 3")
    os.kill(os.getpid(), number)


class Asked:
    def answer(self, left, right):
        return left // right


def test_a_fork_asks_and_answers_and_is_missed(parent, capfd):
    here = "tests.unit.test_forks"
    assert parent.fork(f"{here}:ask", 6, 3).serve(Asked()) == 2
    with pytest.raises(NoOutcomeError) as failed:
        parent.fork(f"{here}:ask", 6, 0).serve(Asked())
    assert failed.value.code == 1, "the error was raised in it"
    with pytest.raises(NoOutcomeError) as killed:
        parent.fork(f"{here}:die", signal.SIGKILL).serve(Asked())
    assert killed.value.code == -signal.SIGKILL
    assert capfd.readouterr().out == "epoch 3\n"


def test_a_fork_whose_outcome_is_no_longer_wanted_gets_no_answer(parent):
    class Interrupts:
        def answer(self, *given):
            raise InterruptedError

    fork = parent.fork("tests.unit.test_forks:ask", 6, 3)
    with pytest.raises(InterruptedError):
        fork.serve(Interrupts())
    until(lambda: not Path(f"/proc/{fork.pid}").exists())


def test_a_zygote_outlives_the_process_that_started_it(name):
    start = f"""
from tune.forks.client import Zygote
from tune.forks.zygote import Preload
one = Zygote({name!r}, Preload(forks=False))
one.hold()
print("up", flush=True)
input()
"""
    first = subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout.readline() == "up\n"
    with contextlib.closing(Zygote(name, Preload(forks=False))) as second:
        second.hold()
        children = subprocess.run(
            ["ps", "--ppid", str(first.pid), "-o", "pid="],
            capture_output=True,
            text=True,
        )
        assert children.stdout == "", "Ray kills a worker's children with it"
        fork = second.fork("tests.unit.test_forks:ask", 6, 3)
        first.kill()
        first.wait(HANG_S)
        assert fork.serve(Asked()) == 2
    assert not second._directory.exists()


def test_a_zygote_that_is_about_to_end_costs_no_trial(parent, monkeypatch):
    parent.hold()
    connect = client.Zygote._connect
    left = ["as it ends"]

    def too_late(self):
        if left:
            left.pop()
            other = Zygote(
                parent._directory.name.split("-")[2], Preload(forks=False)
            )
            other._connection = connect(other)
            connection = connect(self)
            other.close()
            return connection
        return connect(self)

    monkeypatch.setattr(client.Zygote, "_connect", too_late)
    assert parent.fork("tests.unit.test_forks:ask", 6, 3).serve(Asked()) == 2


def test_an_import_that_never_ends_keeps_no_zygote(name, tmp_path):
    begun = tmp_path / "begun"
    Path(tmp_path, "endless.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(3600)\n"
    )
    one = Zygote(name, Preload((str(tmp_path),), ("endless",)))
    until(begun.exists, "the import of the module")
    one.close()
    assert not one._directory.exists()


@pytest.mark.parametrize(
    ("folder", "line", "found"),
    [
        ("", "open(__file__)", ["users_own.py"]),
        ("", "socket.socket()", ["socket"]),
        ("", "numpy.memmap(__file__)", []),
        ("", "os.environ.get('LOCAL_RANK')", ["LOCAL_RANK"]),
        ("", "os.getenv('HOME')", []),
        ("dist-packages", "os.environ.get('LOCAL_RANK')", []),
    ],
)
def test_what_forks_would_share_of_an_import(
    tmp_path, monkeypatch, folder, line, found
):
    file = tmp_path / folder / "users_own.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"import numpy, os, socket\nKEPT = {line}\n")
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    names = [Path(each).name for each in import_users(["users_own"])]
    assert [name.partition(":")[0] for name in names] == found


def test_trials_draw_alike_only_what_their_module_seeds(name, tmp_path):
    Path(tmp_path, "drawing.py").write_text(
        "import random, numpy as np, torch\n"
        "random.seed(0), np.random.seed(0), torch.rand(1000)\n"
        "def draws(channel):\n"
        "    return random.random(), np.random.rand(), torch.rand(1).item()\n"
    )
    preload = Preload((str(tmp_path),), ("drawing",))
    with contextlib.closing(Zygote(name, preload)) as one:
        first, second = (one.fork("drawing:draws").serve(None) for _ in "12")
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_no_fork_is_made_once_a_trials_library_has_a_thread(name, tmp_path):
    Path(tmp_path, "threaded.py").write_text(
        "import threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)\n"
        "thread.start()\n"
        "def is_alive(channel):\n    return thread.is_alive()\n"
    )
    with contextlib.closing(Zygote(name, Preload((str(tmp_path),)))) as one:
        one.hold()
        one.learn(["threaded"])
        assert one.fork("threaded:is_alive").serve(None)


def test_a_trials_task_finds_its_rank_before_its_import(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(IndexError):
        Place(0, 3, 0, 1, 2, 0).form_group([])
    assert os.environ["WORLD_SIZE"] == "3"
