"""The finalists of a sweep: which trials one run each cannot tell apart, their repeats, and what those say. Pure.

A repeat runs alone, with another seed, in turn with the other finalists': its time owes nothing to trials beside it,
nor to the luck for which the first run was chosen, so only repeats count.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainers.measure.step_times import student_t95
from tune.config import TO_TARGET, SweepConfig
from tune.trials.interval import APART, EQUAL, REPEATS, REPEATS_WEIGHT, Interval
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord


def time_alone(record: TrialRecord) -> Interval:
    """Return what one run to the target says of the time to it, s, repeats aside.

    The target was met at some time since the evaluation before that; and the share of the time in which work on its
    node waited for a processor is the most that the run may have lost to what ran beside it.
    """
    time_s, before = record.time_to_target_s or 0.0, record.missed_target_s
    before = time_s if before is None else min(before, time_s)
    return Interval(time_s, before * (1 - (record.cpu_pressure or 0.0)), time_s)


def told_apart(first: TrialRecord, other: TrialRecord) -> bool:
    """Whether one run each shows, in 97.5 % of the cases, that `first` reaches the target sooner than `other`."""
    return time_alone(other).low > APART * time_alone(first).high


def contenders(config: SweepConfig, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials to repeat, fastest first; none where the answer is clear, or of another kind than a time."""
    found = rivals(config, records)
    return found[: config.num_finalists] if len(found) > 1 else []


def rivals(config: SweepConfig, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the fastest trial to the target and those that one run each cannot tell apart from it, fastest first."""
    if config.objective.metric not in TO_TARGET or "seed" in config.space:
        return []
    times = [(one.time_to_target_s, one) for one in records if one.purpose != "repeat" and one.finished]
    known = [(time_s, record) for time_s, record in times if time_s and math.isfinite(time_s)]
    reached = sorted(known, key=lambda pair: pair[0])
    unique = list({trial_id(record.config): (time_s, record) for time_s, record in reversed(reached)}.values())[::-1]
    return [record for _, record in unique if not told_apart(unique[0][1], record)]


def repeats_to_run(
    config: SweepConfig, train: dict[str, Any], records: Sequence[TrialRecord]
) -> list[tuple[TrialRecord, int]]:
    """Return the finalists and the seeds of their repeats that have no record yet, in turn."""
    known = {record.id for record in records}
    first, found = int(train.get("seed", 0)) + 1, contenders(config, records)
    pairs = [(record, first + number) for number in range(config.finalists.repeats) for record in found]
    return [(record, seed) for record, seed in pairs if trial_id(record.config, "repeat", seed) not in known]


@dataclass(frozen=True)
class Final:
    """A finalist."""

    record: TrialRecord
    """Of the search."""
    time_s: Interval
    """To the target, alone: the geometric mean of its repeats, and the time since the evaluation before."""
    samples_per_s: float
    """Alone: the median of its repeats."""
    repeats: int
    ratio: Interval
    """How many times as long as the fastest it takes."""
    equal: bool
    """Whether it cannot be told apart from the fastest (which cannot be told apart from itself)."""


def finals(config: SweepConfig, records: Sequence[TrialRecord]) -> list[Final]:
    """Return what the repeats say, fastest first; nothing before two finalists have two that reached the target.

    The spread of the times' logarithms is pooled over all finalists, and with `REPEATS` of earlier sweeps. A target is
    met between two evaluations: no ratio claims more than what holds wherever in between.
    """
    groups = []
    for record in contenders(config, records):
        own = _repeats(record, records)
        logs = [math.log(one.time_to_target_s) for one in own if one.time_to_target_s]
        if len(logs) > 1:
            rates = [one.samples_per_s for one in own if one.samples_per_s]
            groups.append((record, logs, _since(own), statistics.median(rates or [0.0])))
    if len(groups) < 2:
        return []
    freedom = REPEATS_WEIGHT + sum(len(logs) - 1 for _, logs, _, _ in groups)
    squares = sum(statistics.variance(logs) * (len(logs) - 1) for _, logs, _, _ in groups)
    spread = math.sqrt((REPEATS_WEIGHT * REPEATS**2 + squares) / freedom)
    groups.sort(key=lambda group: statistics.fmean(group[1]))
    t95, (_, first, since_first, _) = student_t95(freedom), groups[0]
    found = []
    for record, logs, since, rate in groups:
        mean, half = statistics.fmean(logs), t95 * spread / math.sqrt(len(logs))
        behind = mean - statistics.fmean(first)
        apart = t95 * spread * math.sqrt(1 / len(logs) + 1 / len(first))
        interval = Interval(math.exp(mean), math.exp(mean - since - half), math.exp(mean + half))
        ratio = Interval(math.exp(behind), math.exp(behind - since - apart), math.exp(behind + since_first + apart))
        equal = behind - since <= max(apart, math.log(1 + EQUAL))
        found.append(Final(record, interval, rate, len(logs), ratio, equal))
    return found


def _since(runs: Sequence[TrialRecord]) -> float:
    """Return how much sooner runs may have met the target, as they were last evaluated before: the mean logarithm."""
    lows = [(one.time_to_target_s, one.missed_target_s) for one in runs if one.time_to_target_s]
    return statistics.fmean(
        0.0 if low is None else math.inf if low <= 0 else max(0.0, math.log(high / low)) for high, low in lows
    )


def crowding(records: Sequence[TrialRecord]) -> float | None:
    """Return how many times as fast finalists ran alone as beside other trials (median); None without repeats."""
    ratios = []
    for record in records:
        if record.purpose == "trial" and record.samples_per_s:
            rates = [one.samples_per_s for one in _repeats(record, records) if one.samples_per_s]
            ratios += [statistics.median(rates) / record.samples_per_s] if rates else []
    return statistics.median(ratios) if ratios else None


def pressure(records: Sequence[TrialRecord], repeats: bool = False) -> float | None:
    """Return the median share of the trials' time, or of repeats', in which work on their node waited for a processor,
    where known.
    """
    known = [r.cpu_pressure for r in records if (r.purpose == "repeat") is repeats and r.cpu_pressure is not None]
    return statistics.median(known) if known else None


def _repeats(finalist: TrialRecord, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [one for one in records if one.purpose == "repeat" and one.config == finalist.config]
