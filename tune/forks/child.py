"""A trial's process: its work, and its channel to the process that requested it.

A trial that is not a fork runs as: python -m tune.forks.child CHANNEL STDOUT
STDERR [FILE...], where all arguments are file descriptors.

The zygote and its clients import this file before torch, or without torch. So
this file must not import torch at the top.
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
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""The prctl option by which orphaned descendants become this process's children."""
_PR_SET_PDEATHSIG = 1
END = "end"
"""The call that sends a trial's outcome; it gets no answer."""


class TrialStopped(SystemExit):
    """Raised in a training function's report once the search has stopped its trial."""


@dataclass(frozen=True)
class Work:
    """What a process is to do."""

    target: str
    """`module:function`, called with the Channel and the arguments; its return
    value is the outcome.
    """
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    directory: str


class Channel:
    """A trial's end of the pipe to the process that requested it; thread-safe."""

    def __init__(self, connection: Connection, files: Sequence[int]) -> None:
        """`files` are further open files that were passed to the trial."""
        self._connection = connection
        self._lock = threading.Lock()
        self.files = files

    def call(self, method: str, *args: Any, **given: Any) -> Any:
        """Call a method on the other side; return its result, or raise its error."""
        with self._lock:
            self._connection.send_bytes(pack((method, args, given)))
            raised, value = pickle.loads(self._connection.recv_bytes())  # noqa: S301 (from the requester)
        if raised:
            raise value
        return value

    def end(self, outcome: Any) -> None:
        """Send the trial's outcome, if the other side is still there."""
        with self._lock, suppress(BrokenPipeError):
            self._connection.send_bytes(pack((END, (outcome,), {})))


def make_absolute(checkpoint: Any) -> None:
    """Make a local checkpoint's path absolute, for a process in another directory."""
    if checkpoint and checkpoint.filesystem.type_name == "local":
        checkpoint.path = str(Path(checkpoint.path).absolute())


def pack(value: Any) -> bytes:
    """Pickle a value.

    If Ray is loaded, this uses Ray's cloudpickle, which pickles objects by
    value if the other side may be unable to import them.
    """
    of_ray: Any = sys.modules.get("ray.cloudpickle")
    return (
        pickle.dumps(value) if of_ray is None else bytes(of_ray.dumps(value))
    )


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl, which sets an option of this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def imported_libraries(before: set[str]) -> list[str]:
    """Return the installed modules imported since `before`, for the zygote to import."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_installed = "site-packages" in file or "dist-packages" in file
        if is_installed and name not in before:
            found.append(name)
    return found


def as_error(raised: BaseException) -> BaseException:
    """Return an Exception or SystemExit as it is, anything else as a RuntimeError.

    A KeyboardInterrupt, for example, would otherwise be taken for a SIGINT.
    """
    if isinstance(raised, Exception | SystemExit):
        return raised
    words = f"{type(raised).__name__} was raised"
    return RuntimeError(words).with_traceback(raised.__traceback__)


def become(files: Sequence[int]) -> None:
    """Run the work that is received over the channel, and exit; never return.

    `files` are file descriptors: the channel, standard output, standard error,
    others.
    """
    code = 1
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # die with the zygote
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        channel, out, err, *others = files
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        # What a trial has printed is shown at once, and outlives a kill.
        with suppress(AttributeError):  # a library's replacement may lack it
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with Connection(channel) as connection:
            work: Work = pickle.loads(connection.recv_bytes())  # noqa: S301 (from the requester)
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
