"""Throughput of every batch size and setting, from what was measured and what earlier sweeps tell. Pure.

The logarithm of the samples a second is a Gaussian process: a line in the logarithm of the batch size, bent a little,
of all settings, and a smaller one of each. How much runs of one place differ by depends on what else the machine does
(0.12 and 0.16 in benchmarks/results/ground-truth-*.json, a hundredth on an idle GPU): by as much as makes the figures
likeliest (type II maximum likelihood: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, 5.4.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tune.search.time_model import BENT, Draws, Place

Speeds = Mapping[Place, tuple[float, float]]
"""Samples/s, and the relative half width of its 95 % interval."""

_UNKNOWN = 30.0  # nothing is known of how fast a device is
_REACH = 2.0  # octaves
_SETTING, _SLOPE, _BEND, _OWN_SLOPE, _OWN_BEND = 0.5, 0.5, 0.25, 0.15, 0.08
_REPEATS = (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Rates:
    """Throughputs that one sweep has measured."""

    speeds: Speeds
    origin: str = ""
    """The earlier sweep that says so; empty: this one."""
    off: float = 0.0
    """Standard deviation of the logarithm by which all of them may be off together."""


def log_speeds(places: Sequence[Place], told: Sequence[Rates]) -> tuple[Draws, Draws]:
    """Return mean [n] and standard deviation [n] of log samples/s at n places; without any measurement 0 and 0.5."""
    if not any(one.speeds for one in told):
        return np.zeros(len(places)), np.full(len(places), 0.5)
    repeats = max(_REPEATS, key=lambda spread: _log_likelihood(told, spread))
    means, covariance = rates_told(places, told, repeats)
    return means, np.sqrt(np.maximum(np.diag(covariance), 1e-8))


def rates_told(places: Sequence[Place], told: Sequence[Rates], repeats: float) -> tuple[Draws, Draws]:
    """Return mean [n] and covariance [n, n] of log samples/s where runs of one place differ by `repeats`."""
    n = len(places)
    logs, covariance, noise = _joint(places, told, repeats)
    inner = covariance[n:, n:] + noise
    gain = np.linalg.solve(inner, covariance[n:, :n]).T
    level = float(logs.mean())
    return level + gain @ (logs - level), covariance[:n, :n] - gain @ covariance[n:, :n]


def _log_likelihood(told: Sequence[Rates], repeats: float) -> float:
    logs, covariance, noise = _joint([], told, repeats)
    inner, off = covariance + noise, logs - logs.mean()
    return -0.5 * float(off @ np.linalg.solve(inner, off) + np.linalg.slogdet(inner)[1])


def _joint(places: Sequence[Place], told: Sequence[Rates], repeats: float) -> tuple[NDArray[np.float64], Draws, Draws]:
    """Return the m measured logarithms, the covariance of what is so at the places and where was measured
    [n + m, n + m], and that of what the measured ones differ from it by [m, m].
    """
    rows = [(place, rate, width, one) for one in told for place, (rate, width) in one.speeds.items()]
    n, at = len(places), [*places, *(row[0] for row in rows)]
    octaves = np.log2([place.size for place in at])
    octaves = octaves - octaves.mean()
    alike = np.exp(-(((octaves[:, None] - octaves) / _REACH) ** 2) / 2)
    product = octaves[:, None] * octaves
    same = np.array([[one.setting == other.setting for other in at] for one in at], dtype=float)
    covariance = _UNKNOWN**2 + _SLOPE**2 * product + _BEND**2 * alike
    covariance = covariance + same * (_SETTING**2 + _OWN_SLOPE**2 * product + _OWN_BEND**2 * alike)
    sources = [row[3] for row in rows]
    of_one = np.array([[one is other for other in sources] for one in sources], dtype=float)
    offs = np.array([one.off for one in sources])
    inner = slice(n, None)
    bent = 1 + BENT**2 * (product[inner, inner] + alike[inner, inner]) + (2 * BENT) ** 2 * same[inner, inner]
    noise = of_one * offs[:, None] * offs * bent
    noise = noise + np.diag([repeats**2 + (width / 2) ** 2 for _, _, width, _ in rows])
    return np.log([row[1] for row in rows]), covariance, noise
