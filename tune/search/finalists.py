"""The finalists of a sweep: trials that are too close to rank by one run each.

Every function here is pure.

Repeats run one at a time, with other seeds, and finalists take turns. Only the
repeats count, because other trials do not affect their times, and neither does
the selection of lucky first runs. The repeats form a race, from which finalists
(its entrants) are eliminated.

In each round, every entrant runs once, all with the same seed (Maron and Moore
1994, Hoeffding races; Birattari et al. 2002, F-Race). After 2, 4, 8 and 16
rounds there is an interim analysis: an entrant leaves the race if it is slower
than the current leader, or if it differs from the leader by too little to
matter. Many analyses of many entrants would find differences where there are
none. So the error level of 5 % is divided evenly among the analyses (a
group-sequential test with the same level at each, as in Pocock 1977, here by
Bonferroni's inequality) and among the leader's rivals (multiple comparisons
with the best, Hsu 1984).

The logarithm of a time is modelled as the entrant's mean, plus an effect of
the seed, plus a residual. The residual's spread is pooled over all entrants,
and with `REPEATS`, the spread in earlier sweeps.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from trainers.measure.figures import student_t
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
    num_lanes,
    trial_id,
)

MOST_FINALISTS = 8
_SHARE = 0.5
"""The share of the search's time that repeats may take in addition."""
_FREE_S = 15.0
"""Seconds that repeats may always take."""
LOOKS = (2, 4, 8, 16)
"""Numbers of rounds after which standings are analyzed; the last one ends a race."""
LEVEL = 0.05
_TRIFLE = math.log(1 + EQUAL)


@dataclass(frozen=True)
class Lap:
    """One run of an entrant."""

    log_s: float
    """Logarithm of the time to target, s."""
    early: float = 0.0
    """How much smaller `log_s` may be: the target was met between two evaluations."""
    late: float = 0.0
    """How much larger `log_s` may be; infinite if the target was missed."""


@dataclass(frozen=True)
class Standing:
    """An entrant compared with the leader: differences of logarithms of times."""

    behind: float
    half: float
    """Half width of the difference's simultaneous interval; 0 for the leader."""
    low: float
    """The least possible difference, given that targets are met between evaluations."""
    high: float
    overlap: float
    """The part of the uncertainty in `low` that no number of repeats reduces."""
    missed: float
    """The share of its laps that missed the target, less the leader's share."""

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the leader by an amount that matters."""
        return self.behind - self.overlap > max(self.half, _TRIFLE)

    @property
    def is_settled(self) -> bool:
        """Whether it is clearly slower than the leader, or clearly as good."""
        is_as_good = self.behind + self.half <= max(self.overlap, _TRIFLE)
        return self.is_slower or (is_as_good and not self.missed)


@dataclass(frozen=True)
class Race:
    """What the finalists' rounds so far show: who leads, and what must run next."""

    standings: list[Standing | None]
    """One per entrant; None if it has no time, or before the first analysis."""
    runs_next: list[tuple[int, int]]
    """Entrant and round of each run due before the next analysis; empty at the end."""


def race(
    laps: Sequence[Mapping[int, Lap | None]], last_round: int = LOOKS[-1]
) -> Race:
    """Return the standings of a race, and the runs that are due.

    Args:
        laps: For each entrant, its runs by round, from 0; None for a run
            without a time, which is ignored and not repeated.
        last_round: The greatest number of rounds that the race may have.
    """
    racing = list(range(len(laps)))
    standings: list[Standing | None] = [None] * len(laps)
    for num_rounds in sorted({min(look, last_round) for look in LOOKS}):
        missing = [
            (at, number)
            for number in range(num_rounds)
            for at in racing
            if number not in laps[at]
        ]
        if missing:
            return Race(standings, missing)
        known = _known(laps, num_rounds)
        racing = [at for at in racing if at in known]
        if not racing:
            break
        now = compare(known, racing)
        for at in racing:
            standings[at] = now[at]
        racing = [
            at for at in racing if now[at].half == 0 or not now[at].is_settled
        ]
        if len(racing) == 1:
            break
    return Race(standings, [])


def _known(
    laps: Sequence[Mapping[int, Lap | None]], num_rounds: int
) -> dict[int, dict[int, Lap]]:
    """Return the runs with a time in the first rounds, by entrant and round."""
    known: dict[int, dict[int, Lap]] = {}
    for entrant, own in enumerate(laps):
        for number, lap in own.items():
            if lap is not None and number < num_rounds:
                known.setdefault(entrant, {})[number] = lap
    return known


