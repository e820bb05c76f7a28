"""What the finalists' repeats say: times with an interval, and what trials beside each other cost. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.measure.step_times import student_t95
from tune.config import SweepConfig
from tune.search.finalists import contenders
from tune.trials.interval import EQUAL, REPEATS, REPEATS_WEIGHT, Interval
from tune.trials.record import TrialRecord


@dataclass(frozen=True)
class Final:
    """A finalist."""

    record: TrialRecord
    """Of the search."""
    time_s: Interval
    """To the target, alone: the geometric mean of its repeats."""
    samples_per_s: float
    """Alone: the median of its repeats."""
    repeats: int
    equal: bool
    """Whether it cannot be told apart from the fastest (which cannot be told apart from itself)."""


def finals(config: SweepConfig, records: Sequence[TrialRecord]) -> list[Final]:
    """Return what the repeats say, fastest first; nothing before two finalists have two that reached the target.

    The spread of the times' logarithms is pooled over all finalists, and with `REPEATS` of earlier sweeps.
    """
    groups = []
    for record in contenders(config, records):
        own = _repeats(record, records)
        logs = [math.log(one.time_to_target_s) for one in own if one.time_to_target_s]
        if len(logs) > 1:
            rates = [one.samples_per_s for one in own if one.samples_per_s]
            groups.append((record, logs, statistics.median(rates or [0.0])))
    if len(groups) < 2:
        return []
    freedom = REPEATS_WEIGHT + sum(len(logs) - 1 for _, logs, _ in groups)
    squares = sum(statistics.variance(logs) * (len(logs) - 1) for _, logs, _ in groups)
    spread = math.sqrt((REPEATS_WEIGHT * REPEATS**2 + squares) / freedom)
    groups.sort(key=lambda group: statistics.fmean(group[1]))
    t95, (_, first, _) = student_t95(freedom), groups[0]
    found = []
    for record, logs, rate in groups:
        mean, half = statistics.fmean(logs), t95 * spread / math.sqrt(len(logs))
        behind = mean - statistics.fmean(first)
        apart = t95 * spread * math.sqrt(1 / len(logs) + 1 / len(first))
        interval = Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
        equal = behind <= max(apart, math.log(1 + EQUAL))
        found.append(Final(record, interval, rate, len(logs), equal))
    return found


def crowding(records: Sequence[TrialRecord]) -> float | None:
    """Return how many times as fast finalists ran alone as beside other trials (median); None without repeats."""
    ratios = []
    for record in records:
        if record.purpose == "trial" and record.samples_per_s:
            rates = [one.samples_per_s for one in _repeats(record, records) if one.samples_per_s]
            ratios += [statistics.median(rates) / record.samples_per_s] if rates else []
    return statistics.median(ratios) if ratios else None


def pressure(records: Sequence[TrialRecord]) -> float | None:
    """Return the median share of the trials' time in which work on their node waited for a processor, where known."""
    known = [one.cpu_pressure for one in records if one.purpose != "repeat" and one.cpu_pressure is not None]
    return statistics.median(known) if known else None


def _repeats(finalist: TrialRecord, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [one for one in records if one.purpose == "repeat" and one.config == finalist.config]
