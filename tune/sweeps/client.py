"""A command that has its sweep run by the resident driver of its cluster, which keeps lanes for the next; without Ray.

The resident driver (tune/sweeps/resident.py) is a process of this machine, one for each cluster, interpreter, user and
state of this code. It is given the command's arguments, directory, environment, and its very terminal: what the sweep
prints needs no way back. Signals are passed on, and a command that dies interrupts its sweep.

Environment read: RAY_ADDRESS, without which a cluster is embedded and nothing outlives a sweep; PACELINE_RESIDENT=0
switches this off.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainers import residents
from trainers.errors import PacelineError

RESIDENT = "--resident"
"""What `python -m tune` is started with to become the resident driver, before the path of its socket."""
_START_S, _LOOK_S = 30.0, 0.05
_CODE = Path(__file__).parents[2]
_PACKAGES = ("trainers", "cluster", "tune")


def is_wanted() -> bool:
    """Whether lanes may outlive the sweeps of this process."""
    is_embedded = os.environ.get("RAY_ADDRESS", "") in ("", "local")
    return not is_embedded and os.environ.get("PACELINE_RESIDENT") != "0" and sys.platform == "linux"


def run_by_resident(arguments: Sequence[str], output: int = 1) -> int | None:
    """Have `python -m tune ARGUMENTS` run by the resident driver, which is started where there is none; returns its
    exit code, None where it is busy with another sweep. `output` is the descriptor of the command's standard output.

    Raises PacelineError where it dies.
    """
    sys.stdout.flush()
    question = {"run": list(arguments), "directory": str(Path.cwd()), "environment": dict(os.environ)}
    directory = residents.directory()
    if directory is None:
        return None
    place = directory / f"{_identity()}.sock"
    with _passing_on() as connected:
        connection = residents.ask(place, question, (0, output, 2))
        if connection is None:
            _start(place)
            connection = residents.ask(place, question, (0, output, 2))
        if connection is None:
            return None
        connected.append(connection)
        found = residents.answer(connection)
    if found is None:
        words = "the resident driver of this cluster has died, and the sweep with it; the same command goes on"
        raise PacelineError(words)
    return found.get("exit")


@contextlib.contextmanager
def _passing_on() -> Iterator[list[socket.socket]]:
    """Pass on to the connections what asks this process to stop."""
    connected: list[socket.socket] = []

    def heed(number: int, frame: FrameType | None) -> None:
        if not connected:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):
            connected[0].sendall(bytes([number]))

    before = {number: signal.signal(number, heed) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield connected
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(place: Path) -> None:
    """Start the resident driver, in a session of its own, and wait until it listens."""
    command = [sys.executable, "-m", "tune", RESIDENT, str(place)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_CODE), os.environ.get("PYTHONPATH", "")])}
    quiet: Any = subprocess.DEVNULL
    process = subprocess.Popen(  # noqa: S603 (ourselves)
        command, env=environment, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    deadline = time.monotonic() + _START_S
    while not place.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _identity() -> str:
    """What a resident driver must have in common with a command, as a hash: the cluster, the interpreter, our own code,
    and as a Ray job the runtime environment, which its workers were started with.
    """
    files = sorted(file for package in _PACKAGES for file in (_CODE / package).rglob("*.py"))
    states = [(str(file), file.stat().st_mtime_ns) for file in files]
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env")
    what = [os.environ["RAY_ADDRESS"], sys.executable, sys.version, states, job]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
