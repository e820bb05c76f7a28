"""The model behind what-if: the time of a step on other machines and links, from a few measured ones. Pure.

A step of `passes` microbatches, `share` samples in all on the worker that has most, is taken to last

    compute = fixed * (1 + repeated * (passes - 1)) + each * share
    step    = compute * (1 + spread * sqrt(2 log n)) + joined + reduce
              - overlap * min(reduce, 2/3 compute of a microbatch)
    reduce  = 2 (n - 1) / n * gradient bytes / bandwidth + 2 (n - 1) * latency                  (a ring of n workers)

`spread`: all wait for the slowest of n; `joined`: what several workers cost besides. `overlap` with the backward pass,
two thirds of the compute, lies between none and full. `fixed` and `each` of a device with a data sheet are those of its
roofline by operator (Williams et al. 2009): `each` the roofline's over an efficiency, `fixed` the host's part and the
launches of its kernels, with what does not grow with the batch. Efficiency and launch time are learned where such a
device was measured, and carried to others with a doubt; of a measured device `fixed` and `each` are what it shows. All
that is unknown has a prior, a judgement that is written down here. Draws of the prior become draws of the posterior as
the measurements are made to count by and by (Del Moral, Doucet and Jasra 2006), and are moved by the stretch move of
Goodman and Weare (2010); every figure is a quantile of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Values = Mapping[str, Array]
"""Of each unknown its logarithm [D]; of a share of something its logit."""

# Medians, and standard deviations of the logarithm.
_PRIORS = {
    "efficiency": (0.4, 0.5),  # of the roofline's rate, over all operators of a step
    "host": (3e-4, 0.8),  # s, of a step, whatever it computes: batch, loop, optimizer
    "launch": (8e-6, 0.6),  # s, of a kernel, with what torch does to launch it
    "joined": (3e-4, 1.0),  # s, of a step of several workers: hooks, buckets, what waits for another thread
    "spread": (0.02, 0.8),
    "noise": (0.03, 0.5),  # of runs of one configuration, which differ by what else a machine does
}
_SHARES = ("overlap", "repeated")
_OF_WORKERS = ("overlap", "joined", "spread", "bandwidth", "latency")
_CARRIED = 0.2  # of efficiency and launches, from one device to another
_UNKNOWN = 1.5
_AWAY = 0.04  # an octave of samples or workers beyond measured ones
_BACKWARD = 2 / 3
_WALKERS, _MOVES, _LAST_MOVES, _KEPT = 1000, 8, 120, 3
_COUNTING = 0.5  # of the walkers, that still do after a step towards the posterior


@dataclass(frozen=True)
class Roofline:
    """What a step takes at least on a device, by its data sheet."""

    each_s: float
    """A sample."""
    fixed_s: float
    """What does not grow with the samples, such as the optimizer's update."""
    kernels: float
    """Operators of a microbatch and the update."""


@dataclass(frozen=True)
class Link:
    """Between two workers, in one direction."""

    bytes_per_s: float
    latency_s: float
    doubt: float
    """Standard deviation of the logarithm of both."""


@dataclass(frozen=True)
class Where:
    """A group of workers, and their part of a step."""

    device: str
    workers: int
    share: int
    """Samples of a step on the worker that has most."""
    passes: int = 1
    """Microbatches of a step."""
    link: str = ""
    """Names a Link; of no matter for one worker."""


@dataclass(frozen=True)
class Measured:
    """A run's mean step time."""

    where: Where
    step_time_s: float
    error: float = 0.0
    """Its relative standard deviation."""


@dataclass(frozen=True)
class StepTimes:
    """What is known of the step times of one setting (precision, ...)."""

    measured: Sequence[Measured]
    gradient_bytes: float
    links: Mapping[str, Link]
    rooflines: Mapping[str, Roofline]
    draws: Values
    """Of the posterior."""

    def can(self, device: str) -> bool:
        """Return whether enough is known of a device: it was measured, or has a roofline."""
        return f"each {device}" in self.draws or device in self.rooflines

    def predict(self, where: Where, seed: int = 0) -> Array:
        """Return draws [D], s, of the step time that a run there would show."""
        rng, values = np.random.default_rng(seed), dict(self.draws)
        size = len(values["noise"])
        if f"each {where.device}" not in values:
            for name, centre in _by_roofline(where.device, self.rooflines[where.device], values).items():
                values[name] = centre + _CARRIED * rng.standard_normal(size)
        if where.workers > 1 and f"bandwidth {where.link}" not in values:
            for name, (median, doubt) in _of_link(where.link, self.links).items():
                values[name] = math.log(median) + doubt * rng.standard_normal(size)
        doubts = np.hypot(np.exp(values["noise"]), _AWAY * self._octaves_beyond(where))
        logs = _log_times([where], self.gradient_bytes, values)[:, 0]
        return np.asarray(np.exp(logs + doubts * rng.standard_normal(size)))

    def _octaves_beyond(self, where: Where) -> float:
        own, beyond = [one.where for one in self.measured if one.where.device == where.device], 0.0
        for name in ("share", "workers") if own else ():
            known, octave = [math.log2(getattr(one, name)) for one in own], math.log2(getattr(where, name))
            beyond += max(0.0, min(known) - octave, octave - max(known))
        return beyond


