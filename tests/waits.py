"""Waiting for what a process in the background does."""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

HANG_S = 800.0
"""How long a test waits for what has to come: a guard against a hang, below
pytest's own, and no judgement of speed.
"""


def until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "",
    *,
    process: subprocess.Popen[Any] | None = None,
    every_s: float = 0.2,
    within_s: float = HANG_S,
) -> float:
    """Wait until something is so; the seconds that it took.

    `within_s` is for what would come by itself later.

    Raises: AssertionError: `what` does not come, or the process whose doing it
        is has ended before.
    """
    began = time.monotonic()
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        if time.monotonic() - began > within_s:
            raise AssertionError(
                f"after {within_s:g} s still not: {what() if callable(what) else what}"
            )
        time.sleep(every_s)
    return time.monotonic() - began


def when(
    condition: Callable[[], object], action: Callable[[], None]
) -> threading.Thread:
    """Do something in the background once something else is there."""

    def wait():
        until(condition)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
