"""What a worker can read of its GPU and of the other ranks: NVML that is not
there, and who is named.
"""

import sys
import types

import pytest
import torch

from trainers.devices.device import GpuReadings
from trainers.measure.figures import findings, student_t

GPU = torch.device("cuda", 1)


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml(types.ModuleType):
    """Two GPUs by UUID and PCI address; each reading takes the next load of `loads`."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self):
        super().__init__("pynvml")
        self.loads = iter([20, 60])
        self.reasons = iter([0x1 | 0x4, 0x20])
        self.by_uuid = {"GPU-11112222": "second"}
        self.by_address = {"00000000:3B:00.0": "by address"}
        self.asked = []
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.by_uuid:
            raise NVMLError("not found")
        return self.by_uuid[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, address):
        return self.by_address[address]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.asked.append(handle)
        return types.SimpleNamespace(gpu=next(self.loads))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=3 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 312_500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        raise NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return next(self.reasons)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    properties = types.SimpleNamespace(
        uuid="11112222", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties
    )
    return fake


@pytest.fixture
def now(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(
        "trainers.devices.device.time.monotonic", lambda: clock[0]
    )
    return clock


def test_means_of_the_samples_and_every_reason_met(nvml, now):
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
    assert nvml.asked == ["second", "second"], (
        "the device that torch numbers so, not NVML's"
    )
    assert readings.take() is None, "nothing new within a second"
    readings.close()
    assert nvml.open == 0


def test_a_slice_of_a_gpu_is_found_by_its_own_uuid(nvml):
    nvml.by_uuid = {"MIG-11112222": "slice"}
    GpuReadings(GPU).sample()
    assert nvml.asked == ["slice"]


@pytest.mark.parametrize(
    "what", ["no library", "no device", "no package", "cpu"]
)
def test_without_nvml_there_is_nothing(what, nvml, monkeypatch):
    if what == "no library":
        monkeypatch.setattr(
            nvml,
            "nvmlInit",
            lambda: (_ for _ in ()).throw(
                NVMLError("Shared Library Not Found")
            ),
        )
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


def row(rank, **changes):
    even = {
        "rank": rank, "host": f"node-{rank}", "device": "cuda:0", "steps": 100, "train_time_s": 4.0,
        "samples_per_s": 800.0, "step_time_s": 0.04, "data_wait_share": 0.02,
        "idle_share": 0.0, "allocated_bytes": 2**30, "reserved_bytes": 2**31,
        "peak_bytes": 3 * 2**30, "total_bytes": 80 * 2**30, "gpu": None,
    }  # fmt: skip
    return even | changes


def said(*rows):
    return [words for _, words in findings(list(rows))]


def test_even_ranks_are_not_named():
    assert said(row(0), row(1, data_wait_share=0.05), row(2)) == []
    assert said(row(0, data_wait_share=0.9)) == [], (
        "one rank has nobody to be compared with"
    )


def test_a_rank_that_waits_for_data_is_named():
    words = (
        "rank 3 (node-3) waits 41% of its time for data, the others wait 2%"
    )
    assert said(row(0), row(1), row(2), row(3, data_wait_share=0.41)) == [
        words
    ]
    assert (
        said(*(row(rank, data_wait_share=0.41) for rank in range(4))) == []
    ), "all wait alike: slow, but even"


def test_too_short_a_time_names_nobody():
    short = {"train_time_s": 0.4}
    assert said(row(0, **short), row(1, data_wait_share=0.9, **short)) == [], (
        "too little is measured"
    )


def test_an_idle_rank_is_named():
    (words,) = said(
        row(0),
        row(1, idle_share=1.0, train_time_s=0.1),
    )
    assert words.startswith("rank 1 has no sample in 100% of its steps")
    assert said(row(0), row(1, idle_share=0.04)) == [], (
        "the short last step of an epoch"
    )


def test_heat_is_named_and_a_power_cap_is_not():
    assert said(
        row(0, gpu={"slowed_by": ["power cap"]}),
        row(1, gpu={"slowed_by": ["heat", "power cap"]}),
    ) == ["the GPU of rank 1 (node-1) is slowed by heat"]


@pytest.mark.parametrize(("freedom", "level", "expected"), [
    (1, 0.975, 12.7062),
    (2, 0.975, 4.30265),
    (3, 0.975, 3.18245),
    (10, 0.975, 2.22814),
    (29, 0.975, 2.04523),
    (30, 0.975, 2.04227),
    (100, 0.975, 1.98397),
    (1, 0.9995, 636.619),
    (2, 0.9995, 31.5991),
    (30, 0.9995, 3.64596),
])  # fmt: skip
def test_quantiles_are_those_of_the_printed_tables(freedom, level, expected):
    """Two seeds of one configuration have a single degree of freedom."""
    assert student_t(freedom, level) == pytest.approx(expected, rel=4e-3)