def learn(
    measured: Sequence[Measured],
    gradient_bytes: float,
    links: Mapping[str, Link],
    rooflines: Mapping[str, Roofline] | None = None,
    told: Values | None = None,
    seed: int = 0,
) -> StepTimes:
    """Learn the step times of a setting from at least one measured point.

    `gradient_bytes` is what the workers sum up in a step; `told` are the draws of another setting, of which this one
    takes what that has shown of workers and links.
    """
    rooflines = rooflines or {}
    told = {name: draws for name, draws in (told or {}).items() if name.split()[0] in _OF_WORKERS}
    used = {one.where.link for one in measured if one.where.workers > 1}
    priors = dict(_PRIORS)
    for link in sorted(used):
        priors |= _of_link(link, links)
    for device in sorted({one.where.device for one in measured}):
        times = [one.step_time_s for one in measured if one.where.device == device]
        shares = [one.where.share for one in measured if one.where.device == device]
        priors[f"each {device}"] = (float(np.median(times) / np.median(shares)) / 2, _UNKNOWN)
        priors[f"fixed {device}"] = (min(times) / 4, _UNKNOWN)
    rng = np.random.default_rng(seed)
    names = [*dict.fromkeys([*priors, *_SHARES, *told])]
    of_told = np.array([told[name] for name in told]) if told else np.zeros((0, 2))
    mean, precision = of_told.mean(axis=1), np.linalg.pinv(np.atleast_2d(np.cov(of_told))) if told else np.zeros((0, 0))

    centres = {name: math.log(median) for name, (median, _) in priors.items()}

    def of_prior(count: int) -> Array:
        """Return draws [W, P] of the prior, those of what is told as they belong together."""
        rows, points = rng.integers(of_told.shape[1], size=count), dict[str, Array]()
        for index, name in enumerate(told):
            points[name] = of_told[index, rows]
        for name in names:
            if name in _SHARES and name not in told:
                points[name] = rng.logistic(size=count)
            elif name not in told:
                points[name] = centres[name] + priors[name][1] * rng.standard_normal(count)
        for device, roofline in rooflines.items():
            if f"each {device}" in points:
                for name, centre in _by_roofline(device, roofline, points).items():
                    points[name] = centre + _CARRIED * rng.standard_normal(count)
        return np.stack([points[name] for name in names], axis=1)

    at, logs = [one.where for one in measured], np.log([one.step_time_s for one in measured])
    errors = np.array([one.error for one in measured])

    def prior(points: Array) -> Array:
        """Return the logarithm [W] of the prior's density, but for a constant, at points [W, P]."""
        values = dict(zip(names, points.T, strict=True))
        found = np.zeros(len(points))
        for name, value in values.items():
            if name not in told and name in _SHARES:  # uniform
                found += -value - 2 * np.logaddexp(0, -value)
            elif name not in told and name.partition(" ")[2] not in rooflines:
                found -= ((value - centres[name]) / priors[name][1]) ** 2 / 2
        for device, roofline in rooflines.items():
            if f"each {device}" in values:
                for name, centre in _by_roofline(device, roofline, values).items():
                    found -= ((values[name] - centre) / _CARRIED) ** 2 / 2
        if told:
            off = np.array([values[name] for name in told]).T - mean
            found -= np.einsum("wp,pq,wq->w", off, precision, off) / 2
        return found

    def likelihood(points: Array) -> Array:
        """Return the logarithm [W] of the likelihood of what was measured, but for a constant, at points [W, P]."""
        values = dict(zip(names, points.T, strict=True))
        variance = errors**2 + np.exp(2 * values["noise"])[:, None]
        off = logs - _log_times(at, gradient_bytes, values)
        return np.asarray(-(off**2 / variance + np.log(variance)).sum(axis=1) / 2)

    drawn = _annealed(prior, likelihood, of_prior(_WALKERS), rng)
    return StepTimes(measured, gradient_bytes, links, rooflines, dict(zip(names, drawn.T, strict=True)))


