"""What the operating system says of a rank's own process: how much it ran, was preempted, and was swapped.

Reads /proc/self/status (Linux, proc(5)); where there is none, what it says is left out.
"""

import re
import resource
import time
from pathlib import Path

from trainers.devices.cpu_pressure import Pressure


class HostReadings:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._began_s, self._before, self._pressure = time.monotonic(), _usage(), Pressure()

    def read(self) -> dict[str, float]:
        """Return `cpu_s` a second of all threads, `preempted` and `major_faults` a second (involuntary switches, pages
        read from disk), `swapped_bytes` now, and `cpu_pressure`, the share of the time in which some work of this
        machine waited for a core.
        """
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        found = {name: (now - self._before[name]) / elapsed_s for name, now in _usage().items()}
        status = Path("/proc/self/status")
        if status.exists() and (told := re.search(r"^VmSwap:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
            found["swapped_bytes"] = 1024.0 * int(told[1])
        if (share := self._pressure.share()) is not None:
            found["cpu_pressure"] = share
        return found


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "preempted": used.ru_nivcsw, "major_faults": used.ru_majflt}
