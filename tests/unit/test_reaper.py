"""What kills the rest of an embedded cluster: what writes into its log, once the driver is gone, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from trainers.on_ray import reaper


def sleeper(file: Path, mode: str = "ab") -> subprocess.Popen[bytes]:
    """A process that has a file open, and no other sign of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open(mode) as opened:
        return subprocess.Popen(["sleep", "1000"], pass_fds=[opened.fileno()])


def test_what_outlives_the_driver_is_killed_even_if_it_was_stopped(tmp_path: Path) -> None:
    session = tmp_path / "session_1"
    log = session / "logs" / "raylet.out"
    agent, worker, reader = sleeper(log), sleeper(log), sleeper(log, "rb")
    stranger = sleeper(tmp_path / "session_10" / "logs" / "raylet.out")
    psutil.Process(worker.pid).suspend()
    assert set(reaper.processes(str(session))) == {agent.pid, worker.pid}
    with subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__, str(session)], stdin=subprocess.PIPE) as beside:
        assert (agent.poll(), worker.poll()) == (None, None)
    assert beside.returncode == 0
    assert (agent.wait(60), worker.wait(60)) == (-9, -9)
    for other in (reader, stranger):
        assert other.poll() is None
        other.kill()
        other.wait()
