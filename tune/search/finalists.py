"""The finalists of a sweep: trials that one run each cannot tell apart, and repeats.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from trainers.measure.figures import student_t, student_t95
from tune.config import TO_TARGET, Objective, SweepConfig
from tune.trials.record import (
    APART,
    EQUAL,
    REPEATS,
    REPEATS_WEIGHT,
    Interval,
    Records,
    TrialRecord,
    crossing_s,
    trial_id,
)

MOST_FINALISTS = 8
_SHARE = 0.5
"""Of the time of the search: what repeats may take."""
_FREE_S = 15.0
"""What repeats may always take."""
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
    """The smallest difference, wherever between evaluations both met the target."""
    high: float
    overlap: float
    """The part of `low` that no number of repeats takes away."""

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the leader by more than is of interest."""
        return self.behind - self.overlap > max(self.half, _TRIFLE)

    @property
    def is_settled(self) -> bool:
        """Whether more repeats can tell nothing of interest."""
        is_as_good = self.behind + self.half <= max(self.overlap, _TRIFLE)
        return self.is_slower or is_as_good


@dataclass(frozen=True)
class Race:
    """What the rounds so far say."""

    standings: list[Standing | None]
    """One an entrant; None without a time, or before the first look."""
    runs_next: list[tuple[int, int]]
    """Entrant and round of each run before the next look; empty after the race."""


def race(laps: Sequence[Mapping[int, Lap | None]], last_round: int = LOOKS[-1]) -> Race:
    """Return how a race stands.

    Args:
        laps: For each entrant what its rounds, from 0, have given; None for one without
            a time, which says nothing and is not run again.
        last_round: How many rounds the race has at most.
    """
    racing = list(range(len(laps)))
    standings: list[Standing | None] = [None] * len(laps)
    for num_rounds in sorted({min(look, last_round) for look in LOOKS}):
        missing = []
        for number in range(num_rounds):
            for at in racing:
                if number not in laps[at]:
                    missing.append((at, number))
        if missing:
            return Race(standings, missing)
        known = _known(laps, num_rounds)
        racing = [at for at in racing if at in known]
        if not racing:
            break
        now = compare(known, racing)
        for at in racing:
            standings[at] = now[at]
        racing = [at for at in racing if now[at].half == 0 or not now[at].is_settled]
        if len(racing) == 1:
            break
    return Race(standings, [])


def _known(
    laps: Sequence[Mapping[int, Lap | None]], num_rounds: int
) -> dict[int, dict[int, Lap]]:
    """Return the laps of the first rounds that have a time, by entrant and round."""
    known: dict[int, dict[int, Lap]] = {}
    for entrant, own in enumerate(laps):
        for number, lap in own.items():
            if lap is not None and number < num_rounds:
                known.setdefault(entrant, {})[number] = lap
    return known


def compare(
    laps: Mapping[int, Mapping[int, Lap]], racing: Sequence[int]
) -> dict[int, Standing]:
    """Return each entrant's standing beside the one with the smallest mean.

    Args:
        laps: By entrant and round; each entrant has at least one.
        racing: The entrants of which one leads.
    """
    columns: dict[Any, int] = {entrant: at for at, entrant in enumerate(laps)}
    cells = []
    known = []
    for entrant, own in laps.items():
        for number, lap in own.items():
            column = columns.setdefault(f"round {number}", len(columns))
            cells.append((columns[entrant], column))
            known.append(lap.log_s)
    design = np.zeros((len(cells), len(columns)))
    for row, pair in enumerate(cells):
        design[row, pair] = 1.0
    logs = np.array(known)
    effects, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    rest = logs - design @ effects
    num_free = len(cells) - int(rank)
    spread = _pooled(float(rest @ rest), num_free)
    covariance = np.linalg.pinv(design.T @ design)
    num_rivals = max(1, len(laps) - 1)
    level = 1 - LEVEL / 2 / num_rivals / len(LOOKS)
    width = spread * student_t(REPEATS_WEIGHT + num_free, level)
    leader = min(racing, key=lambda entrant: float(effects[columns[entrant]]))
    found = {leader: Standing(0.0, 0.0, 0.0, 0.0, 0.0)}
    leader_early, leader_late = _early_and_late(laps[leader].values())
    for entrant in laps.keys() - {leader}:
        contrast = np.zeros(len(columns))
        contrast[columns[entrant]] = 1.0
        contrast[columns[leader]] = -1.0
        behind = float(contrast @ effects)
        half = width * math.sqrt(float(contrast @ covariance @ contrast))
        early, late = _early_and_late(laps[entrant].values())
        overlap = early + leader_late
        high = behind + late + leader_early + half
        found[entrant] = Standing(behind, half, behind - overlap - half, high, overlap)
    return found