def _of_link(name: str, links: Mapping[str, Link]) -> dict[str, tuple[float, float]]:
    link = links[name]
    return {f"bandwidth {name}": (link.bytes_per_s, link.doubt), f"latency {name}": (link.latency_s, link.doubt)}


def _by_roofline(device: str, roofline: Roofline, values: Values) -> dict[str, Array]:
    """Return the logarithms at which `fixed` and `each` of a device lie by its data sheet."""
    efficiency = np.exp(values["efficiency"])
    fixed = np.exp(values["host"]) + roofline.kernels * np.exp(values["launch"]) + roofline.fixed_s / efficiency
    return {f"fixed {device}": np.log(fixed), f"each {device}": np.log(roofline.each_s / efficiency)}


def _log_times(at: Sequence[Where], gradient_bytes: float, values: Values) -> Array:
    """Return the logarithm [W, M] of step times at M places, for values [W] of all that is unknown."""
    n, share, passes = (np.array([getattr(one, name) for one in at]) for name in ("workers", "share", "passes"))

    def of_each(*names: str) -> Array:
        zero = np.zeros_like(values["noise"])  # of a link where there is one worker
        return np.exp(np.stack([values.get(name, zero) for name in names], axis=1))

    fixed = of_each(*(f"fixed {one.device}" for one in at))
    samples = of_each(*(f"each {one.device}" for one in at)) * share
    bandwidth, latency = (of_each(*(f"{name} {one.link}" for one in at)) for name in ("bandwidth", "latency"))
    reduce = 2 * (n - 1) * (gradient_bytes / n / bandwidth + latency)
    joined = np.exp(values["joined"])[:, None] * (n > 1)
    hidden = np.minimum(reduce, _BACKWARD * (fixed + samples / passes))
    compute = fixed * (1 + _share(values["repeated"])[:, None] * (passes - 1)) + samples
    compute = compute * (1 + np.exp(values["spread"])[:, None] * np.sqrt(2 * np.log(n)))
    return np.asarray(np.log(compute + joined + reduce - _share(values["overlap"])[:, None] * hidden))


def _share(logit: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logit)))


def _annealed(
    prior: Callable[[Array], Array], likelihood: Callable[[Array], Array], walkers: Array, rng: np.random.Generator
) -> Array:
    """Return draws [D, P] of the product of prior and likelihood, by walkers [W, P] that are draws of the prior.

    A mode far from the prior's middle is found: when the measurements count little, walkers are still everywhere.
    """
    counts = 0.0
    while counts < 1:
        likely = likelihood(walkers)
        more = _step(likely, 1 - counts)
        weights = np.exp(more * (likely - likely.max()))
        places = np.cumsum(weights / weights.sum())
        chosen = np.searchsorted(places, (np.arange(len(walkers)) + rng.random()) / len(walkers))
        walkers, counts = rng.permutation(walkers[np.minimum(chosen, len(walkers) - 1)]), min(1.0, counts + more)
        walkers = _stretched(prior, likelihood, counts, walkers, _MOVES, rng)
    kept = []
    for _ in range(_KEPT):
        walkers = _stretched(prior, likelihood, 1.0, walkers, _LAST_MOVES // _KEPT, rng)
        kept.append(walkers)
    return np.concatenate(kept)


def _step(likely: Array, most: float) -> float:
    """Return how much more the measurements may count at once, by their likelihoods at the walkers."""

    def counting(step: float) -> float:
        weights = np.exp(step * (likely - likely.max()))
        return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))

    low, high = 0.0, most
    if counting(most) >= _COUNTING:
        return most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if counting(middle) >= _COUNTING else (low, middle)
    return max(low, 1e-9)


def _stretched(
    prior: Callable[[Array], Array],
    likelihood: Callable[[Array], Array],
    counts: float,
    walkers: Array,
    steps: int,
    rng: np.random.Generator,
) -> Array:
    """Return walkers [W, P] after steps of Goodman and Weare's stretch move, in which the likelihood `counts`."""

    def density(points: Array) -> Array:
        return prior(points) + counts * likelihood(points)

    walkers = walkers.copy()
    half, dimensions = len(walkers) // 2, walkers.shape[1]
    at = density(walkers)
    for _ in range(steps):
        for own, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
            stretch = (1 + rng.random(half)) ** 2 / 2  # density proportional to 1 / sqrt(z) in [1/2, 2]
            partners = walkers[other][rng.integers(half, size=half)]
            moved = partners + stretch[:, None] * (walkers[own] - partners)
            there = density(moved)
            taken = np.log(rng.random(half)) < (dimensions - 1) * np.log(stretch) + there - at[own]
            walkers[own] = np.where(taken[:, None], moved, walkers[own])
            at[own] = np.where(taken, there, at[own])
    return walkers
