"""The client side of a node's zygote and of the processes that it forks."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from trainers.causes import ended_by
from tune.forks.child import END, TrialStopped, Work, pack
from tune.forks.zygote import END_ALL, FORK, LONGEST_MESSAGE, NUMBER, Preload

_LOOK_S = 0.02
_STOP_S = 0.5
"""How long a function that was stopped may take to clean up."""
_MOST_STOPPED_S = 300.0
_START_S = 600.0
"""How long a zygote may take for its imports, even on a very busy machine."""
_MOST_STARTS = 3
"""Attempts to reach a zygote for one fork; a zygote may end during an attempt."""


class NoOutcomeError(Exception):
    """Raised when a process has ended without sending an outcome."""

    def __init__(self, code: int) -> None:
        """`code` is the process's exit code or, if negative, the signal that ended it."""
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"the process ended {ended_by(self.code)}"


class Zygote:
    """Client of a sweep's zygote on this node; the zygote lives while it has clients."""

    def __init__(self, name: str, preload: Preload) -> None:
        """Start the zygote if it is not running; do not wait until it is up.

        `name` identifies the sweep, and is the same on all nodes.
        """
        self.name = name
        self.preload = preload
        self._directory = _directory(name)
        self._path = self._directory / "zygote"
        self._connection: socket.socket | None = None
        self._learned: set[str] = set()
        self._start()

    @classmethod
    def of_functions(cls, name: str) -> Zygote:
        """Return the zygote for a sweep over Ray Train training functions."""
        modules = ("tune.forks.function", "ray.tune", "tune.ray.trainer")
        return cls(name, Preload(modules=modules))

    def _start(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._directory.stat().st_uid != os.getuid():
            raise PermissionError(f"{self._directory} belongs to another user")
        with (self._directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process of this node is starting or running the zygote.
            except BlockingIOError:
                return
            self._path.unlink(missing_ok=True)
            places = [*self.preload.path, *sys.path]
            # Without NVML, torch would initialize CUDA to count the devices,
            # and then no fork could use CUDA.
            own = {
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            self._connection, theirs = socket.socketpair()
            given = [
                str(self._path),
                json.dumps(asdict(self.preload)),
                str(theirs.fileno()),
            ]
            command = [sys.executable, "-m", "tune.forks.zygote", *given]
            with theirs:
                subprocess.run(  # noqa: S603 (this interpreter)
                    command,
                    env=os.environ | own,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[lock.fileno(), theirs.fileno()],
                    check=True,
                )

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect(str(self._path))
                return connection
            if time.monotonic() > deadline:
                within = f"within {_START_S:g} s"
                raise TimeoutError(
                    f"the process that forks trials did not start {within}"
                )
            self._start()  # in case the process that was starting it has ended
            time.sleep(_LOOK_S)

    def hold(self) -> None:
        """Keep the zygote alive for as long as this process lives."""
        if self._connection is None:
            self._connection = self._connect()

    def fork(
        self, target: str, *arguments: Any, files: Sequence[int] = ()
    ) -> Fork:
        """Start a process that calls a function (`Work.target`).

        Args:
            target: The function, as `module:name`.
            *arguments: The function's arguments, which are sent pickled.
            files: Open files that are passed to the process.
        """
        work = Work(target, arguments, dict(os.environ), str(Path.cwd()))
        for _ in range(_MOST_STARTS):
            self.hold()
            # Raised if the zygote was just ending, for lack of work.
            with suppress(ConnectionError):
                return Fork(self._connect(), work, files)
            self._forget()
        raise ConnectionError(
            f"the process that forks trials has ended {_MOST_STARTS} times before it forked one"
        )

    def learn(self, modules: Sequence[str]) -> None:
        """Have the zygote import modules, so that all further forks have them."""
        new = [module for module in modules if module not in self._learned]
        message = "".join(f"{module}\n" for module in new).encode()
        if self._connection is None or len(message) > LONGEST_MESSAGE:
            return
        try:
            self._connection.sendall(message)
            self._learned.update(new)
        except OSError:  # the zygote has died: the next fork starts another
            self._forget()

    def _forget(self) -> None:
        self._connection = None
        self._learned.clear()

    def close(self) -> None:
        """End this node's zygote, if connected to it, and wait until it has ended."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.sendall(f"{END_ALL}\n".encode())
                while self._connection.recv(1):
                    pass
            self._connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _directory(name: str) -> Path:
    """Return the directory of the socket of a sweep's zygote on this node.

    If several nodes share a machine, each in its own network namespace, each
    of them has its own directory.
    """
    namespace = 0
    if sys.platform == "linux":
        namespace = Path("/proc/self/ns/net").stat().st_ino
    return Path(tempfile.gettempdir(), f"paceline-forks-{name}-{namespace}")


class Fork:
    """A process, forked by the zygote, that calls one function and ends."""

    def __init__(
        self, control: socket.socket, work: Work, files: Sequence[int]
    ) -> None:
        self._control = control
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [FORK], [theirs.fileno(), 1, 2, *files])
        self._channel = Connection(ours.detach())
        with suppress(BrokenPipeError):
            self._channel.send_bytes(pack(work))
        self.pid = self._number()
        if self.pid is None:
            raise ConnectionResetError

    def serve(
        self,
        asked: Any,
        goes_on: Callable[[], bool] = lambda: True,
        look_s: float = 1.0,
        most_stopped_s: float = _MOST_STOPPED_S,
    ) -> Any:
        """Answer the process's calls with `asked`'s methods; return the process's outcome.

        Args:
            asked: The object whose methods the process may call.
            goes_on: Returns whether the outcome is still wanted.
            look_s: Seconds between two calls of `goes_on`.
            most_stopped_s: Seconds for which the process may be suspended
                (SIGSTOP).

        Raises:
            NoOutcomeError: The process ended without an outcome, or was
                suspended for too long.
            InterruptedError: The outcome is no longer wanted, by `goes_on` or
                a method of `asked` that raised this.
            TrialStopped: A method of `asked` raised this; the process
                received it first.
        """
        ran_at = time.monotonic()
        while True:
            # A process that the fork started may hold the channel open after
            # the fork's end.
            ready = wait([self._channel, self._control], look_s)
            if self._channel in ready:
                call = self._heard()
                if call is None:
                    break
                if call[0] == END:
                    self.wait()
                    return call[1][0]
                if self._answer(asked, *call):
                    self._stop(asked)
            elif ready:
                break
            elif not goes_on():
                self.kill()
                raise InterruptedError
            elif not self._is_stopped():
                ran_at = time.monotonic()
            elif time.monotonic() > ran_at + most_stopped_s:
                self.kill()
                raise NoOutcomeError(-signal.SIGSTOP)
        raise NoOutcomeError(self.wait())

    def _stop(self, asked: Any) -> NoReturn:
        """Let a stopped function clean up briefly, then end its process."""
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            ready = wait([self._channel, self._control], _LOOK_S)
            if not ready:
                continue
            call = self._heard() if self._channel in ready else None
            if call is None or call[0] == END:
                break
            self._answer(asked, *call)
        self.kill()
        raise TrialStopped(0)

    def _heard(self) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
        """Return the next call, or None if there will be no more."""
        try:
            call: Any = pickle.loads(self._channel.recv_bytes())  # noqa: S301 (a fork of our own)
        except (EOFError, OSError):
            return None
        return call  # type: ignore[no-any-return]

    def _answer(
        self,
        asked: Any,
        method: str,
        args: tuple[Any, ...],
        given: dict[str, Any],
    ) -> bool:
        """Answer a call; return whether the answer tells the process to stop."""
        try:
            answer = (False, getattr(asked, method)(*args, **given))
        except InterruptedError:
            self.kill()
            raise
        except (Exception, TrialStopped) as error:
            answer = (True, error)
        with suppress(OSError):
            self._channel.send_bytes(pack(answer))
        return isinstance(answer[1], TrialStopped)

    def wait(self) -> int:
        """Wait for the process to end; return its exit code, or minus the signal."""
        code = self._number()
        self.kill()
        return -signal.SIGKILL if code is None else code

    def _number(self) -> int | None:
        """Return the next number that the zygote sends, or None if it has died."""
        data = self._control.recv(NUMBER.size, socket.MSG_WAITALL)
        return (
            int(NUMBER.unpack(data)[0]) if len(data) == NUMBER.size else None
        )

    def _is_stopped(self) -> bool:
        """Return whether the process is suspended by a signal (SIGSTOP)."""
        with suppress(OSError):
            text = Path(f"/proc/{self.pid}/stat").read_text()
            _, _, state = text.rpartition(") ")
            return state.startswith(("T", "t"))
        return False

    def kill(self) -> None:
        """End the process and all that it started, by closing the connection."""
        self._control.close()
        self._channel.close()
