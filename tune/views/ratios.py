"""How two groups of runs of one configuration compare: a ratio with what it may be, and what may be said of it. Pure.

The noise is that of the answer of one sweep (tune/search/finalists.py): repeats where there are two of each, pooled
with `REPEATS` of earlier sweeps; of one run each the interval that it carries.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.measure.step_times import student_t95
from tune.report.words import number
from tune.search.finalists import time_alone
from tune.trials.interval import APART, EQUAL, REPEATS, REPEATS_WEIGHT, Interval
from tune.trials.record import TrialRecord


@dataclass(frozen=True)
class Ratio:
    """How many times as good the second of two is."""

    value: float
    interval: tuple[float, float] | None
    """95 %; None where neither repeats nor the runs themselves tell any."""

    @property
    def is_claim(self) -> bool:
        """Whether there is a difference that matters: the interval excludes 1, and the ratio is no trifle."""
        is_apart = self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]
        return is_apart and abs(math.log(self.value)) > math.log(1 + EQUAL)

    def words(self, better: str = "faster", worse: str = "slower") -> str:
        """Return what may be said of it: "faster by 1.21x [1.1, 1.33]"."""
        if self.interval is None:
            return f"no claim ({number(self.value, 3)}x, from runs without repeats or an interval)"
        if not self.is_claim:
            return f"equal within noise ({number(self.value, 3)}x {_shown(*self.interval)})"
        low, high = self.interval
        if self.value > 1:
            return f"{better} by {number(self.value, 3)}x {_shown(low, high)}"
        return f"{worse} by {number(1 / self.value, 3)}x {_shown(1 / high, 1 / low if low > 0 else math.inf)}"

    def times(self, factor: float) -> "Ratio":
        """Return it multiplied by a number without noise."""
        low, high = self.interval or (0.0, 0.0)
        return Ratio(self.value * factor, None if self.interval is None else (low * factor, high * factor))


def _shown(low: float, high: float) -> str:
    return f"[{number(low, 3)}, {number(high, 3) if math.isfinite(high) else 'no limit'}]"


def times_ratio(first: Sequence[TrialRecord], second: Sequence[TrialRecord]) -> Ratio | None:
    """Return how many times sooner the second's runs met the target; None where either's did not."""
    groups = [[_time(one) for one in runs if one.time_to_target_s] for runs in (first, second)]
    if not all(groups):
        return None
    half = math.log(APART)
    if any(len(group) > 1 for group in groups):
        half = _half([[math.log(one.value) for one in group] for group in groups], REPEATS, REPEATS_WEIGHT)
    (low_1, mean_1, high_1), (low_2, mean_2, high_2) = (_log_means(group) for group in groups)
    interval = math.exp(low_1 - high_2 - half), math.exp(high_1 - low_2 + half)
    return Ratio(math.exp(mean_1 - mean_2), interval)


def rates_ratio(first: Sequence[TrialRecord], second: Sequence[TrialRecord]) -> Ratio | None:
    """Return how many times the samples/s of the first's runs the second's have; None where either's have none.

    One run each is compared as the answer does: by the interval of its step time, with what work beside it may have
    taken, and `EQUAL` for what differs from run to run.
    """
    groups = [[one for one in runs if one.samples_per_s] for runs in (first, second)]
    if not all(groups):
        return None
    logs = [[math.log(one.samples_per_s or 1.0) for one in group] for group in groups]
    behind = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    if all(len(group) > 1 for group in groups):
        half = _half(logs, 0.0, 0)
        return Ratio(math.exp(behind), (math.exp(behind - half), math.exp(behind + half)))
    spans = [_rate(group[0]) for group in groups]
    if spans[0] is None or spans[1] is None:
        return Ratio(math.exp(behind), None)
    low, high = spans[1].low / spans[0].high / (1 + EQUAL), spans[1].high / spans[0].low * (1 + EQUAL)
    return Ratio(math.exp(behind), (min(low, math.exp(behind)), max(high, math.exp(behind))))


def _half(logs: Sequence[Sequence[float]], prior: float, weight: int) -> float:
    """Return the half width of the difference of two means, the spread pooled over both and with a prior one."""
    freedom = weight + sum(len(own) - 1 for own in logs)
    squares = weight * prior**2 + sum(statistics.variance(own) * (len(own) - 1) for own in logs if len(own) > 1)
    return student_t95(freedom) * math.sqrt(squares / freedom) * math.sqrt(sum(1 / len(own) for own in logs))


def _time(run: TrialRecord) -> Interval:
    """Return when a run met the target; a repeat ran alone."""
    if run.purpose != "repeat":
        return time_alone(run)
    time_s, before = run.time_to_target_s or 0.0, run.missed_target_s
    return Interval(time_s, time_s if before is None else min(before, time_s), time_s)


def _log_means(group: Sequence[Interval]) -> tuple[float, float, float]:
    low, mean, high = (
        statistics.fmean(math.log(value) if value > 0 else -math.inf for value in values)
        for values in zip(*((one.low, one.value, one.high) for one in group), strict=True)
    )
    return low, mean, high


def _rate(run: TrialRecord) -> Interval | None:
    """Return a run's samples/s; None where nothing tells how sure they are."""
    if not run.samples_per_s or not run.step_time_s or run.step_time_ci95_s is None:
        return None
    half, rate = min(1.0, run.step_time_ci95_s / run.step_time_s), run.samples_per_s
    return Interval(rate, rate * (1 - half), rate * (1 + half) / max(1e-9, 1 - (run.cpu_pressure or 0.0)))
