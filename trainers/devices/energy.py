"""Measure the energy of a rank's GPU by its driver's counter (NVML).

Without a counter there is no figure, and never an error.
"""

import contextlib

import torch

from trainers.devices.nvml import GpuReadings, opened_nvml


class EnergyMeter:
    """Counts from its creation on."""

    def __init__(self, device: torch.device, gpu: GpuReadings) -> None:
        self._gpu = gpu
        self.source = gpu.name or str(device)
        """What it counts: two ranks of one source count the same."""
        self._before_j = gpu.energy_j()

    def used_j(self) -> float | None:
        """Return joules; None where nothing counts them."""
        now_j = self._gpu.energy_j()
        return (
            None if now_j is None or self._before_j is None else now_j - self._before_j
        )


def counts_energy(device_type: str) -> bool:
    """Return whether this machine's first GPU counts its energy; takes no GPU."""
    if device_type != "cuda":
        return False
    with opened_nvml() as nvml, contextlib.suppress(Exception):  # as in GpuReadings
        if nvml is not None:
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            return bool(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    return False
