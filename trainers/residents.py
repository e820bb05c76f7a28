"""What runs on this machine for this user beyond a command: drivers that keep lanes.

Their sockets lie in a directory of the user's own below the system's temporary one. A driver that keeps lanes
(tune/sweeps/resident.py) is one for each cluster, interpreter, user and state of this code. It is given a command's
arguments, directory, environment, and its very terminal: what it prints needs no way back. Signals are passed on, and a
command that dies interrupts what runs for it.

Environment read: RAY_ADDRESS, without which a cluster is embedded and nothing outlives a command; PACELINE_RESIDENT=0
switches drivers that keep lanes off.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

CODE = Path(__file__).parents[1]
"""Where our packages lie."""
_PACKAGES = ("trainers", "cluster", "tune")


def directory(made: bool = True) -> Path | None:
    """The directory of what this user runs, `made` where it is missing; None where anybody else could write to it."""
    place = _place()
    with contextlib.suppress(OSError):
        if made:
            place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return place
    return None


def tidy() -> None:
    """Delete the directory where nothing is in it."""
    with contextlib.suppress(OSError):
        _place().rmdir()


def _place() -> Path:
    return Path(tempfile.gettempdir(), f"paceline-{os.getuid()}")


def has_cluster() -> bool:
    """Whether this process has a cluster that was there before it: without one it embeds its own."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def place() -> Path | None:
    """The socket of the driver that may keep lanes for this process, which is there if it runs; None where none may."""
    if not has_cluster() or os.environ.get("PACELINE_RESIDENT") == "0" or sys.platform != "linux":
        return None
    return _place() / f"{_identity()}.sock"


def _identity() -> str:
    """What such a driver must have in common with a command, as a hash: the cluster, the interpreter, our own code, and
    as a Ray job the runtime environment, which its workers were started with.
    """
    files = sorted(file for package in _PACKAGES for file in (CODE / package).rglob("*.py"))
    states = [(str(file), file.stat().st_mtime_ns) for file in files]
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env")
    what = [os.environ["RAY_ADDRESS"], sys.executable, sys.version, states, job]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def hand_over(
    place: Path, what: dict[str, Any], output: int, start: Callable[[Path], None] | None = None
) -> dict[str, Any] | None:
    """Have the driver at a socket, which is started where there is none, do what this process was asked to; returns its
    answer: empty where there is none, None where it has died meanwhile. `output` is the descriptor of standard output.
    """
    if directory(made=start is not None) is None:
        return {}
    sys.stdout.flush()
    question = {**what, "directory": str(Path.cwd()), "environment": dict(os.environ)}
    with _passing_on() as connected:
        connection = ask(place, question, (0, output, 2))
        if connection is None and start is not None:
            start(place)
            connection = ask(place, question, (0, output, 2))
        if connection is None:
            return {}
        connected.append(connection)
        return answer(connection)


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


def sockets() -> list[Path]:
    """The sockets of the drivers that keep lanes."""
    return sorted(_place().glob("*.sock")) if _place().exists() and directory() is not None else []


def ask(place: Path, question: dict[str, Any], descriptors: Sequence[int] = ()) -> socket.socket | None:
    """Send a question to the driver at a socket; None where there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place))
        data = json.dumps(question).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], descriptors)
        connection.sendall(data)
    except OSError:
        connection.close()
        return None
    return connection


def drivers() -> dict[Path, dict[str, Any]]:
    """What the drivers that keep lanes say of themselves, by their sockets."""
    connections = {place: ask(place, {}) for place in sockets()}
    answers = {place: answer(one) for place, one in connections.items() if one is not None}
    return {place: found for place, found in answers.items() if found is not None}


def answer(connection: socket.socket) -> dict[str, Any] | None:
    """What it says; None where it has ended."""
    with connection, connection.makefile() as lines, contextlib.suppress(OSError):
        if line := lines.readline():
            found: dict[str, Any] = json.loads(line)
            return found
    return None
