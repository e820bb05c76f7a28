"""Readings of a rank's own GPU by NVML: what the driver says of load, memory, power, heat and slowed clocks; and how
long work of its node has waited for a processor.

Without a GPU, without NVML, or where a figure is not supported (a MIG slice has no utilisation) there is none: never
an error. A reading takes the driver about a millisecond and does not wait for the GPU.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_EVERY_S = 1.0  # NVML's own averages are over about this time
SLOWED = {0x4: "power cap", 0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be" (nvml.h)."""


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


class GpuReadings:
    """Samples one device, at most once a second, and gives the means since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._samples: list[dict[str, float]] = []
        self._slowed: set[str] = set()
        self._last_s = float("-inf")
        if device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = _handle(pynvml, device)
        except Exception as error:  # no package, no library, no permission, another vendor: a run needs none of them
            logger.debug("no readings of %s: %s", device, error)

    def sample(self) -> None:
        """Read the device, unless the last reading is less than a second old."""
        now = time.monotonic()
        if self._handle is None or now - self._last_s < _EVERY_S:
            return
        self._last_s = now
        reading, slowed = _read(self._nvml, self._handle)
        self._samples.append(reading)
        self._slowed |= slowed

    def take(self) -> dict[str, Any] | None:
        """Means since the last call, by name (`utilisation` 0 to 1, `memory_used_bytes`, `memory_total_bytes`,
        `power_w`, `temperature_c`), and in `slowed_by` every reason for lower clocks that was met; None without any.
        """
        self.sample()
        if not self._samples:
            return None
        names = sorted({name for sample in self._samples for name in sample})
        found: dict[str, Any] = {}
        for name in names:
            values = [sample[name] for sample in self._samples if name in sample]
            found[name] = sum(values) / len(values)
        found["slowed_by"] = sorted(self._slowed)
        self._samples.clear()
        self._slowed.clear()
        return found

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml = self._handle = None


def _handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle of a torch device: by UUID, since CUDA_VISIBLE_DEVICES renumbers, else by PCI address."""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    for name in (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}"):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    address = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
    return nvml.nvmlDeviceGetHandleByPciBusId(address)


def _read(nvml: Any, handle: Any) -> tuple[dict[str, float], set[str]]:
    found: dict[str, float] = {}

    def keep(read: Callable[[], dict[str, float]]) -> None:
        with contextlib.suppress(nvml.NVMLError):
            found.update(read())

    def memory() -> dict[str, float]:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_used_bytes": info.used, "memory_total_bytes": info.total}

    keep(lambda: {"utilisation": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100})
    keep(memory)
    keep(lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000})
    keep(lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)})
    for name in ("Event", "Throttle"):  # the older name, for older drivers
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            bits = getattr(nvml, f"nvmlDeviceGetCurrentClocks{name}Reasons")(handle)
            return found, {words for bit, words in SLOWED.items() if bits & bit}
    return found, set()