def _pooled(squares: float, num_free: int) -> float:
    """Return the spread of logarithms of times, pooled with that of earlier sweeps."""
    before = REPEATS_WEIGHT * REPEATS**2
    return math.sqrt((before + squares) / (REPEATS_WEIGHT + num_free))


def _early_and_late(laps: Iterable[Lap]) -> tuple[float, float]:
    known = list(laps)
    early = statistics.fmean(lap.early for lap in known)
    late = statistics.fmean(lap.late for lap in known)
    return early, late


def time_alone(record: TrialRecord) -> Interval:
    """Return what one run to the target says of the time to it, s.

    The target was met at some time since the evaluation before.
    """
    time_s = record.time_to_target_s or 0.0
    low_s = time_s
    if record.missed_target_s is not None:
        low_s = min(record.missed_target_s, time_s)
    return Interval(time_s, _alone_s(record, low_s), time_s)


def _alone_s(record: TrialRecord, time_s: float) -> float:
    """Return the least that a part of a trial would have taken on an idle machine.

    It would not have had what its outlying steps have lost, nor the share of the time
    in which work on its node waited for a processor.
    """
    idle_share = 1 - (record.cpu_pressure or 0.0)
    trained_s = time_s - (record.disturbed_s or 0.0)
    return max(0.0, trained_s) * idle_share


def told_apart(first: TrialRecord, other: TrialRecord) -> bool:
    """Whether one run each shows, in 97.5 % of cases, that `first` is sooner there."""
    return time_alone(other).low > APART * time_alone(first).high


def contenders(config: SweepConfig, records: Records) -> list[TrialRecord]:
    """Return the trials to repeat, fastest first.

    None where the answer is clear, or of another kind than a time.
    """
    found = rivals(config, records)
    if len(found) < 2:
        return []
    if config.finalists == "auto":
        least_s = max(1e-9, LOOKS[0] * _mean_cost_s(found))
        affordable = int(_time_for_repeats_s(records) / least_s)
        count = min(MOST_FINALISTS, affordable)
    else:
        count = config.finalists
    if count < 2:
        return []
    return found[:count]


def _time_for_repeats_s(records: Records) -> float:
    """Return how long repeats may take, s: half of the search's time on its lanes."""
    search = [record for record in records if record.purpose != "repeat"]
    lanes = {record.lane for record in search}
    search_s = sum(map(_cost_s, search)) / max(1, len(lanes))
    return max(_FREE_S, _SHARE * search_s)


def _cost_s(record: TrialRecord) -> float:
    """Return how long a trial held its lane, s."""
    if record.spent is not None:
        return record.spent.total_s
    return max(0.0, record.end_time - record.start_time)


def _mean_cost_s(records: Records) -> float:
    return statistics.fmean(map(_cost_s, records))


def rivals(config: SweepConfig, records: Records) -> list[TrialRecord]:
    """Return the fastest trial and those that one run each cannot tell apart from it."""
    if config.objective.metric not in TO_TARGET or "seed" in config.space:
        return []
    trials = _fastest_first(records)
    return [record for record in trials if not told_apart(trials[0], record)]


