"""Data sheets of GPUs: `peaks.csv` has dense peaks, memory and its bandwidth, with the source of each row.

Rows are found by `torch.cuda.get_device_name`, which a row's pattern must match whole, or by the short name that prices
and commands use. What is not in a row is not known: nothing is guessed.
"""

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PEAKS = Path(__file__).with_name("peaks.csv")


@dataclass(frozen=True)
class DataSheet:
    """What a vendor says of a GPU."""

    pattern: str
    """Of torch's names for it."""
    model: str
    """Its short name; empty where a row is of several."""
    peaks: Mapping[str, float]
    """Dense FLOP/s by format: fp32, tf32, bf16, fp16."""
    memory_bytes: float
    """0: not known."""
    bytes_per_s: float
    """Of its memory; 0: not known."""

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in a precision as the configuration has it, in FLOP/s; None when not known."""
        return self.peaks.get(precision.removesuffix("-pure"))


@functools.cache
def data_sheets() -> tuple[DataSheet, ...]:
    """Return all rows."""
    with PEAKS.open(newline="", encoding="utf-8") as stream:
        return tuple(_sheet(row) for row in csv.DictReader(stream))


def _sheet(row: Mapping[str, str]) -> DataSheet:
    formats = {name.removesuffix("_tflops"): text for name, text in row.items() if name.endswith("_tflops") and text}
    peaks = {name: float(text) * 1e12 for name, text in formats.items()}
    memory, rate = (float(row[name] or 0) for name in ("memory_gb", "gb_per_s"))
    return DataSheet(row["gpu"], row["model"], peaks, memory * 2**30, rate * 1e9)


def data_sheet(gpu: str) -> DataSheet | None:
    """Return that of a GPU by torch's name; None without a row: a slice of a GPU (MIG) has none."""
    if " MIG " in gpu:
        return None
    return next((one for one in data_sheets() if re.fullmatch(one.pattern, gpu)), None)
