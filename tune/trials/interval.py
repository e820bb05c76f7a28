"""Goodput: how long and how many dollars a batch size needs to the target, predicted where it was not trained. Pure.

Batches of B samples need E(B) = E_min (1 + B / noise) samples to a target (McCandlish et al. 2018, arXiv 1812.06162,
equation 2.11), with the gradient noise scale of noise_scale.py. So a sample of a batch of B is worth, against one
of a batch of B0 that was trained to the target,

    efficiency(B) = (noise + B0) / (noise + B)

and goodput = throughput x efficiency (Qiao et al. 2021, Pollux, OSDI '21, equations 4 and 7, with M0 = B0). A
prediction is samples_to_target(B0) / goodput(B).

It supposes a learning rate that suits each batch size: `lr_scaling.rule` linear for SGD, sqrt for Adam. With rule
none nothing is predicted. And it knows nothing of precision: how fast a number format runs and whether it learns as
well are measured, never derived, so each setting (precision, strategy, compile, ...) has throughputs, a noise scale
and a trained reference of its own, and without one of them no prediction.

Uncertainty is carried by draws: every input is drawn from its own distribution, and candidates of one setting share
each draw of reference and noise scale, so that an error that moves all of them alike does not blur their order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]

_DRAWS = 4000
_Z95 = 1.959964
REPEATS = 0.05
"""What repeats of one configuration differ by, until enough of them say it themselves."""
REPEATS_WEIGHT = 4
"""As if so many had been seen."""


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval; `low == high` where it is exact."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"value is {self.value}, but must be between low, {self.low}, and high, {self.high}")

    def scaled(self, factor: float) -> Interval:
        """The same figure in another unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Candidate:
    """A batch size of a setting, with the throughput that was measured for it."""

    name: str
    setting: str
    """What is not predicted across: precision, strategy, compile, ..."""
    global_batch_size: int
    samples_per_s: Interval


@dataclass(frozen=True)
class Reference:
    """A trial of a setting that was trained until it reached the target."""

    setting: str
    global_batch_size: int
    samples_to_target: Interval
    """Training samples until then; see `samples_to_target`."""


@dataclass(frozen=True)
class Prediction:
    """What a candidate would need to the target."""

    candidate: Candidate
    efficiency: Interval
    """Worth of a sample, against the batch size of the setting's references (their geometric mean)."""
    goodput: Interval
    """Samples/s x efficiency."""
    time_s: Interval
    usd: Interval | None
    """None without a price."""
    place: int
    """1 for the fastest and all that cannot be told apart from it, and so on."""


def efficiency(batch_size: float, reference: float, noise_scale: float) -> float:
    """Worth of a sample of a batch of `batch_size`, against one of a batch of `reference`; 1 for an infinite noise."""
    if math.isinf(noise_scale):
        return 1.0
    return (noise_scale + reference) / (noise_scale + batch_size)


def dollars(time_s: float, usd_per_hour: float, lanes: int = 1) -> float:
    """What a time on one of `lanes` equal lanes costs, when all that the sweep holds costs `usd_per_hour`."""
    return time_s / 3600 * usd_per_hour / lanes


def samples_to_target(curve: Sequence[Mapping[str, float]], reached: int, global_batch_size: int) -> Interval:
    """Samples that a trial needed, from its evaluations: row `reached` was the first that met the target.

    It was met at any time since the evaluation before that: frequent evaluations make sharp references.
    """
    last = curve[reached]["step"] * global_batch_size
    before = curve[reached - 1]["step"] * global_batch_size if reached > 0 else 0.0
    return Interval((before + last) / 2, before, last)


def rule_allows(rule: str) -> str | None:
    """Why nothing can be predicted across batch sizes under a rule of `lr_scaling`; None when it can."""
    if rule == "none":
        return (
            "`lr_scaling.rule` is none: the learning rate does not follow the batch size, so one batch size says "
            "nothing of another; set it to linear (SGD) or sqrt (Adam)"
        )
    return None


