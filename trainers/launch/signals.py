"""How a process hears that it should stop, and how it ends with its parent.

Environment read: TORCHELASTIC_RUN_ID, which torchrun sets.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_LOOK_S = 0.5


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask to stop; not SIGHUP where it is ignored (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


class StopSignals:
    """In its block SIGTERM, SIGHUP and the first Ctrl-C only ask to stop.

    A second Ctrl-C interrupts at once.

    No other signal does when it comes twice, as SIGTERM may: from torchrun, and from
    what has started that.
    """

    asked = False

    def __init__(self, tell: Callable[[str], None] = lambda name: None) -> None:
        """Call `tell` in a thread, with the first signal's name."""
        self._tell = tell
        self._telling: threading.Thread | None = None

    def __enter__(self) -> StopSignals:
        self._before = {
            number: signal.signal(number, self._heed) for number in stop_signals()
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
                target=self._tell, args=(signal.Signals(number).name,), daemon=True
            )
            self._telling.start()


def end_at_once() -> None:
    """Let SIGTERM and Ctrl-C interrupt this process; does nothing in a thread."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)


def follow(
    wait: Callable[[], object], last: Callable[[], object] = lambda: None
) -> None:
    """End this process when `wait` returns, after `last`.

    In a thread, since a collective lets no handler run.
    """

    def end() -> None:
        wait()
        last()
        os._exit(1)

    threading.Thread(target=end, name="parent", daemon=True).start()


def follow_agent() -> None:
    """End a worker of torchrun's within a second of torchrun's agent."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()

    def wait() -> None:
        while os.getppid() == agent:
            time.sleep(_LOOK_S)

    follow(wait)