def _fastest_first(records: Records) -> list[TrialRecord]:
    """Return the trials that met the target, one of each configuration."""
    times = []
    for record in records:
        time_s = record.time_to_target_s
        has_ended = record.purpose != "repeat" and record.finished
        if has_ended and time_s and math.isfinite(time_s):
            times.append((time_s - (record.disturbed_s or 0.0), record))
    times.sort(key=lambda pair: pair[0])
    found: dict[str, TrialRecord] = {}
    for _, record in times:
        found.setdefault(trial_id(record.config), record)
    return list(found.values())


def repeats_to_run(
    config: SweepConfig, train: dict[str, Any], records: Records
) -> list[tuple[TrialRecord, int]]:
    """Return finalist and seed of each repeat to run before the next look, in turn.

    None where the order of the first is decided, or no repeat can decide it, or their
    time is used up.
    """
    if "train_func" in train:
        return []
    found = contenders(config, records)
    first_seed = int(train.get("seed", 0)) + 1
    stands = _standing(config.objective, found, records, first_seed)
    return [(found[entrant], first_seed + lap) for entrant, lap in stands.runs_next]


def _standing(
    objective: Objective,
    found: Records,
    records: Records,
    first_seed: int,
) -> Race:
    """Return how the race of the finalists stands; the first repeat has `first_seed`."""
    if len(found) < 2:
        return Race([], [])
    laps = []
    ended: list[TrialRecord] = []
    for record in found:
        rounds = {}
        for run in _repeats(record, records):
            number = (run.seed or 0) - first_seed
            rounds[number] = _lap(objective, run)
            ended.append(run)
        laps.append(rounds)
    stands = race(laps)
    if not stands.runs_next:
        return stands
    num_racing = len({entrant for entrant, _ in stands.runs_next})
    left_s = _time_for_repeats_s(records) - sum(map(_cost_s, ended))
    round_s = max(1e-9, num_racing * _mean_cost_s(ended or found))
    num_more = max(0, int(left_s / round_s))
    _, next_round = stands.runs_next[0]
    return race(laps, max(LOOKS[0], next_round + num_more))


def _lap(objective: Objective, record: TrialRecord) -> Lap | None:
    """Return what a repeat says.

    One that trained to its end without meeting the target took that long.
    """
    time_s = crossing_s(objective, record)
    if time_s is None:
        trained = [row.get("train_time_s", 0.0) for row in record.curve]
        whole_s = max(trained, default=0.0)
        if not record.finished or whole_s <= 0:
            return None
        return Lap(math.log(whole_s))
    lost_s = record.disturbed_s or 0.0  # maybe after it had met the target
    value_s = time_s.value - lost_s
    low_s = time_s.low - lost_s
    if value_s <= 0:
        return None
    early = math.inf
    if low_s > 0:
        early = math.log(value_s / low_s)
    late = math.log(time_s.high / value_s)
    return Lap(math.log(value_s), early, late)


@dataclass(frozen=True)
class Final:
    """A finalist."""

    record: TrialRecord
    """Of the search."""
    time_s: Interval
    """To the target, alone: the geometric mean of its repeats."""
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
    """Whether it cannot be told apart from the fastest, which is equal to itself."""


