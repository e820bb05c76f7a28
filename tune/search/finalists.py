"""The finalists of a sweep: which trials one run each cannot tell apart, their repeats,
and what those say.

Pure.

A repeat runs alone, with another seed, in turn with the other finalists': its time owes
nothing to trials beside it, nor to the luck for which the first run was chosen, so only
repeats count. They are a race that the slower ones leave.

All entrants run one round after the other, a round with one seed (Maron and Moore 1994,
Hoeffding races; Birattari et al. 2002, F-Race). After 2, 4, 8 and 16 rounds they are
looked at: who is slower than the first of the moment leaves, and so does who differs
from it by less than is of interest. Many looks at many entrants find differences where
there are none. So each comparison has its share of the 5 % of error: an even one for
each look (a group-sequential test with one level for all looks as Pocock's, 1977, here
by Bonferroni's inequality) and for each rival of the best (multiple comparisons with
the best, Hsu 1984).

Logarithms of times are an entrant's mean, a seed's own part and a rest, whose spread is
pooled over all and with `REPEATS` of earlier sweeps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from trainers.measure.step_times import student_t, student_t95
from tune.config import SweepConfig
from tune.objective import TO_TARGET, Objective
from tune.trials.interval import APART, EQUAL, REPEATS, REPEATS_WEIGHT, Interval
from tune.trials.record import TrialRecord, crossing_s, trial_id

MOST_FINALISTS = 8
_SHARE = 0.5  # of the time of the search: what repeats may take
_FREE_S = 15.0
"""That repeats may always take."""
LOOKS = (2, 4, 8, 16)
"""Rounds after which somebody looks; the last one is the longest race."""
LEVEL = 0.05
_TRIFLE = math.log(1 + EQUAL)


@dataclass(frozen=True)
class Lap:
    """One run of an entrant."""

    log_s: float
    """Logarithm of the time to target, s."""
    early: float = 0.0
    """How much smaller that may be: the target was met between two evaluations."""
    late: float = 0.0
    """How much larger it may be."""


@dataclass(frozen=True)
class Standing:
    """An entrant beside the leader: differences of logarithms of times."""

    behind: float
    half: float
    """Half width of the difference's simultaneous interval; 0 for the leader."""
    low: float
    """The smallest difference, wherever between their evaluations both may have met the
    target.
    """
    high: float
    overlap: float
    """The part of `low` that no number of repeats takes away."""

    @property
    def is_slower(self) -> bool:
        """Whether it is shown to be slower than the leader by more than is of interest."""
        return self.behind - self.overlap > max(self.half, _TRIFLE)

    @property
    def is_settled(self) -> bool:
        """Whether more repeats cannot tell anything of interest: it is slower, or as
        good as equal.
        """
        return self.is_slower or self.behind + self.half <= max(self.overlap, _TRIFLE)


@dataclass(frozen=True)
class Race:
    """What the rounds so far say."""

    standings: list[Standing | None]
    """One an entrant, None for one without a time; empty before the first look."""
    runs_next: list[tuple[int, int]]
    """Entrant and round of what has to run before the next look, in turn; empty once
    the race has ended.
    """


def race(laps: Sequence[Mapping[int, Lap | None]], last_round: int = LOOKS[-1]) -> Race:
    """Return how a race stands that ends after `last_round` rounds at the latest.

    `laps` has for each entrant what its rounds, from 0, have given, None for one
    without a time: it says nothing, and is not run again.
    """
    racing = list(range(len(laps)))
    found: list[Standing | None] = []
    for rounds in sorted({min(rounds, last_round) for rounds in LOOKS}):
        missing = [
            (entrant, lap)
            for lap in range(rounds)
            for entrant in racing
            if lap not in laps[entrant]
        ]
        if missing:
            return Race(found, missing)
        known = {
            at: {lap: run for lap, run in own.items() if run and lap < rounds}
            for at, own in enumerate(laps)
        }
        known = {at: own for at, own in known.items() if own}
        racing = [at for at in racing if at in known]
        if not racing:
            return Race([None] * len(laps), [])
        now = compare(known, racing)
        found = [
            now.get(at) if at in racing or not found else found[at]
            for at in range(len(laps))
        ]
        racing = [at for at in racing if now[at].half == 0 or not now[at].is_settled]
        if len(racing) == 1:
            break
    return Race(found, [])


