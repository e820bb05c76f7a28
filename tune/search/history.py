"""What earlier sweeps say of this one's places: throughput from theirs, and which of them mislead. Pure.

A sweep of the past is a noisy witness: all that it says of samples to the target may be off by one factor, all that it
says of throughput by another (`samples_off` and `speeds_off`, standard deviations of the logarithm), and both curves
may be bent by a part of that. Where what is measured now is further from what a witness predicts than those widths and
the noise explain, the witness is dropped, and the search goes on as if it had never been heard.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tune.search.time_model import BENT, Draws, Needed, Place, predicted

Speeds = Mapping[Place, tuple[float, float]]
"""Samples/s, and the relative half width of its 95 % interval."""

_UNKNOWN = 30.0  # nothing is known of how fast a device is
_REACH = 2.0  # octaves
_SETTING, _SLOPE, _BEND, _OWN_SLOPE, _OWN_BEND = 0.5, 0.5, 0.25, 0.15, 0.08
_MEASURED = 0.1  # of repeats on one machine, by what else it does: 0.12 and 0.16 in benchmarks/results/ground-truth-*
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
    means, covariance = _conditioned(places, {}, [one])
    errors = np.array([_error(width) for _, width in speeds.values()])
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


def log_speeds_told(places: Sequence[Place], measured: Speeds, past: Sequence[Past]) -> tuple[Draws, Draws]:
    """Return mean [n] and standard deviation [n] of log samples/s from measured ones and from those of the past."""
    means, covariance = _conditioned(places, measured, [one for one in past if one.speeds])
    return means, np.sqrt(np.maximum(np.diag(covariance), 1e-8))


def _error(width: float) -> float:
    return math.hypot(_MEASURED, width / 2)


def _conditioned(places: Sequence[Place], measured: Speeds, past: Sequence[Past]) -> tuple[Draws, Draws]:
    """Return mean [n] and covariance [n, n] of log samples/s, of a Gaussian process with an offset a witness."""
    rows = [(place, rate, width, "", 0.0) for place, (rate, width) in measured.items()]
    rows += [(p, rate, width, one.name, one.speeds_off) for one in past for p, (rate, width) in one.speeds.items()]
    n, at = len(places), [*places, *(row[0] for row in rows)]
    octaves = np.log2([place.size for place in at])
    octaves = octaves - octaves.mean()
    alike = np.exp(-(((octaves[:, None] - octaves) / _REACH) ** 2) / 2)
    product = octaves[:, None] * octaves
    same = np.array([[one.setting == other.setting for other in at] for one in at], dtype=float)
    covariance = _UNKNOWN**2 + _SLOPE**2 * product + _BEND**2 * alike
    covariance = covariance + same * (_SETTING**2 + _OWN_SLOPE**2 * product + _OWN_BEND**2 * alike)
    names = [row[3] for row in rows]
    of_one = np.array([[one == other and one != "" for other in names] for one in names], dtype=float)
    offs = np.array([row[4] for row in rows])
    inner = slice(n, None)
    bent = 1 + BENT**2 * (product[inner, inner] + alike[inner, inner]) + (2 * BENT) ** 2 * same[inner, inner]
    noisy = covariance[inner, inner] + of_one * offs[:, None] * offs * bent
    noisy = noisy + np.diag([_error(width) ** 2 for _, _, width, *_ in rows])
    gain = np.linalg.solve(noisy, covariance[inner, :n]).T
    logs = np.log([row[1] for row in rows])
    level = float(logs.mean())
    return level + gain @ (logs - level), covariance[:n, :n] - gain @ covariance[inner, :n]
