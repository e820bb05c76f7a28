"""Read a rank's own GPU by NVML: load, memory, power, heat and slowed clocks.

Without a GPU, without NVML, or where a figure is not supported (a MIG slice has no
utilisation) there is none: never an error. A reading takes the driver about a
millisecond and does not wait for the GPU.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

_EVERY_S = 1.0  # NVML's own averages are over about this time
SLOWED = {
    0x4: "power cap",
    0x8: "hardware",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be"
(nvml.h).
"""


class GpuReadings:
    """Samples one device, at most once a second, and averages the samples."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self.name = ""
        """The GPU's UUID, where there is one."""
        self._samples: list[dict[str, float]] = []
        self._slowed: set[str] = set()
        self._last_s = float("-inf")
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = _handle(pynvml, device)
            self.name = str(torch.cuda.get_device_properties(device).uuid)
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
        """Return the mean of each figure since the last call; None without any.

        Names: `utilisation` 0 to 1, `memory_used_bytes`, `memory_total_bytes`,
        `power_w`, `temperature_c`, and in `slowed_by` every reason for lower clocks
        that was met.
        """
        self.sample()
        if not self._samples:
            return None
        found: dict[str, Any] = {}
        for name in sorted({name for sample in self._samples for name in sample}):
            found[name] = statistics.fmean(
                sample[name] for sample in self._samples if name in sample
            )
        found["slowed_by"] = sorted(self._slowed)
        self._samples.clear()
        self._slowed.clear()
        return found

    def energy_j(self) -> float | None:
        """Return J used since the driver was loaded; None where not counted."""
        if self._handle is None:
            return None
        try:
            return (
                float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
                / 1000
            )
        except (self._nvml.NVMLError, AttributeError):
            return None

    def close(self) -> None:
        """Release NVML."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml = self._handle = None


@contextlib.contextmanager
def opened_nvml() -> Iterator[Any | None]:
    """Yield NVML, open inside the context; None where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # as in GpuReadings
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a torch device by UUID, else by PCI address.

    CUDA_VISIBLE_DEVICES renumbers devices, and neither of these.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    for name in (
        (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")
    ):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    address = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
    return nvml.nvmlDeviceGetHandleByPciBusId(address)


def _read(nvml: Any, handle: Any) -> tuple[dict[str, float], set[str]]:
    figures: dict[str, Callable[[], float]] = {
        "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
            handle, nvml.NVML_TEMPERATURE_GPU
        ),
    }
    found: dict[str, float] = {}
    for name, read in figures.items():
        with contextlib.suppress(nvml.NVMLError):
            found[name] = read()
    return found, slowed_by(nvml, handle)


def slowed_by(nvml: Any, handle: Any) -> set[str]:
    """Return what lowers a GPU's clocks now; nothing where the driver does not say."""
    for name in ("Event", "Throttle"):  # the older name, for older drivers
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            bits = getattr(nvml, f"nvmlDeviceGetCurrentClocks{name}Reasons")(handle)
            return {words for bit, words in SLOWED.items() if bits & bit}
    return set()
