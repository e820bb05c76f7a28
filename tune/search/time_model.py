"""The model behind search frontier: time to target of every batch size and setting, from the few tried. Pure.

The logarithm of the samples to the target is taken as

    log E(s, B) = level + kind(s) + setting(s) + log(1 + B / N) + bend(log B) + own_bend(s, log B)

The fourth term is McCandlish et al. 2018 (arXiv 1812.06162, equation 2.11) with the noise scale N, which is known
up to a factor: a measured one (trainers/step/noise_scale.py) is of the part of training that it was measured in. The
bends are Gaussian processes that let the curve be something else. So the theory fills in what is not observed, and what
is observed counts more. Settings that differ only in how fast the same training runs (precision, compile, ...) are held
to need about as many samples; any others may need anything. Throughput is interpolated between measured batch sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]

_DRAWS = 4000
_LEVEL = 30.0  # nothing is known of how many samples a target needs
_KIND = 0.7  # what another optimizer, width, ... may make of it, as a factor e^0.7
_SETTING = 0.10  # what another precision may: bf16 and fp32 curves in benchmarks/results differ by less
_BEND, _OWN_BEND, _REACH = 0.20, 0.05, 2.0  # standard deviations, and octaves over which a bend is one
_REPEAT_MOST = 0.2  # the larger of the two below
_REPEAT = 0.15  # runs that differ in their seed only: 0.11 and 0.20 in benchmarks/results/ground-truth-*.json
_NOISE_FACTOR = 1.2  # standard deviation of the logarithm of what a measured noise scale is off by
_NOISES = 41
BENT = 0.15  # of how far another sweep's figures may be off together, how much of it may depend on the batch size
_SPEED, _SPEED_BETWEEN, _SPEED_BEYOND = 0.02, 0.04, 0.12  # as measured; an octave from measured ones; outside of them


@dataclass(frozen=True)
class Place:
    """A batch size of a setting."""

    setting: str
    kind: str
    """Settings of one kind differ only in how fast the same training runs."""
    size: int
    """Global batch size."""


@dataclass(frozen=True)
class Needed:
    """Samples to the target of a run at a place."""

    place: Place
    samples: float
    error: float
    """Standard deviation of its logarithm beyond what repeats differ by: evaluations are some samples apart."""
    origin: str = ""
    """The earlier sweep that says so; empty: this one."""
    off: float = 0.0
    """Standard deviation of the logarithm by which all that it says may be off together."""


def log_samples(
    places: Sequence[Place], needed: Sequence[Needed], noise_scale: float | None
) -> tuple[Draws, NDArray[np.float64]]:
    """Return draws [n, D] of log E at n places, and its mean [n]; without observations only differences count."""
    means, weights, spread = _conditioned(places, needed, noise_scale)
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(spread + 1e-6 * np.eye(len(places)))
    chosen = rng.choice(_NOISES, _DRAWS, p=weights)
    return means[:, chosen] + root @ rng.standard_normal((len(places), _DRAWS)), means @ weights


def predicted(
    now: Sequence[Needed], told: Sequence[Needed], noise_scale: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean [m] and covariance [m, m] of the logarithms of what m runs `now` need, by what others tell."""
    means, weights, spread = _conditioned([one.place for one in now], told, noise_scale)
    mean = means @ weights
    apart = means - mean[:, None]
    noise = np.diag([one.error**2 + _REPEAT_MOST**2 for one in now])
    return mean, spread + (apart * weights) @ apart.T + noise


