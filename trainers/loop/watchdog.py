"""End workers whose step never ends, after the stacks of every rank are saved with the run.

A thread of each worker watches the loop's heartbeat. Where a call holds the interpreter's lock for ever, and no thread
can run, the C-level timer of `faulthandler` writes the stacks and ends the process instead.
"""

import contextlib
import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable

from trainers.storage import Storage

logger = logging.getLogger(__name__)

HUNG_EXIT_CODE = 74
"""Exit code of a worker that its watchdog ended."""
GRACE_S = 5.0
"""A rank that hangs soon stops all others: each has this long to save its stacks before any exits."""


class Watchdog:
    """Ends this process when `beat` was not called for `timeout_s`."""

    def __init__(
        self, timeout_s: float, rank: int, storage: Storage | None, tell: Callable[[str], None] | None = None
    ) -> None:
        """`tell` is called with the message before the process ends."""
        self._timeout_s, self._rank, self._storage, self._tell = timeout_s, rank, storage, tell
        self._last = time.monotonic()
        self._closed = threading.Event()
        # Without a name: nothing is left of it though the process is killed.
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open until `close`)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Note that the loop goes on."""
        self._last = time.monotonic()

    def close(self) -> None:
        """Stop watching: the loop has ended."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()

    def _watch(self) -> None:
        interval_s = min(10.0, self._timeout_s / 4)
        while True:
            # The timer runs out only when this thread cannot wind it up again.
            faulthandler.dump_traceback_later(self._timeout_s + 2 * GRACE_S + interval_s, exit=True)
            if self._closed.wait(interval_s):
                return
            silent_s = time.monotonic() - self._last
            if silent_s > self._timeout_s:
                self._end(silent_s)

    def _end(self, silent_s: float) -> None:
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        words = f"rank {self._rank} made no step for {silent_s:.0f} s (failure.hang_timeout_s {self._timeout_s:g})"
        if self._storage is not None:
            name = f"hangs/{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-rank-{self._rank:05d}.txt"
            with contextlib.suppress(Exception):  # ending the process matters more
                self._storage.write(name, f"{words}\n\n{self._file.read()}".encode())
                words += f"; its stacks are in {self._storage.locate(name)}"
        logger.error("%s", words)
        if self._tell is not None:
            with contextlib.suppress(Exception):
                self._tell(words)
        time.sleep(GRACE_S)
        os._exit(HUNG_EXIT_CODE)


def count_hangs(storage: Storage) -> int:
    """Return how many ranks have saved their stacks in a run's directory."""
    return len(storage.names("hangs"))
