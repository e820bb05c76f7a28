"""Waiting for what a process in the background does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def when(condition: Callable[[], bool], action: Callable[[], None], within_s: float = 120) -> threading.Thread:
    """Do something in the background once something else is there."""

    def wait() -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
