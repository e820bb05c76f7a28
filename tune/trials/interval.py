"""Figures with a confidence interval, and what repeats of one configuration differ by.

Pure.
"""

import math
from dataclasses import dataclass

REPEATS = 0.2
"""Standard deviation of the logarithm of what repeats of one configuration need, until
enough of them tell it: of the samples to the target 0.11 and 0.20 in
benchmarks/results/ground-truth-*.json, of which this is the larger.
"""
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


def dollars(time_s: float, usd_per_hour: float) -> float:
    """Return the price of a time on a lane that costs `usd_per_hour`."""
    return time_s / 3600 * usd_per_hour
