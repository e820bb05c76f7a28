"""Energy: a GPU's by NVML, or none; and what ranks that share a source add up to."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.test_balance import row
from trainers.devices.energy import EnergyMeter, counts_energy
from trainers.devices.nvml import GpuReadings
from trainers.measure.ranks import total_energy_j

CPU = torch.device("cpu")


def test_a_gpu_is_counted_and_a_processor_is_not() -> None:
    readings: Any = GpuReadings(CPU)
    assert EnergyMeter(CPU, readings).used_j() is None
    assert not counts_energy("cpu")
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
