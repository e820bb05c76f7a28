"""How long work of this machine has waited for a processor, from Linux's pressure stall information (PSI)."""

from __future__ import annotations

import time
from pathlib import Path


class Pressure:
    """Since it was made: the share of the time in which some work of this machine (or container) waited for a CPU.

    Read from Linux's pressure stall information; None where there is none.
    """

    def __init__(self) -> None:
        self._began_s, self._before_us = time.monotonic(), _waited_us()

    def share(self) -> float | None:
        """0 to 1."""
        elapsed_s, now_us = time.monotonic() - self._began_s, _waited_us()
        if self._before_us is None or now_us is None or elapsed_s <= 0:
            return None
        return min(1.0, (now_us - self._before_us) / 1e6 / elapsed_s)


def _waited_us() -> int | None:
    try:
        some, *_ = Path("/proc/pressure/cpu").read_text().splitlines()
        return int(some.rpartition("total=")[2])
    except (OSError, ValueError):
        return None