def compare(
    laps: Mapping[int, Mapping[int, Lap]], racing: Sequence[int]
) -> dict[int, Standing]:
    """Return each entrant's standing beside the one of `racing` that has the smallest
    mean; each needs a lap.
    """
    cells = [
        (entrant, lap, run) for entrant, own in laps.items() for lap, run in own.items()
    ]
    columns = {
        key: at
        for at, key in enumerate([*laps, *{f"round {lap}" for _, lap, _ in cells}])
    }
    design = np.zeros((len(cells), len(columns)))
    for row, (entrant, lap, _) in enumerate(cells):
        design[row, columns[entrant]] = design[row, columns[f"round {lap}"]] = 1.0
    logs = np.array([run.log_s for *_, run in cells])
    effects, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    rest = logs - design @ effects
    freedom = REPEATS_WEIGHT + len(cells) - int(rank)
    spread = math.sqrt((REPEATS_WEIGHT * REPEATS**2 + float(rest @ rest)) / freedom)
    covariance = np.linalg.pinv(design.T @ design)
    width = spread * student_t(
        freedom, 1 - LEVEL / 2 / max(1, len(laps) - 1) / len(LOOKS)
    )
    leader = min(racing, key=lambda entrant: float(effects[columns[entrant]]))
    early = {
        at: statistics.fmean(run.early for run in own.values())
        for at, own in laps.items()
    }
    late = {
        at: statistics.fmean(run.late for run in own.values())
        for at, own in laps.items()
    }
    found = {leader: Standing(0.0, 0.0, 0.0, 0.0, 0.0)}
    for entrant in laps.keys() - {leader}:
        contrast = np.zeros(len(columns))
        contrast[columns[entrant]], contrast[columns[leader]] = 1.0, -1.0
        behind = float(contrast @ effects)
        half = width * math.sqrt(float(contrast @ covariance @ contrast))
        overlap = early[entrant] + late[leader]
        high = behind + late[entrant] + early[leader] + half
        found[entrant] = Standing(behind, half, behind - overlap - half, high, overlap)
    return found


def time_alone(record: TrialRecord) -> Interval:
    """Return what one run to the target says of the time to it, s, repeats aside.

    The target was met at some time since the evaluation before that.
    """
    time_s = record.time_to_target_s or 0.0
    before = record.missed_target_s
    before = time_s if before is None else min(before, time_s)
    return Interval(time_s, _alone_s(record, before), time_s)


def _alone_s(record: TrialRecord, time_s: float) -> float:
    """Return the least that a part of a trial would have taken with nothing beside it:
    without what its outlying steps have lost, and the share of the time in which work
    on its node waited for a processor.
    """
    return max(0.0, time_s - (record.disturbed_s or 0.0)) * (
        1 - (record.cpu_pressure or 0.0)
    )


def told_apart(first: TrialRecord, other: TrialRecord) -> bool:
    """Whether one run each shows, in 97.5 % of the cases, that `first` reaches the
    target sooner than `other`.
    """
    return time_alone(other).low > APART * time_alone(first).high


def contenders(
    config: SweepConfig, records: Sequence[TrialRecord]
) -> list[TrialRecord]:
    """Return the trials to repeat, fastest first; none where the answer is clear, or of
    another kind than a time.
    """
    found = rivals(config, records)
    if len(found) < 2:
        return []
    affordable = int(
        _time_for_repeats_s(records) / max(1e-9, LOOKS[0] * _mean_cost_s(found))
    )
    wanted = config.finalists
    count = min(MOST_FINALISTS, affordable) if wanted == "auto" else wanted
    return found[:count] if count > 1 else []


def _time_for_repeats_s(records: Sequence[TrialRecord]) -> float:
    """Return how long repeats may take, s: half of what the search has taken on its
    lanes, side by side.
    """
    search = [record for record in records if record.purpose != "repeat"]
    lanes = max(1, len({record.lane for record in search}))
    return max(_FREE_S, _SHARE * sum(map(_cost_s, search)) / lanes)


def _cost_s(record: TrialRecord) -> float:
    """Return how long a trial held its lane, s."""
    return (
        record.spent.total_s
        if record.spent
        else max(0.0, record.end_time - record.start_time)
    )


def _mean_cost_s(records: Sequence[TrialRecord]) -> float:
    return statistics.fmean(map(_cost_s, records))


