"""What asks a process to stop and what ends it; that it ends with the process
that started it, and leaves its group.
"""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from tests.specs import REPOSITORY
from trainers.launch.process import StopSignals, stop_signals

ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("second", ALL)
def test_only_a_second_interrupt_ends_it(first, second):
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ALL}
    told = []
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
        assert [signal.getsignal(number) for number in ALL] == [
            signal.SIG_DFL
        ] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_amid_a_write_waits_for_its_end():
    """A buffered stream that is told from the handler itself would raise: it
    is being written to.
    """
    stream = threading.Lock()
    told = []

    def tell(name):
        with stream:
            told.append(name)

    with StopSignals(tell) as stop, stream:
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        assert told == []
    assert told == ["SIGTERM"]


def test_under_nohup_a_hang_up_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


WORKER = """
import time
from trainers.launch.process import follow_agent
follow_agent()
print("follows", flush=True)
time.sleep(3600)
"""
AGENT = f"""
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE, text=True) as worker:
    print(worker.stdout.readline().strip(), worker.pid, flush=True)
"""


def test_a_worker_ends_with_torchruns_agent():
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "1"},
    )
    words, pid = agent.stdout.readline().split()
    assert words == "follows"
    worker = os.pidfd_open(int(pid))
    agent.kill()
    agent.wait()
    gone, _, _ = select.select([worker], [], [], 120)
    os.close(worker)
    assert gone, "it outlives its agent"


SCRIPT = """
import sys
import time
from pathlib import Path

import torch
from trainers.launch.local import join_group, leave_group

def threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

join_group("gloo", sys.argv[1], 0, 1, 0)
torch.use_deterministic_algorithms(True)
assert "torch._dynamo" in sys.modules, "imported while the group is there"
torch.distributed.all_reduce(torch.ones(1))
before = threads()
leave_group(failed=False)
for _ in range(6000):  # Linux shows a thread for a moment after it has been joined
    if not threads():
        break
    time.sleep(0.01)
print(before, threads())
"""


def test_a_group_that_was_left_is_gone(tmp_path):
    """One that stays until the process ends makes it abort now and then:
    `terminate called ...`.
    """
    place = f"file://{tmp_path}/rendezvous"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, place],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 0
    assert after == 0
