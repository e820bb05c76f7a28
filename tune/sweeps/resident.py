"""A driver that outlives its sweeps; tune/sweeps/client.py starts it, and has it run sweeps, trainers/ runs (Ray).

It runs one command at a time, with the command's terminal, directory and environment, and keeps the lanes of the last
sweep until their time is over, somebody else waits for what they hold, or the cluster is gone; then it ends.
"""

import contextlib
import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray

from trainers import residents
from trainers.__main__ import main as train
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import connect, disconnect
from trainers.start import in_lane
from tune.lanes.kept import Kept, resident
from tune.lanes.module_state import is_of_users
from tune.lanes.training_run import GivenBack, do_in_lane

_LOOK_S = 1.0


class Server:
    """Takes commands; all but the one that runs are told that it is busy."""

    def __init__(self, place: Path, kept: Kept) -> None:
        self._place, self._kept = place, kept
        self._address = os.environ["RAY_ADDRESS"]
        self._commands: queue.Queue[tuple[dict[str, Any], list[int], socket.socket]] = queue.Queue()
        self._turn = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        residents.directory()  # the driver before may have deleted it since the command made it
        new = place.with_suffix(f".{os.getpid()}")
        self._listening.bind(str(new))
        self._listening.listen()
        self._inode = new.stat().st_ino  # nobody else's as long as the socket is open
        new.rename(place)  # in place of one that has died; whoever finds it finds it listening
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def next(self) -> tuple[dict[str, Any], list[int], socket.socket] | None:
        """The next command, with the descriptors of its terminal; None where none came for a while."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=_LOOK_S)
        return None

    def done(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        """Tell a command its exit code, or that it has to go on by itself, and take others."""
        _say(connection, answer)
        self._turn.release()

    def close(self) -> bool:
        """Take no more commands; returns whether none has come in the last moment."""
        if not self._turn.acquire(blocking=False):
            return False
        self.vanish()
        return True

    def vanish(self) -> None:
        """Be found no more; the driver that has come since is."""
        with contextlib.suppress(FileNotFoundError):
            if self._place.stat().st_ino == self._inode:
                self._place.unlink()
        residents.tidy()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with contextlib.suppress(OSError, ValueError):
                size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
                question = json.loads(_received(connection, int.from_bytes(size, "big")))
                if not {"run", "train"} & question.keys():
                    known = {"pid": os.getpid(), "address": self._address, "busy": self._turn.locked()}
                    _say(connection, {**known, **self._kept.status()})
                elif self._turn.acquire(blocking=False):
                    self._commands.put((question, descriptors, connection))
                else:
                    _say(connection, {"busy": True})


def _received(connection: socket.socket, size: int) -> bytes:
    with connection.makefile("rb") as file:
        return file.read(size)


def _say(connection: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(what).encode() + b"\n")
        connection.close()


def _heed(connection: socket.socket, over: threading.Event) -> None:
    """Take the signals that a command passes on; its death is one."""
    while not over.is_set():
        try:
            number = connection.recv(1)
        except OSError:
            return
        if over.is_set():
            return
        os.kill(os.getpid(), number[0] if number else signal.SIGTERM)
        if not number:
            return


@contextlib.contextmanager
def _in_place_of(question: dict[str, Any], descriptors: list[int]) -> Iterator[None]:
    """This process has a command's terminal, directory and environment, and forgets what it has imported of the
    user's.
    """
    own = [os.dup(number) for number in range(3)]
    environment, path, modules = dict(os.environ), sys.path[:], set(sys.modules)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(question["directory"])
    os.environ.clear()
    os.environ.update(question["environment"])
    sys.path.insert(0, question["directory"])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the terminal may be gone
                stream.flush()
        for number, descriptor in enumerate(own):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir("/")
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        for name in [name for name in sys.modules if name not in modules and is_of_users(sys.modules[name], None)]:
            del sys.modules[name]
        gc.collect()


def serve(place: Path, run: Callable[[list[str]], int]) -> None:
    """Run commands by their arguments, until there is nothing to keep."""
    kept = Kept()
    resident.append(kept)
    in_lane.append(partial(do_in_lane, kept))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    server = Server(place, kept)
    try:
        while (command := _next(server, kept)) is not None:
            _run(server, *command, run)
        kept.end()
        disconnect()
    finally:
        server.vanish()


def _next(server: Server, kept: Kept) -> tuple[dict[str, Any], list[int], socket.socket] | None:
    """The next command; None once there is nothing to keep."""
    # Before its first command it has no cluster.
    with ending_with_cluster("", server.vanish) if ray.is_initialized() else contextlib.nullcontext():
        while (command := server.next()) is None:
            if (not ray.is_initialized() or kept.why_not() is not None) and server.close():
                return None
        return command


def _run(
    server: Server,
    question: dict[str, Any],
    descriptors: list[int],
    connection: socket.socket,
    run: Callable[[list[str]], int],
) -> None:
    over, answer = threading.Event(), {"exit": 1}
    try:
        with _in_place_of(question, descriptors):
            threading.Thread(target=_heed, args=(connection, over), daemon=True).start()
            connect(show_workers=False)  # it stays connected
            answer = {"exit": run(question["run"]) if "run" in question else train(question["train"])}
    except GivenBack:
        answer = {"begun": True}
    finally:
        over.set()
        server.done(connection, answer)
