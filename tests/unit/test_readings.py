"""Readings of a GPU through a pynvml that is not there: the right device, means, what is not supported, no NVML."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from trainers.devices.energy import EnergyMeter
from trainers.devices.nvml import GpuReadings

GPU = torch.device("cuda", 1)


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml(types.ModuleType):
    """Two GPUs by UUID and PCI address; each reading takes the next load of `loads`."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.loads = iter([20, 60])
        self.energies = iter([5_000, 9_500])
        self.reasons = iter([0x1 | 0x4, 0x20])
        self.by_uuid = {"GPU-11112222": "second"}
        self.by_address = {"00000000:3B:00.0": "by address"}
        self.asked: list[str] = []
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.by_uuid:
            raise NVMLError("not found")
        return self.by_uuid[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        return self.by_address[address]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self.asked.append(handle)
        return types.SimpleNamespace(gpu=next(self.loads))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 312_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if handle != "second":
            raise NVMLError("not supported")
        return next(self.energies)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        raise NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return next(self.reasons)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    properties = types.SimpleNamespace(uuid="11112222", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return fake


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("trainers.devices.nvml.time.monotonic", lambda: clock[0])
    return clock


def test_means_of_the_samples_and_every_reason_met(nvml: FakeNvml, now: list[float]) -> None:
    readings = GpuReadings(GPU)
    readings.sample()
    now[0] += 0.5
    readings.sample()  # too early: not read
    now[0] += 0.6
    assert readings.take() == {
        "utilisation": pytest.approx(0.4),
        "memory_used_bytes": 3 * 2**30,
        "memory_total_bytes": 80 * 2**30,
        "power_w": 312.5,
        "slowed_by": ["heat", "power cap"],
    }
    assert nvml.asked == ["second", "second"], "the device that torch numbers so, not NVML's"
    assert readings.take() is None, "nothing new within a second"
    readings.close()
    assert nvml.open == 0


def test_energy_is_what_the_gpu_has_used_since_the_meter_began(nvml: FakeNvml) -> None:
    readings = GpuReadings(GPU)
    meter = EnergyMeter(GPU, readings)
    assert (meter.used_j(), meter.source) == (4.5, "11112222")
    readings.close()
    nvml.by_uuid = {"MIG-11112222": "slice"}
    assert EnergyMeter(GPU, GpuReadings(GPU)).used_j() is None, "a slice has no counter"


def test_a_slice_of_a_gpu_is_found_by_its_own_uuid(nvml: FakeNvml) -> None:
    nvml.by_uuid = {"MIG-11112222": "slice"}
    GpuReadings(GPU).sample()
    assert nvml.asked == ["slice"]


@pytest.mark.parametrize("what", ["no library", "no device", "no package", "cpu"])
def test_without_nvml_there_is_nothing(what: str, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "no library":
        monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(NVMLError("Shared Library Not Found")))
    if what == "no device":
        nvml.by_uuid.clear()
        nvml.by_address.clear()
    if what == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    readings = GpuReadings(torch.device("cpu") if what == "cpu" else GPU)
    readings.sample()
    assert readings.take() is None
    readings.close()
    assert nvml.open == 0
