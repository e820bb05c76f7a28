"""The lease of a directory: who gets it, who is refused, and that whoever has
lost it writes nothing more.
"""

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import fs

from tests.waits import until
from trainers import lease
from trainers.errors import ConfigError, LeaseError
from trainers.lease import (
    LEASE,
    SETTLE_S,
    STALE_S,
    Holder,
    _Lease,
    delete_own,
    fenced,
    held,
)
from trainers.storage import Storage
from tune.sweeps.spec import SAVED

MARK = "config.yaml"


class Clock:
    """Time that passes only while somebody sleeps; `then` is called with the
    time that has passed, after each sleep.
    """

    strftime = staticmethod(time.strftime)
    gmtime = staticmethod(time.gmtime)

    def __init__(self):
        self.now_s = 1e6
        self.slept = []
        self.then = lambda passed_s: None

    def monotonic(self):
        return self.now_s

    def sleep(self, wait_s):
        self.now_s += wait_s
        self.slept.append(wait_s)
        self.then(self.now_s - 1e6)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(lease, "time", found)
    return found


class Objects:
    """A filesystem that is not local: no exclusive creation, and a file
    appears whole when its stream is closed.
    """

    def __init__(self, root):
        self._files = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())

    def __getattr__(self, name):
        return getattr(self._files, name)

    def open_output_stream(self, path):
        files = self._files

        class Put(io.BytesIO):
            def close(self):
                if not self.closed:
                    aside = f"{path}.{threading.get_ident()}"
                    files.create_dir(str(Path(path).parent))
                    with files.open_output_stream(aside) as stream:
                        stream.write(self.getvalue())
                    files.move(aside, path)
                super().close()

        return Put()


def object_store(root, monkeypatch):
    resolved = property(lambda one: (Objects(root), "bucket/run"))
    monkeypatch.setattr(Storage, "_resolved", resolved)
    (root / "bucket" / "run").mkdir(parents=True)
    return Storage("s3://bucket/run")


