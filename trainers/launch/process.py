"""What each process sets up around its work: imports, log, signals, and how it ends.

Environment read: TORCHELASTIC_RUN_ID, which torchrun sets; RAY_ADDRESS, the
cluster to join.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from trainers.errors import redact
from trainers.output import PACKAGES

own_cluster = threading.Event()
"""Set while this process is connected to a cluster that Paceline has started in it."""
_LOOK_S = 0.5


def embedded() -> bool:
    """Whether Paceline starts the cluster, in this process, and ends it.

    A cluster that the user's program has joined or started is not embedded.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return own_cluster.is_set()
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


@contextlib.contextmanager
def without_collection(own_process: bool = False) -> Iterator[None]:
    """Disable the garbage collector during a block of imports.

    Importing torch creates a million permanent objects, and Python's collector
    goes through them dozens of times meanwhile: a third of the import's time.

    With `own_process`, all objects that exist at the end of the block are
    exempt from later collections, too. Use `own_process` only at the start of
    a process of ours: a caller's process would keep its garbage cycles
    forever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if own_process:
            gc.freeze()
        if enabled:
            gc.enable()


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup_logging(rank: int, quiet: bool = False) -> None:
    """Send our packages' log to standard output only, without secrets.

    Rank 0 logs its progress without a prefix (with `quiet`, only warnings);
    other ranks log warnings with their rank.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        _Redacting(
            "%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"
        )
    )
    level = logging.INFO if rank == 0 and not quiet else logging.WARNING
    for name in PACKAGES:
        package = logging.getLogger(name)
        package.handlers[:] = [handler]
        package.setLevel(level)
        package.propagate = False


@contextlib.contextmanager
def shown_log(
    rank: int, is_command: bool, quiet: bool = False
) -> Iterator[None]:
    """Show Paceline's log: in a command permanently, otherwise within the block.

    If the caller's logging already shows Paceline's log, nothing is changed.
    """
    if is_command:
        setup_logging(rank, quiet)
        yield
        return
    packages = [logging.getLogger(name) for name in PACKAGES]
    if all(
        package.isEnabledFor(logging.INFO) and package.hasHandlers()
        for package in packages
    ):
        yield
        return
    before = [
        (package.handlers[:], package.level, package.propagate)
        for package in packages
    ]
    setup_logging(rank)
    try:
        yield
    finally:
        for package, (handlers, level, propagate) in zip(
            packages, before, strict=True
        ):
            package.handlers[:], package.propagate = handlers, propagate
            package.setLevel(level)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask to stop; without SIGHUP if it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [
        signal.SIGTERM,
        signal.SIGINT,
        *([] if ignored else [signal.SIGHUP]),
    ]


class StopSignals:
    """Within its block SIGTERM, SIGHUP and the first Ctrl-C only ask to stop.

    A second Ctrl-C interrupts immediately.

    A repeated SIGTERM does not interrupt: it may come both from torchrun and
    from the process that started torchrun.
    """

    asked = False

    def __init__(
        self, tell: Callable[[str], None] = lambda name: None
    ) -> None:
        """`tell` is called in a thread with the name of the first signal."""
        self._tell = tell
        self._telling: threading.Thread | None = None

    def __enter__(self) -> StopSignals:
        self._before = {
            number: signal.signal(number, self._heed)
            for number in stop_signals()
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._telling is not None:
            self._telling.join()

    def _heed(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked = True
            self._telling = threading.Thread(
                target=self._tell,
                args=(signal.Signals(number).name,),
                daemon=True,
            )
            self._telling.start()


def end_at_once() -> None:
    """Let SIGTERM and Ctrl-C interrupt this process; no effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)


def follow(
    wait: Callable[[], object], last: Callable[[], object] = lambda: None
) -> None:
    """When `wait` returns, call `last` and end this process.

    It uses a thread, because signal handlers cannot run during a collective.
    """

    def end() -> None:
        wait()
        last()
        os._exit(1)

    threading.Thread(target=end, name="parent", daemon=True).start()


def follow_agent() -> None:
    """End this worker of torchrun within a second of the end of torchrun's agent."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()

    def wait() -> None:
        while os.getppid() == agent:
            time.sleep(_LOOK_S)

    follow(wait)