def predict(
    candidates: Sequence[Candidate],
    references: Sequence[Reference],
    noise_scales: Mapping[str, Interval],
    usd_per_hour: float | None = None,
    lanes: int = 1,
    seed: int = 0,
) -> tuple[list[Prediction], dict[str, str]]:
    """Predictions, fastest first, and for each candidate without one the reason by its name.

    `noise_scales` is by setting. A candidate at the very batch size of all its references needs no noise scale. Times
    of different settings are compared like any others: each is from the setting's own measurements.
    """
    reasons: dict[str, str] = {}
    drawn: list[tuple[Candidate, Draws, Draws, Draws]] = []
    for setting in dict.fromkeys(candidate.setting for candidate in candidates):
        trained = [reference for reference in references if reference.setting == setting]
        noise = noise_scales.get(setting)
        if noise is not None and noise.low <= 0:
            noise = None
        sizes = {reference.global_batch_size for reference in trained}
        worth, needed, base = _reference_draws(trained, noise, _generator(seed, setting))
        for candidate in candidates:
            size = candidate.global_batch_size
            if candidate.setting != setting:
                continue
            if not trained:
                reasons[candidate.name] = f"no trial of {setting} was trained to the target"
            elif noise is None and sizes != {size}:
                reasons[candidate.name] = (
                    f"the gradient noise scale of {setting} is not known: it takes two workers or microbatches, "
                    "and three windows of steps"
                )
            else:
                efficiencies = (1 + base * worth) / (1 + size * worth)
                speeds = np.maximum(_draws(candidate.samples_per_s, _generator(seed, candidate.name)), 1e-12)
                drawn.append((candidate, efficiencies, efficiencies * speeds, needed / (efficiencies * speeds)))
    drawn.sort(key=lambda row: float(np.median(row[3])))
    places = _places([times for *_, times in drawn])
    predictions = []
    for (candidate, efficiencies, goodputs, times), place in zip(drawn, places, strict=True):
        time_s = _interval(times)
        usd = None if usd_per_hour is None else time_s.scaled(dollars(1.0, usd_per_hour, lanes))
        predictions.append(Prediction(candidate, _interval(efficiencies), _interval(goodputs), time_s, usd, place))
    return predictions, reasons


def _generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers of their own for each name, the same in every process."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _reference_draws(
    trained: Sequence[Reference], noise: Interval | None, rng: np.random.Generator
) -> tuple[Draws, Draws, float]:
    """Draws of 1 / noise, and of the samples to the target at the references' mean batch size; that size.

    The inverse is drawn, normally: its estimate divides by tr(Sigma), which is known well, while the noise scale
    divides by |G|^2, which may be anything near zero. Several references are brought to their mean batch size and
    averaged in the logarithm; how much they then still differ (seeds, a model that fits badly) widens the draws.
    """
    base = math.exp(np.mean([math.log(reference.global_batch_size) for reference in trained])) if trained else 1.0
    worth = np.zeros(_DRAWS)
    if noise is not None:
        inverse = Interval(*(1 / value for value in (noise.value, noise.high, noise.low)))
        worth = np.maximum(_draws(inverse, rng), 0.0)
    logs = []
    for reference in trained:
        amount = reference.samples_to_target
        samples = np.maximum(rng.uniform(amount.low, amount.high, _DRAWS), 1e-12)
        logs.append(np.log(samples * (1 + base * worth) / (1 + reference.global_batch_size * worth)))
    if not logs:
        return worth, np.ones(_DRAWS), base
    centres = [float(np.median(row)) for row in logs]
    freedom = REPEATS_WEIGHT + len(logs) - 1
    variance = (REPEATS_WEIGHT * REPEATS**2 + float(np.var(centres)) * len(centres)) / freedom
    spread = math.sqrt(variance / len(logs))
    return worth, np.exp(np.mean(logs, axis=0) + spread * rng.standard_t(freedom, _DRAWS)), base


def _draws(figure: Interval, rng: np.random.Generator) -> Draws:
    """Normal on either side of the value, each with its own width."""
    normals = rng.standard_normal(_DRAWS)
    widths = np.where(normals > 0, figure.high - figure.value, figure.value - figure.low)
    return figure.value + normals * widths / _Z95


def _places(times: Sequence[Draws]) -> list[int]:
    """Places of rows of draws, fastest first: a row opens a new one when it is slower than the one that opened the
    last, in 97.5 % of the draws and by more than repeats differ.
    """
    places: list[int] = []
    leader = 0
    for index, row in enumerate(times):
        if index == 0:
            places.append(1)
            continue
        ratio = _interval(row / times[leader])
        if ratio.low > 1 and ratio.value > 1 + REPEATS:
            leader = index
            places.append(index + 1)
        else:
            places.append(places[-1])
    return places


def _interval(draws: Draws) -> Interval:
    low, value, high = (float(figure) for figure in np.quantile(draws, [0.025, 0.5, 0.975]))
    return Interval(value, low, high)