def compare(
    laps: Mapping[int, Mapping[int, Lap]], racing: Sequence[int]
) -> dict[int, Standing]:
    """Compare each entrant with the leader.

    The leader is the one in `racing` that missed the target in the smallest
    share of its laps; of several, the one with the least mean.

    Args:
        laps: The laps by entrant and round; each entrant has at least one lap.
        racing: The entrants still in the race; the leader is one of them.
    """
    columns: dict[Any, int] = {entrant: at for at, entrant in enumerate(laps)}
    cells = []
    known = []
    missed = {}
    for entrant, own in laps.items():
        misses = [lap.late == math.inf for lap in own.values()]
        missed[entrant] = statistics.fmean(misses)
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
    leader = min(
        racing,
        key=lambda entrant: (missed[entrant], effects[columns[entrant]]),
    )
    found = {leader: Standing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
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
        found[entrant] = Standing(
            behind,
            half,
            behind - overlap - half,
            high,
            overlap,
            missed[entrant] - missed[leader],
        )
    return found


def _pooled(squares: float, num_free: int) -> float:
    """Return the standard deviation of log times, pooled with earlier sweeps'."""
    before = REPEATS_WEIGHT * REPEATS**2
    return math.sqrt((before + squares) / (REPEATS_WEIGHT + num_free))


def _early_and_late(laps: Iterable[Lap]) -> tuple[float, float]:
    known = list(laps)
    early = statistics.fmean(lap.early for lap in known)
    late = statistics.fmean(lap.late for lap in known)
    return early, late


def time_alone(record: TrialRecord) -> Interval:
    """Return one run's time to target, s, with its likely range on an idle machine.

    The interval reaches down because the target was met at some time after the
    previous evaluation, and because other work may have slowed the trial.
    """
    time_s = record.time_to_target_s or 0.0
    low_s = time_s
    if record.missed_target_s is not None:
        low_s = min(record.missed_target_s, time_s)
    return Interval(time_s, _alone_s(record, low_s), time_s)


def _alone_s(record: TrialRecord, time_s: float) -> float:
    """Return the least time, s, that a trial's first `time_s` take on an idle machine.

    Excluded are the time lost in outlying steps, and the share of the time in
    which work on the trial's node waited for a CPU.
    """
    idle_share = 1 - (record.cpu_pressure or 0.0)
    trained_s = time_s - (record.disturbed_s or 0.0)
    return max(0.0, trained_s) * idle_share


def told_apart(first: TrialRecord, other: TrialRecord) -> bool:
    """Return whether one run each shows that `first` is faster (error rate 2.5 %)."""
    return time_alone(other).low > APART * time_alone(first).high


def contenders(config: SweepConfig, records: Records) -> list[TrialRecord]:
    """Return the trials to repeat, fastest first.

    The list is empty if one run each settles the order, if the objective is
    not a time, or if there is no time for repeats.
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
    total_s = sum(record.on_lane_s for record in search)
    return max(_FREE_S, _SHARE * total_s / num_lanes(search))


def _mean_cost_s(records: Records) -> float:
    return statistics.fmean(record.on_lane_s for record in records)


def rivals(config: SweepConfig, records: Records) -> list[TrialRecord]:
    """Return the fastest trial and those that one run each cannot tell apart from it."""
    if config.objective.metric not in TO_TARGET or "seed" in config.space:
        return []
    trials = _fastest_first(records)
    return [record for record in trials if not told_apart(trials[0], record)]


def _fastest_first(records: Records) -> list[TrialRecord]:
    """Return the trials that met the target, one per configuration, fastest first."""
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
    """Return the repeats to run before the next analysis: finalist and seed, in order.

    The list is empty if the race is decided, if repeats cannot decide it, or
    if the time for repeats is used up.
    """
    if "train_func" in train:
        return []
    found = contenders(config, records)
    first_seed = int(train.get("seed", 0)) + 1
    stands = _standing(config.objective, found, records, first_seed)
    return [
        (found[entrant], first_seed + lap) for entrant, lap in stands.runs_next
    ]


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
    left_s = _time_for_repeats_s(records) - sum(
        record.on_lane_s for record in ended
    )
    round_s = max(1e-9, num_racing * _mean_cost_s(ended or found))
    num_more = max(0, int(left_s / round_s))
    _, next_round = stands.runs_next[0]
    return race(laps, max(LOOKS[0], next_round + num_more))


def _lap(objective: Objective, record: TrialRecord) -> Lap | None:
    """Return a repeat as a run of the race, or None if it has no time.

    A repeat that trained to its end without meeting the target takes at least
    its whole training time. A repeat that a user has stopped has no time.
    """
    time_s = crossing_s(objective, record)
    if time_s is None:
        trained = [row.get("train_time_s", 0.0) for row in record.curve]
        whole_s = max(trained, default=0.0)
        if record.is_censored or not record.finished or whole_s <= 0:
            return None
        return Lap(math.log(whole_s), late=math.inf)
    lost_s = (
        record.disturbed_s or 0.0
    )  # some of it perhaps after the target was met
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
    """The finalist's run in the search."""
    time_s: Interval
    """Time to the target while no other trial runs: the geometric mean of its repeats."""
    samples_per_s: float
    """Throughput while no other trial runs: the median of its repeats."""
    latest_s: float
    """The mean time, s, if each repeat met the target at the evaluation that shows it."""
    repeats: int
    num_missed: int
    """Repeats that did not meet the target."""
    ratio: Interval
    """Its time to the target, divided by that of the fastest finalist."""
    equal: bool
    """Whether it cannot be told apart from the fastest; true for the fastest itself."""


def finals(config: SweepConfig, records: Records) -> list[Final]:
    """Return the finalists by their repeats, fastest first.

    A target is met somewhere between two evaluations, so each ratio's interval
    covers every time in between.

    Returns:
        One entry per finalist with a repeat that did not fail; empty before
        the first analysis.
    """
    seeds = [
        record.seed or 0 for record in records if record.purpose == "repeat"
    ]
    if not seeds:
        return []
    objective = config.objective
    entrants = contenders(config, records)
    standings = _standing(objective, entrants, records, min(seeds)).standings
    groups = []
    num_free = 0
    squares = 0.0
    for record, standing in zip(entrants, standings, strict=True):
        repeats = _repeats(record, records)
        runs = [run for run in repeats if not run.is_censored]
        known = [_lap(objective, run) for run in runs]
        laps = [lap for lap in known if lap is not None]
        if standing is None or not laps:
            continue
        groups.append((standing, record, runs, laps))
        num_free += len(laps) - 1
        mean = statistics.fmean(lap.log_s for lap in laps)
        squares += sum((lap.log_s - mean) ** 2 for lap in laps)
    if not groups:
        return []
    width = student_t(REPEATS_WEIGHT + num_free, 0.975) * _pooled(
        squares, num_free
    )
    groups.sort(
        key=lambda group: (
            group[0].missed,
            group[0].is_slower,
            group[0].behind,
        )
    )
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
    """Return a finalist; `half` is the half width of its mean logarithmic time."""
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
        not (standing.is_slower or standing.missed),
    )


