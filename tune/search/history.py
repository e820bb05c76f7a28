"""What earlier sweeps say of this one's places: throughput from theirs, and which of them mislead. Pure.

A sweep of the past is a noisy witness: all that it says of samples to the target may be off by one factor, all that it
says of throughput by another (`samples_off` and `speeds_off`, standard deviations of the logarithm), and both curves
may be bent by a part of that. Where what is measured now is further from what a witness predicts than those widths and
the noise explain, the witness is dropped, and the search goes on as if it had never been heard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tune.search.speed_model import Rates, Speeds, rates_told
from tune.search.time_model import Draws, Needed, Place, predicted

_REPEATS = 0.1  # what runs of one place may differ by in throughput, before it is known
_EXCESS = 5.0  # standard deviations of a sum of squares: 1 or 2 % of true histories are dropped


@dataclass(frozen=True)
class Past:
    """What one earlier sweep has found, in terms of this one's places, and how far this one may be from it."""

    name: str
    needed: tuple[Needed, ...] = ()
    speeds: Speeds = field(default_factory=dict)
    noise_scale: float | None = None
    misfits: tuple[Place, ...] = ()
    """Places that ran out of memory on the same device: not tried again."""
    samples_off: float = 0.0
    speeds_off: float = 0.0

    @property
    def rates(self) -> Rates:
        """Its throughputs."""
        return Rates(self.speeds, self.name, self.speeds_off)

    @property
    def tried(self) -> set[Place]:
        """Places that it has trained towards the target."""
        return {one.place for one in self.needed}


@dataclass(frozen=True)
class Misled:
    """An earlier sweep that is not believed any more."""

    name: str
    of: str
    """"samples to the target" or "throughput"."""
    predicted: float
    measured: float
    place: Place

    def __str__(self) -> str:
        return (
            f"The {self.of} of {self.name} did not count: {self.predicted:.3g} was expected by it at batch size "
            f"{self.place.size}, and {self.measured:.3g} was measured."
        )


def believed(
    past: Sequence[Past], needed: Sequence[Needed], speeds: Speeds, noise_scale: float | None
) -> tuple[list[Past], list[Misled]]:
    """Return of the past what agrees with what was measured here, and why the rest does not."""
    kept, dropped = [], []
    for one in past:
        if (wrong := _misled_by_samples(one, needed, noise_scale)) is not None:
            dropped.append(wrong)
            one = replace(one, needed=(), noise_scale=None)
        if (wrong := _misled_by_speeds(one, speeds)) is not None:
            dropped.append(wrong)
            one = replace(one, speeds={})
        kept.append(one)
    return kept, dropped


def _misled_by_samples(one: Past, needed: Sequence[Needed], noise_scale: float | None) -> Misled | None:
    if not (one.needed and needed):
        return None
    means, covariance = predicted(needed, told(one), noise_scale or one.noise_scale)
    logs = np.log([seen.samples for seen in needed])
    return _misled(one.name, "samples to the target", [seen.place for seen in needed], means, covariance, logs)


def _misled_by_speeds(one: Past, speeds: Speeds) -> Misled | None:
    if not (one.speeds and speeds):
        return None
    places = list(speeds)
    means, covariance = rates_told(places, [one.rates], _REPEATS)
    errors = np.array([math.hypot(_REPEATS, width / 2) for _, width in speeds.values()])
    logs = np.log([rate for rate, _ in speeds.values()])
    return _misled(one.name, "throughput", places, means, covariance + np.diag(errors**2), logs)


def _misled(
    name: str, of: str, places: Sequence[Place], means: Draws, covariance: Draws, logs: NDArray[np.float64]
) -> Misled | None:
    """Return the verdict on a prediction of `logs`: whether the Mahalanobis distance is what chance explains."""
    off = logs - means
    if off @ np.linalg.solve(covariance, off) <= len(off) + _EXCESS * math.sqrt(2 * len(off)):
        return None
    worst = int(np.argmax(np.abs(off) / np.sqrt(np.diag(covariance))))
    return Misled(name, of, math.exp(means[worst]), math.exp(logs[worst]), places[worst])


def told(one: Past) -> list[Needed]:
    """Return what a sweep of the past says of samples, marked as its words."""
    return [Needed(seen.place, seen.samples, seen.error, one.name, one.samples_off) for seen in one.needed]
