"""Energy that a rank's device uses: its GPU by NVML, else the processors and the memory of its machine by RAPL.

RAPL (Linux's /sys/class/powercap) counts the whole machine, whatever else runs there, and most systems let only root
read it. Without either there is no figure: never an error.
"""

import contextlib
import socket
from pathlib import Path

import torch

from trainers.devices.nvml import GpuReadings

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Counts from its creation on; to be read more often than RAPL's counters overflow, which takes minutes."""

    def __init__(self, device: torch.device, gpu: GpuReadings) -> None:
        self._gpu, self._on_gpu = gpu, device.type == "cuda"
        self._zones = [] if self._on_gpu else _zones()
        self.source = (gpu.name if self._on_gpu else socket.gethostname()) or str(device)
        """What it counts: two ranks of one source count the same."""
        self._used_j = 0.0
        self._before = self._read()

    def used_j(self) -> float | None:
        """Return joules; None where nothing counts them."""
        now = self._read()
        if now is None or self._before is None:
            return None
        for (count, _), (was, overflows_at) in zip(now, self._before, strict=True):
            self._used_j += count - was + (overflows_at if count < was else 0.0)
        self._before = now
        return self._used_j

    def _read(self) -> list[tuple[float, float]] | None:
        """Return joules by counter, each with where it begins again from 0."""
        if self._on_gpu:
            energy_j = self._gpu.energy_j()
            return None if energy_j is None else [(energy_j, 0.0)]
        with contextlib.suppress(OSError, ValueError):
            names = "energy_uj", "max_energy_range_uj"
            found = [tuple(int((zone / name).read_text()) / 1e6 for name in names) for zone in self._zones]
            return [(count, overflows_at) for count, overflows_at in found] or None
        return None


def counts_energy(device_type: str) -> bool:
    """Return whether this machine has a counter, of its first GPU for cuda; takes no GPU."""
    if device_type != "cuda":
        return EnergyMeter(torch.device("cpu"), GpuReadings(torch.device("cpu"))).used_j() is not None
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return bool(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # as in GpuReadings
        return False


def _zones() -> list[Path]:
    """Return RAPL's zones of processors, and those of their memory, which are not in them."""
    found = []
    for zone in sorted(POWERCAP.glob("*-rapl:*")) if POWERCAP.is_dir() else []:
        with contextlib.suppress(OSError):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                found.append(zone)
    return found