def _exponential(value: float, low: float, high: float) -> Interval:
    return Interval(math.exp(value), math.exp(low), math.exp(high))


def most_ahead(records: Records, found: Sequence[Final]) -> float | None:
    """Return an upper bound on any other trial's speed, divided by the best trial's.

    The bound holds with 95 % confidence. Finalists are bounded by their race;
    all others by their one run and the usual spread between repeats of one
    configuration. A trial that was stopped is taken to need at least the time
    for which it had trained.

    Returns:
        The ratio, at least 1; None if no trial has met the target.
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
        ratios += [
            _ratio(1.0, final.ratio.low) for final in found[1:] if final.equal
        ]
        repeated = {trial_id(final.record.config) for final in found}
        others = [
            record
            for record in trials
            if trial_id(record.config) not in repeated
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
    """Return the share of finished trials' time in which work waited for a CPU.

    If `repeats`, only finalists' repeats count, else everything but repeats.

    Returns:
        The median; None if nothing is known.
    """
    known = [
        record.cpu_pressure
        for record in records
        if (record.purpose == "repeat") is repeats
        and record.finished
        and record.cpu_pressure is not None
    ]
    return statistics.median(known) if known else None


def _repeats(finalist: TrialRecord, records: Records) -> list[TrialRecord]:
    repeats = [record for record in records if record.purpose == "repeat"]
    return [record for record in repeats if record.config == finalist.config]