def finals(config: SweepConfig, records: Records) -> list[Final]:
    """Return what the repeats say, fastest first.

    A target is met between two evaluations: no ratio claims more than what holds
    wherever in between.

    Returns:
        One a finalist; none before two of them have been looked at.
    """
    seeds = [record.seed or 0 for record in records if record.purpose == "repeat"]
    if not seeds:
        return []
    objective = config.objective
    entrants = contenders(config, records)
    standings = _standing(objective, entrants, records, min(seeds)).standings
    groups = []
    num_free = 0
    squares = 0.0
    for record, standing in zip(entrants, standings, strict=True):
        runs = _repeats(record, records)
        known = [_lap(objective, run) for run in runs]
        laps = [lap for lap in known if lap is not None]
        if standing is None or not laps:
            continue
        groups.append((standing, record, runs, laps))
        num_free += len(laps) - 1
        mean = statistics.fmean(lap.log_s for lap in laps)
        squares += sum((lap.log_s - mean) ** 2 for lap in laps)
    if len(groups) < 2:
        return []
    width = student_t95(REPEATS_WEIGHT + num_free) * _pooled(squares, num_free)
    groups.sort(key=lambda group: (group[0].is_slower, group[0].behind))
    return [
        _final(standing, record, runs, laps, width / math.sqrt(len(laps)))
        for standing, record, runs, laps in groups
    ]


def _final(
    standing: Standing,
    record: TrialRecord,
    runs: Records,
    laps: Sequence[Lap],
    half: float,
) -> Final:
    """Return a finalist; `half` is the half width of its mean logarithm of a time."""
    mean = statistics.fmean(lap.log_s for lap in laps)
    early, late = _early_and_late(laps)
    time_s = _exponential(mean, mean - early - half, mean + late + half)
    rates = [run.samples_per_s for run in runs if run.samples_per_s]
    return Final(
        record,
        time_s,
        statistics.median(rates or [0.0]),
        math.exp(mean + late),
        len(laps),
        sum(run.time_to_target_s is None for run in runs),
        _exponential(standing.behind, standing.low, standing.high),
        not standing.is_slower,
    )


def _exponential(value: float, low: float, high: float) -> Interval:
    return Interval(math.exp(value), math.exp(low), math.exp(high))


def most_ahead(records: Records, found: Sequence[Final]) -> float | None:
    """Return how many times as fast as the best any other trial is at most.

    That holds with 95 % confidence: of finalists by the race, of all others by one run
    each and what repeats of one configuration differ by. A trial that was stopped had
    not met the target until then.

    Returns:
        The ratio, at least 1; None where no trial has met the target.
    """
    trials = _fastest_first(records)
    if not trials:
        return None
    best_s = time_alone(trials[0]).high
    num_repeats = 1
    ratios = [1.0]
    others = trials[1:]
    if found:
        best_s = found[0].latest_s
        num_repeats = found[0].repeats
        ratios += [_ratio(1.0, final.ratio.low) for final in found[1:]]
        repeated = {trial_id(final.record.config) for final in found}
        others = [
            record for record in trials if trial_id(record.config) not in repeated
        ]
    earliest_s = [time_alone(record).low for record in others]
    num_compared = len(trials) - 1
    for record in records:
        is_stopped = record.purpose == "trial" and record.status == "stopped"
        if is_stopped and record.curve and record.time_to_target_s is None:
            trained_s = record.curve[-1].get("train_time_s", 0.0)
            earliest_s.append(_alone_s(record, trained_s))
            num_compared += 1
    level = 1 - LEVEL / max(1, num_compared)
    width = NormalDist().inv_cdf(level) * REPEATS
    luck = math.exp(width * math.sqrt(1 + 1 / num_repeats))
    ratios += [_ratio(best_s, time_s) * luck for time_s in earliest_s]
    return max(ratios)


def _ratio(value: float, other: float) -> float:
    return value / other if other > 0 else math.inf


def pressure(records: Records, repeats: bool = False) -> float | None:
    """Return in which share of their time trials, or repeats, waited for a processor.

    Returns:
        The median; None where nothing is known.
    """
    known = []
    for record in records:
        is_repeat = record.purpose == "repeat"
        if is_repeat is repeats and record.cpu_pressure is not None:
            known.append(record.cpu_pressure)
    return statistics.median(known) if known else None


def _repeats(finalist: TrialRecord, records: Records) -> list[TrialRecord]:
    repeats = [record for record in records if record.purpose == "repeat"]
    return [record for record in repeats if record.config == finalist.config]