def rivals(config: SweepConfig, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the fastest trial to the target and those that one run each cannot tell
    apart from it, fastest first.
    """
    if config.objective.metric not in TO_TARGET or "seed" in config.space:
        return []
    trials = _fastest_first(records)
    return [record for record in trials if not told_apart(trials[0], record)]


def _fastest_first(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that met the target, one of each configuration."""
    times = [
        (one.time_to_target_s, one)
        for one in records
        if one.purpose != "repeat" and one.finished
    ]
    known = [
        (time_s, record) for time_s, record in times if time_s and math.isfinite(time_s)
    ]
    reached = sorted(known, key=lambda pair: pair[0] - (pair[1].disturbed_s or 0.0))
    return list(
        {trial_id(record.config): record for _, record in reversed(reached)}.values()
    )[::-1]


def repeats_to_run(
    config: SweepConfig, train: dict[str, Any], records: Sequence[TrialRecord]
) -> list[tuple[TrialRecord, int]]:
    """Return the finalists and the seeds of the repeats to run before the next look at
    them, in turn; none where the order of the first is decided, or no repeat can decide
    it, or their time is used up.
    """
    if "train_func" in train:
        return []
    found = contenders(config, records)
    first = int(train.get("seed", 0)) + 1
    return [
        (found[entrant], first + number)
        for entrant, number in _standing(config, found, records, first).runs_next
    ]


def _standing(
    config: SweepConfig,
    found: Sequence[TrialRecord],
    records: Sequence[TrialRecord],
    first_seed: int | None = None,
) -> Race:
    """Return how the race of the finalists stands; `first_seed` is that of the first
    repeat (default: the smallest).
    """
    repeats = [_repeats(record, records) for record in found]
    ended = [one for own in repeats for one in own]
    if len(found) < 2 or (first_seed is None and not ended):
        return Race([], [])
    first = min(one.seed or 0 for one in ended) if first_seed is None else first_seed
    laps = [
        {(one.seed or 0) - first: _lap(config.objective, one) for one in own}
        for own in repeats
    ]
    stands = race(laps)
    if not stands.runs_next:
        return stands
    racing = len({entrant for entrant, _ in stands.runs_next})
    left_s = _time_for_repeats_s(records) - sum(map(_cost_s, ended))
    more = max(0, int(left_s / max(1e-9, racing * _mean_cost_s(ended or found))))
    return race(laps, max(LOOKS[0], stands.runs_next[0][1] + more))


def _lap(objective: Objective, record: TrialRecord) -> Lap | None:
    """Return what a repeat says; of one that trained to its end without meeting the
    target, that it took that long.
    """
    time_s = crossing_s(objective, record)
    if time_s is None:
        whole_s = max(
            (row.get("train_time_s", 0.0) for row in record.curve), default=0.0
        )
        return Lap(math.log(whole_s)) if record.finished and whole_s > 0 else None
    lost_s = record.disturbed_s or 0.0  # maybe after it had met the target
    value_s = time_s.value - lost_s
    low_s = time_s.low - lost_s
    if value_s <= 0:
        return None
    early = math.log(value_s / low_s) if low_s > 0 else math.inf
    return Lap(math.log(value_s), early, math.log(time_s.high / value_s))


@dataclass(frozen=True)
class Final:
    """A finalist."""

    record: TrialRecord
    """Of the search."""
    time_s: Interval
    """To the target, alone: the geometric mean of its repeats, and the time since the
    evaluation before.
    """
    samples_per_s: float
    """Alone: the median of its repeats."""
    latest_s: float
    """The mean, where each had met the target only at its evaluation."""
    repeats: int
    num_missed: int
    """Repeats that did not meet the target."""
    ratio: Interval
    """How many times as long as the fastest it takes."""
    equal: bool
    """Whether it cannot be told apart from the fastest (which cannot be told apart from
    itself).
    """


def finals(config: SweepConfig, records: Sequence[TrialRecord]) -> list[Final]:
    """Return what the repeats say, fastest first; nothing before two finalists have
    been looked at.

    The spread of the times' logarithms is pooled over all finalists, and with `REPEATS`
    of earlier sweeps. A target is met between two evaluations: no ratio claims more
    than what holds wherever in between.
    """
    entrants = contenders(config, records)
    standings = _standing(config, entrants, records).standings
    groups = []
    for record, standing in zip(entrants, standings, strict=False):
        own = _repeats(record, records)
        laps = [lap for one in own if (lap := _lap(config.objective, one))]
        if standing is not None and laps:
            groups.append((standing, record, own, laps))
    if len(groups) < 2:
        return []
    freedom = REPEATS_WEIGHT + sum(len(laps) - 1 for *_, laps in groups)
    squares = sum(
        statistics.variance(_logs(laps)) * (len(laps) - 1)
        for *_, laps in groups
        if len(laps) > 1
    )
    spread = math.sqrt((REPEATS_WEIGHT * REPEATS**2 + squares) / freedom)
    found = []
    for standing, record, own, laps in sorted(
        groups, key=lambda group: (group[0].is_slower, group[0].behind)
    ):
        mean = statistics.fmean(_logs(laps))
        half = student_t95(freedom) * spread / math.sqrt(len(laps))
        early, late = (
            statistics.fmean(getattr(lap, name) for lap in laps)
            for name in ("early", "late")
        )
        rates = [one.samples_per_s for one in own if one.samples_per_s]
        found.append(
            Final(
                record,
                Interval(
                    math.exp(mean),
                    math.exp(mean - early - half),
                    math.exp(mean + late + half),
                ),
                statistics.median(rates or [0.0]),
                math.exp(mean + late),
                len(laps),
                sum(one.time_to_target_s is None for one in own),
                Interval(
                    *(
                        math.exp(part)
                        for part in (standing.behind, standing.low, standing.high)
                    )
                ),
                not standing.is_slower,
            )
        )
    return found


def _logs(laps: Sequence[Lap]) -> list[float]:
    return [lap.log_s for lap in laps]


def most_ahead(records: Sequence[TrialRecord], found: Sequence[Final]) -> float | None:
    """Return how many times as fast as the best any other trial is at most, with 95 %
    confidence; None where none has met the target.

    Of finalists by the race; of all others by one run each, and what repeats of one
    configuration differ by. One that was stopped had not met the target until then.
    """
    trials = _fastest_first(records)
    if not trials:
        return None
    repeated = {trial_id(final.record.config) for final in found}
    others = (
        trials[1:]
        if not found
        else [one for one in trials if trial_id(one.config) not in repeated]
    )
    stopped = [
        one
        for one in records
        if one.purpose == "trial" and one.status == "stopped" and one.curve
    ]
    missed = [_trained_alone_s(one) for one in stopped if one.time_to_target_s is None]
    latest = found[0].latest_s if found else time_alone(trials[0]).high
    width = (
        NormalDist().inv_cdf(1 - LEVEL / max(1, len(trials) + len(missed) - 1))
        * REPEATS
    )
    width *= math.sqrt(1 + 1 / (found[0].repeats if found else 1))
    ratios = [
        1 / final.ratio.low if final.ratio.low > 0 else math.inf for final in found[1:]
    ]
    for earliest in (*(time_alone(one).low for one in others), *missed):
        ratios.append(latest / earliest * math.exp(width) if earliest > 0 else math.inf)
    return max([1.0, *ratios])


def _trained_alone_s(record: TrialRecord) -> float:
    """Return the least that a trial would have trained until its last evaluation, s,
    with nothing beside it.
    """
    return _alone_s(record, record.curve[-1].get("train_time_s", 0.0))


def crowding(records: Sequence[TrialRecord]) -> float | None:
    """Return how many times as fast finalists ran alone as beside other trials
    (median); None without repeats.
    """
    ratios = []
    for record in records:
        if record.purpose == "trial" and record.samples_per_s:
            rates = [
                one.samples_per_s
                for one in _repeats(record, records)
                if one.samples_per_s
            ]
            ratios += [statistics.median(rates) / record.samples_per_s] if rates else []
    return statistics.median(ratios) if ratios else None


def pressure(records: Sequence[TrialRecord], repeats: bool = False) -> float | None:
    """Return the median share of the trials' time, or of repeats', in which work on
    their node waited for a processor, where known.
    """
    known = [
        r.cpu_pressure
        for r in records
        if (r.purpose == "repeat") is repeats and r.cpu_pressure is not None
    ]
    return statistics.median(known) if known else None


def _repeats(
    finalist: TrialRecord, records: Sequence[TrialRecord]
) -> list[TrialRecord]:
    return [
        one
        for one in records
        if one.purpose == "repeat" and one.config == finalist.config
    ]
