"""Figures with a confidence interval: what a trial needed to the target, in samples and in dollars. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REPEATS = 0.2
"""Standard deviation of the logarithm of what repeats of one configuration need, until enough of them tell it: of the
samples to the target 0.11 and 0.20 in benchmarks/results/ground-truth-*.json, of which this is the larger."""
APART = math.exp(1.96 * math.sqrt(2) * REPEATS)
"""The ratio of two runs of one configuration is above it in 2.5 % of all cases."""
FAR_APART = math.exp(3.24 * math.sqrt(2) * REPEATS)
"""Above this in 0.06 %: one ratio or more of eighty is, in 5 % of all cases."""
REPEATS_WEIGHT = 4  # degrees of freedom that `REPEATS` counts for
EQUAL = 0.05
"""A smaller relative difference between two configurations is of no interest."""


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval; `low == high` where it is exact."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"value is {self.value}, but must be between low, {self.low}, and high, {self.high}")


def dollars(time_s: float, usd_per_hour: float) -> float:
    """Return the price of a time on a lane that costs `usd_per_hour`."""
    return time_s / 3600 * usd_per_hour


def throughput(samples_per_s: float | None, step_time_s: float | None, ci95_s: float | None) -> Interval | None:
    """Return a trial's samples/s with the interval of its step time; None without either."""
    if not samples_per_s or not step_time_s:
        return None
    width = min(0.5, (ci95_s or 0.0) / step_time_s)
    return Interval(samples_per_s, samples_per_s * (1 - width), samples_per_s * (1 + width))


def samples_in(row: Mapping[str, float], global_batch_size: int) -> float:
    """Return the samples trained at an evaluation: as it says itself where the batch size changes, else by its step."""
    return row.get("samples", row["step"] * global_batch_size)


def samples_to_target(curve: Sequence[Mapping[str, float]], reached: int, global_batch_size: int) -> Interval:
    """Return the samples that a trial needed, from its evaluations: row `reached` was the first that met the target.

    It was met at any time since the evaluation before that: frequent evaluations make narrow intervals.
    """
    last = samples_in(curve[reached], global_batch_size)
    before = samples_in(curve[reached - 1], global_batch_size) if reached > 0 else 0.0
    return Interval((before + last) / 2, before, last)
