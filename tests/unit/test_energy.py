"""Energy: RAPL's counters with their overflow, a GPU's by NVML, none; and what ranks that share a source add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainers.devices.energy
from tests.unit.test_balance import row
from trainers.devices.energy import EnergyMeter, counts_energy
from trainers.devices.nvml import GpuReadings
from trainers.measure.ranks import total_energy_j

CPU = torch.device("cpu")


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trainers.devices.energy, "POWERCAP", tmp_path)
    return tmp_path


def zone(powercap: Path, name: str, kind: str, count_uj: int, overflows_at_uj: int = 1_000_000_000) -> Path:
    (powercap / name).mkdir()
    (powercap / name / "name").write_text(f"{kind}\n")
    (powercap / name / "max_energy_range_uj").write_text(f"{overflows_at_uj}\n")
    (powercap / name / "energy_uj").write_text(f"{count_uj}\n")
    return powercap / name / "energy_uj"


def test_processors_and_their_memory_are_added_over_an_overflow(powercap: Path) -> None:
    package = zone(powercap, "intel-rapl:0", "package-0", 900_000_000)
    memory = zone(powercap, "intel-rapl:0:1", "dram", 5_000_000)
    zone(powercap, "intel-rapl:0:0", "core", 7)  # within the package
    zone(powercap, "intel-rapl:1", "psys", 7)  # the package is within it
    meter = EnergyMeter(CPU, GpuReadings(CPU))
    package.write_text("950000000")
    assert meter.used_j() == pytest.approx(50)
    package.write_text("20000000")
    memory.write_text("6000000")
    assert meter.used_j() == pytest.approx(50 + 70 + 1)
    assert counts_energy("cpu")


def test_without_a_counter_there_is_no_figure(powercap: Path) -> None:
    assert EnergyMeter(CPU, GpuReadings(CPU)).used_j() is None
    zone(powercap, "intel-rapl:0", "package-0", 1).write_text("")  # as one that may not be read
    assert EnergyMeter(CPU, GpuReadings(CPU)).used_j() is None
    assert not counts_energy("cpu")


def test_a_gpu_is_counted_by_nvml_alone(powercap: Path) -> None:
    zone(powercap, "intel-rapl:0", "package-0", 1)
    readings: Any = GpuReadings(CPU)
    assert readings.energy_j() is None
    counts = iter([10.0, 25.0])
    readings.energy_j = lambda: next(counts)
    assert EnergyMeter(torch.device("cuda", 0), readings).used_j() == 15.0


def test_ranks_of_one_source_count_once() -> None:
    rows = [
        row(0, energy_j=5.0, energy_of="a"),
        row(1, energy_j=5.5, energy_of="a"),
        row(2, energy_j=2.0, energy_of="b"),
    ]
    assert total_energy_j(rows) == 7.5
    assert total_energy_j([*rows, row(3, energy_j=None, energy_of="c")]) is None
    assert total_energy_j([row(0)]) is None