@pytest.fixture(params=["local", "objects"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "objects":
        return object_store(tmp_path, monkeypatch)
    return Storage(tmp_path / "run")


def elsewhere():
    return replace(
        Holder.this_process(), machine="another boot pid:[1]", host="node-2"
    )


def leave(storage, holder):
    storage.write(LEASE, holder.write())


def on_storage(storage):
    found = Holder.read(storage.read(LEASE))
    assert found is not None
    return found


def test_a_new_lease_costs_no_wait_on_a_local_directory(storage, clock):
    with held(storage, MARK) as token:
        storage.write(MARK, b"")
        holder = on_storage(storage)
        assert (holder.token, holder.pid, holder.is_here, holder.is_alive) == (
            token,
            os.getpid(),
            True,
            True,
        )
    assert clock.slept == ([] if storage.is_local else [SETTLE_S])
    assert storage.names() == [MARK], "nothing is left of it"


@pytest.mark.parametrize(("mark", "other"), [(MARK, SAVED), (SAVED, MARK)])
def test_a_run_and_a_sweep_share_no_directory(storage, clock, mark, other):
    """Also where an earlier version has let them."""
    for name in (other, mark):
        storage.write(name, b"")
        with pytest.raises(ConfigError, match=other), held(storage, mark):
            pytest.fail("it has begun")
        with pytest.raises(ConfigError, match=other):
            delete_own(storage, mark)
    assert storage.names() == sorted([mark, other])


@pytest.mark.parametrize("mark", [MARK, SAVED])
@pytest.mark.parametrize("name", ["a.py", "log/a", "trials/a", ".git/x"])
def test_what_others_have_made_is_not_deleted(storage, mark, name):
    """With a file of theirs that is called as ours, too."""
    for each in (name, mark):
        storage.write(each, b"")
        with pytest.raises(ConfigError, match="which holds"):
            delete_own(storage, mark)
    assert storage.exists(name)


WRITTEN = {
    MARK: "result.json microbatch.json checkpoint_2026-11-30_10/a log/000000000004.jsonl live/000000000004.jsonl profile/trace.json.gz"
    " checkpoints/step-000000000004/state.pt tensorboard/events.out.tfevents.4 hangs/a.txt .validate_storage_marker memory/a.txt",
    SAVED: "best.yaml boundary.json before/sweep-17.yaml states/3f2a/config.yaml trials/3f2a.json steering/00-1f.json tune/tuner.pkl lanes/lane-0/a",
}


@pytest.mark.parametrize("mark", WRITTEN)
def test_what_a_run_or_sweep_writes_is_deleted(storage, mark):
    for name in [LEASE, mark, *WRITTEN[mark].split()]:
        storage.write(name, b"")
    delete_own(storage, mark)
    assert storage.names() == [LEASE]


def test_a_living_holder_is_named_and_keeps_it(storage, clock):
    parent = os.getppid()
    live = replace(
        Holder.this_process(),
        pid=parent,
        started=lease._started(parent),
        host="here",
    )
    leave(storage, live)
    with pytest.raises(ConfigError) as met, held(storage, MARK):
        raise AssertionError
    assert met.value.exit_code == 2
    assert f"process {parent} on here" in str(met.value)
    assert on_storage(storage) == live
    assert clock.slept == []


@pytest.mark.parametrize("kind", ["ended", "zombie", "pid of another by now"])
def test_a_process_of_this_machine_that_has_ended_holds_nothing(
    storage, clock, kind
):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    dead = replace(
        Holder.this_process(), pid=child.pid, started=lease._started(child.pid)
    )
    if kind == "zombie":
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    elif kind == "ended":
        child.wait()
    else:
        dead = replace(dead, pid=os.getpid(), started="1")
    leave(storage, dead)
    with held(storage, MARK) as token:
        storage.write(MARK, b"")
        assert on_storage(storage).token == token
    assert clock.slept == [SETTLE_S], "it is not watched"
    child.wait()


def test_a_holder_elsewhere_is_alive_as_long_as_it_counts(storage, clock):
    there = replace(
        elsewhere(), since="2199-01-01 00:00:00 UTC"
    )  # its clock is wrong: what of it
    leave(storage, there)

    def renew(passed_s):
        if passed_s >= 27:
            leave(storage, replace(there, count=1))

    clock.then = renew
    with pytest.raises(ConfigError), held(storage, MARK):
        raise AssertionError
    assert 27 <= sum(clock.slept) < STALE_S


@pytest.mark.parametrize("data", [b"", b"[]", b'{"pid": 1}'])
def test_a_lease_that_cannot_be_read_is_watched_like_any_other(
    storage, clock, data
):
    storage.write(LEASE, data)
    with held(storage, MARK):
        storage.write(MARK, b"")
    assert STALE_S <= sum(clock.slept) <= STALE_S + SETTLE_S


def test_of_many_that_start_at_once_on_a_local_directory_one_has_it(tmp_path):
    storage = Storage(tmp_path)
    gate = threading.Barrier(8)
    got = []
    refused = []

    def start():
        gate.wait()
        try:
            got.append(_Lease(storage))
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].release()
    assert storage.names() == []


@pytest.fixture
def mine(storage, clock):
    """A directory of a run whose lease is held, as its workers get it."""
    storage.write(MARK, b"")
    leave(storage, replace(Holder.this_process(), token="mine"))  # noqa: S106
    return fenced(storage, MARK, "mine")


def take(storage):
    leave(storage, elsewhere())


def empty(storage):
    for name in storage.names():
        storage.delete(name)


@pytest.mark.parametrize(
    "change", [take, lambda storage: storage.delete(MARK), empty]
)
def test_whoever_has_lost_the_lease_writes_and_deletes_nothing(
    storage, mine, clock, change
):
    mine.write("kept", b"1")
    change(storage)
    clock.now_s += 1.0
    before = storage.names()
    crossed = pickle.loads(pickle.dumps(mine))  # noqa: S301 (as it goes to Ray's workers)
    for place in (
        mine,
        mine.child("checkpoints", "step-1"),
        crossed,
        crossed.child("log"),
    ):
        with pytest.raises(LeaseError):
            place.write("new", b"")
        with pytest.raises(LeaseError):
            place.delete("kept")
    assert storage.names() == before
    assert clock.slept == [], "another try would meet it again"


@pytest.mark.parametrize("change", [take, empty])
def test_the_holder_hears_that_it_has_lost_it_and_says_so(
    storage, monkeypatch, change
):
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    monkeypatch.setattr(lease, "SETTLE_S", 0.0)
    with pytest.raises(LeaseError), held(storage, MARK) as token:  # noqa: PT012
        storage.write(MARK, b"")
        change(storage)

        def is_renewed():
            """What a newcomer finds when it looks again: a holder that had
            looked before has written after it.
            """
            if storage.exists(LEASE) and on_storage(storage).token == token:
                change(storage)
            return False

        until(is_renewed, every_s=0.005)  # SIGTERM ends this
    assert storage.names() == ([MARK, LEASE] if change is take else []), (
        "what is another's is not deleted"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_nobody_heeds_gives_it_back(tmp_path, number):
    storage = Storage(tmp_path)
    before = signal.signal(number, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), held(storage, MARK):  # noqa: PT012
        storage.write(MARK, b"")
        signal.raise_signal(number)
    assert storage.names() == [MARK]
    assert signal.signal(number, before) == signal.SIG_DFL