def _conditioned(places: Sequence[Place], needed: Sequence[Needed], noise_scale: float | None) -> tuple[Draws, ...]:
    """Return means [n, N] of log E by noise scale, the weights [N] of those, and the covariance [n, n]."""
    observed = [*places, *(one.place for one in needed)]
    n = len(places)
    covariance = _covariance(observed)
    sizes = np.array([place.size for place in observed], dtype=float)
    noises = np.geomspace(sizes.min() / 8, sizes.max() * 16, _NOISES)
    prior = np.full(_NOISES, 0.3 / _NOISES)
    if noise_scale is not None:
        off = (np.log(noises) - math.log(noise_scale)) / _NOISE_FACTOR
        shape = np.exp(-(off**2) / 2)
        if shape.sum() > 0:
            prior += 0.7 * shape / shape.sum()
    prior /= prior.sum()
    means = np.log1p(sizes[:, None] / noises)  # [n + m, N]
    if not needed:
        return means, prior, covariance - _LEVEL**2  # the level would only blur the differences
    logs = np.log([one.samples for one in needed])
    level = float(np.mean(logs))
    noise = np.array([one.error**2 + _REPEAT**2 for one in needed])
    inner = covariance[n:, n:] + np.diag(noise) + _off(needed)
    gain = np.linalg.solve(inner, covariance[n:, :n]).T  # [n, m]
    off = logs[:, None] - level - means[n:]
    log_likelihood = -0.5 * np.einsum("mk,mk->k", off, np.linalg.solve(inner, off))
    weights = prior * np.exp(log_likelihood - log_likelihood.max())
    return level + means[:n] + gain @ off, weights / weights.sum(), covariance[:n, :n] - gain @ covariance[n:, :n]


def _off(needed: Sequence[Needed]) -> Draws:
    """Return the covariance of what earlier sweeps say beyond that of what is so: each is off by itself."""
    octaves = np.log2([one.place.size for one in needed])
    alike = np.exp(-(((octaves[:, None] - octaves) / _REACH) ** 2) / 2)
    same = np.array([[one.origin == other.origin for other in needed] for one in needed], dtype=float)
    offs = np.array([one.off for one in needed])
    return np.asarray(same * offs[:, None] * offs * (1 + BENT**2 * alike))


def _covariance(places: Sequence[Place]) -> NDArray[np.float64]:
    octaves = np.log2([place.size for place in places])
    alike = np.exp(-(((octaves[:, None] - octaves) / _REACH) ** 2) / 2)
    same_setting = np.array([[one.setting == other.setting for other in places] for one in places], dtype=float)
    same_kind = np.array([[one.kind == other.kind for other in places] for one in places], dtype=float)
    shared = _LEVEL**2 + _KIND**2 * same_kind + _BEND**2 * alike
    return np.asarray(shared + (_SETTING**2 + _OWN_BEND**2 * alike) * same_setting)


def log_speeds(places: Sequence[Place], measured: Mapping[Place, tuple[float, float]]) -> tuple[Draws, Draws]:
    """Return mean [n] and standard deviation [n] of log samples/s; nan at the places of a setting without any.

    `measured` are samples/s and the relative half width of their 95 % interval. Between two of them it is a straight
    line in the logarithms; outside it goes on with half the slope (on the side of the larger batches, where devices
    saturate) or the whole one.
    """
    means, widths = np.full(len(places), math.nan), np.full(len(places), math.nan)
    for setting in dict.fromkeys(place.setting for place in places):
        known = sorted((place.size, *figures) for place, figures in measured.items() if place.setting == setting)
        if not known:
            continue
        at, logs = np.log2([size for size, *_ in known]), np.log([speed for _, speed, _ in known])
        errors = np.array([max(_SPEED, width / 2) for *_, width in known])
        for index, place in enumerate(places):
            if place.setting != setting:
                continue
            octave = math.log2(place.size)
            nearest = int(np.argmin(np.abs(at - octave)))
            away, slope = abs(at[nearest] - octave), 0.0
            inside = at[0] <= octave <= at[-1]
            if not inside and len(at) > 1:
                first = 0 if octave < at[0] else len(at) - 2
                slope = (logs[first + 1] - logs[first]) / (at[first + 1] - at[first]) * (1.0 if first == 0 else 0.5)
            means[index] = np.interp(octave, at, logs) + slope * (octave - float(np.clip(octave, at[0], at[-1])))
            widths[index] = math.hypot(errors[nearest], away * (_SPEED_BETWEEN if inside else _SPEED_BEYOND))
    return means, widths
