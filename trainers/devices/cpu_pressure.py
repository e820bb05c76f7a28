"""How long work of this machine has waited for a processor, from Linux's pressure stall information (PSI)."""

import time
from pathlib import Path


class Pressure:
    """Measures, from its creation on, in how much of the time work of this machine or container waited for a CPU."""

    def __init__(self) -> None:
        self._began_s, self._before_us = time.monotonic(), _waited_us()

    def share(self) -> float | None:
        """Return a share, 0 to 1; None where Linux has no such information."""
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
