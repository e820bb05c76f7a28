"""A trial's process: what it is told to do, and how it asks the process that wanted it.

Run as: python -m tune.forks.child CHANNEL STDOUT STDERR [FILE...], numbers of open
files, where it is no fork.
"""

import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""By which processes whose parent has ended become children of this one."""
_PR_SET_PDEATHSIG = 1
END = "end"
"""The call that brings a trial's outcome, and has no answer."""


class TrialStopped(SystemExit):
    """Ends a training function at its report, once the search has stopped its trial."""


@dataclass(frozen=True)
class Work:
    """What a process is to do."""

    target: str
    """`module:function`: called with the Channel and the arguments; what it returns is
    the outcome.
    """
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    directory: str


class Channel:
    """A trial's end of the pipe to the process that wanted it; any thread may call."""

    def __init__(self, connection: Connection, files: Sequence[int]) -> None:
        """`files`: further open files that were handed over."""
        self._connection = connection
        self._lock = threading.Lock()
        self.files = files

    def call(self, method: str, *args: Any, **given: Any) -> Any:
        """Return what a method of the other side's returns, or raise what it raises."""
        with self._lock:
            self._connection.send_bytes(pack((method, args, given)))
            raised, value = pickle.loads(self._connection.recv_bytes())  # noqa: S301 (from the process that wanted it)
        if raised:
            raise value
        return value

    def end(self, outcome: Any) -> None:
        """Say how the trial has ended, if anybody still wants to know."""
        with self._lock, suppress(BrokenPipeError):
            self._connection.send_bytes(pack((END, (outcome,), {})))


def pack(value: Any) -> bytes:
    """Return a value as bytes.

    Where Ray is there, objects of modules that the other side cannot import go by
    value.
    """
    of_ray: Any = sys.modules.get("ray.cloudpickle")
    return pickle.dumps(value) if of_ray is None else bytes(of_ray.dumps(value))


def prctl(option: int, value: int) -> None:
    """Set what Linux does with this process's children, or with it."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become(files: Sequence[int]) -> None:
    """Do the work that comes over the channel, the first of some open files.

    Does not return.
    """
    code = 1
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the zygote
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        channel, out, err, *others = files
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        with Connection(channel) as connection:
            work: Work = pickle.loads(connection.recv_bytes())  # noqa: S301 (from the process that wanted it)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(work.environment)
            with suppress(OSError):
                os.chdir(work.directory)
            asks = Channel(connection, others)
            module, _, name = work.target.partition(":")
            function = getattr(importlib.import_module(module), name)
            asks.end(function(asks, *work.arguments))
        code = 0
    except SystemExit as error:
        code = int(error.code is not None)
        if isinstance(error.code, int):
            code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    become([int(file) for file in sys.argv[1:]])
