"""Several objectives: which trials no other beats in all of them, how sure that is, and who is certain to be beaten,
with a single one too.

Figures are counted in steps of the smallest difference that is of interest, 5 % (of a score 0.01), less being better: a
trial beats another where it is worse by no more than one step in any metric and better by more than one in some (the
epsilon-dominance of Laumanns et al. 2002, https://doi.org/10.1162/106365602760234108). Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tune.objective import SCORES, SPENT, Objective
from tune.search.finalists import Final, time_alone
from tune.trials.interval import APART, EQUAL, FAR_APART, REPEATS, Interval, dollars
from tune.trials.record import CPU_PRESSURE, USED, TrialRecord, time_to_target, value_of

Steps = NDArray[np.float64]

EXCLUDED = 0.05
"""A trial with a smaller chance to belong to the front is said not to."""
_EQUAL_SCORE = 0.01
_DRAWS = 1000
_MOST = 60  # trials that are drawn: those nearest to the front
_Z95 = 1.96
_WORTH_S = 10.0  # of training: with a single objective a shorter trial is left to its end


@dataclass(frozen=True)
class Member:
    """A trial of the front, or one that may belong to it."""

    record: TrialRecord
    values: dict[str, Interval]
    """By metric, with 95 % intervals: of repeats, of the evaluation before, and of what one run differs from another
    by. Memory, and what the task reports, has none."""
    chance: float
    """That no other trial beats it, by these intervals."""
    is_on_front: bool
    """Whether none beats it by the figures as they were measured."""
    steps: list[float]
    """Of each metric, above the best of the front."""


def steps(objective: Objective, values: Steps) -> Steps:
    """Return figures [..., m] of the objective's metrics in steps of the smallest difference of interest."""
    columns = []
    for at, metric in enumerate(objective.decisive):
        column = values[..., at]
        finite = column[np.isfinite(column)]
        if metric.endswith(SCORES) and (finite <= 1).all():
            scaled = column / _EQUAL_SCORE
        elif (finite > 0).all():
            with np.errstate(divide="ignore"):
                scaled = np.log(column) / math.log(1 + EQUAL)
        else:
            scaled = column / (EQUAL * max(np.abs(finite).max(), 1e-300))
        columns.append(objective.sign(metric) * scaled)
    return np.stack(columns, axis=-1)


def beats(one: Steps, other: Steps) -> NDArray[np.bool_]:
    """Return whether figures [..., m], in steps, beat others."""
    no_worse = (one <= other + 1).all(axis=-1)
    return np.asarray(no_worse & (one + 1 < other).any(axis=-1))


def unbeaten(figures: Steps) -> list[int]:
    """Return the rows of figures [n, m], in steps, that make up the front: one of them beats each other row."""
    found: list[int] = []
    for row in np.argsort(figures.sum(axis=1), kind="stable"):
        if not any(beats(figures[one], figures[row]) for one in found):
            found.append(int(row))
    return found


def front(objective: Objective, records: Sequence[TrialRecord], finals: Sequence[Final] = ()) -> list[Member]:
    """Return the front, and after it the trials that may belong to it, each by its first metric; empty with one metric.

    Trials that were repeated count as their repeats say.
    """
    repeated = {final.record.id: final for final in finals}
    trials = [one for one in records if one.purpose != "repeat"]
    found = [(one, values) for one in trials if (values := _values(objective, one, repeated.get(one.id))) is not None]
    if objective.metrics is None or not found:
        return []
    measured = np.array([[one.value for one in values.values()] for _, values in found])
    figures = steps(objective, measured)
    members = unbeaten(figures)
    best = figures[members].min(axis=0)
    behind = [min(float((figures[row] - figures[one]).max()) for one in members) for row in range(len(found))]
    near = sorted(range(len(found)), key=lambda row: (row not in members, behind[row]))[: max(_MOST, len(members))]
    drawn = steps(objective, _drawn(objective, [found[row] for row in near], repeated))
    chances = [
        1 - float(beats(np.delete(drawn, at, axis=1), drawn[:, [at]]).any(axis=1).mean()) for at in range(len(near))
    ]
    listed = [
        Member(*found[row], chance, row in members, [float(one) for one in figures[row] - best])
        for row, chance in zip(near, chances, strict=True)
        if row in members or chance >= EXCLUDED
    ]
    return sorted(listed, key=lambda member: (not member.is_on_front, member.steps[0]))


def score(objective: Objective, member: Member) -> float:
    """Return the weighted sum of a trial's steps above the best of each metric; without weights, by the first."""
    weights = objective.weights or {objective.metric: 1.0}
    return sum(weights.get(metric, 0.0) * one for metric, one in zip(objective.decisive, member.steps, strict=True))


@dataclass(frozen=True)
class _Length:
    """How long a trial takes, of the time in its record; what it spends goes with that."""

    early: float
    """Share of it after which the target may have been met already."""
    middle: float
    deviation: float
    """Standard deviation of its logarithm."""

    @classmethod
    def of(cls, objective: Objective, record: TrialRecord, final: Final | None) -> Self:
        """Return it by the trial's repeats, else by its one run."""
        whole_s = record.time_to_target_s
        if final is not None and whole_s:
            low, middle, high = (one / whole_s for one in (final.time_s.low, final.time_s.value, final.time_s.high))
            deviation = math.log(high / middle) / _Z95
            return cls(min(1.0, low / middle * math.exp(_Z95 * deviation)), middle, deviation)
        return cls(time_alone(record).low / whole_s if whole_s and objective.to_target else 1.0, 1.0, REPEATS)

    def interval(self, value: float) -> Interval:
        """Return what a trial has spent, of the value in its record."""
        middle, width = value * self.middle, math.exp(_Z95 * self.deviation)
        return Interval(middle, middle * self.early / width, middle * width)

    def draws(self, rng: np.random.Generator) -> Steps:
        """Return draws [D] of it."""
        between = rng.uniform(self.early, 1.0, _DRAWS) if self.early < 1 else 1.0
        return np.asarray(self.middle * between * np.exp(self.deviation * rng.standard_normal(_DRAWS)))


def _values(objective: Objective, record: TrialRecord, final: Final | None) -> dict[str, Interval] | None:
    """Return a trial's figures; None where one is missing."""
    found: dict[str, Interval] = {}
    for metric in objective.decisive:
        value = value_of(metric, record)
        if value is None:
            return None
        found[metric] = Interval(value, value, value)
        if metric in SPENT and value > 0:
            found[metric] = _Length.of(objective, record, final).interval(value)
        elif metric in ("samples_per_s", "step_time_s"):
            width = min(0.5, (record.step_time_ci95_s or 0.0) / (record.step_time_s or math.inf))
            found[metric] = Interval(value, value * (1 - width), value * (1 + width))
    return found


def _drawn(
    objective: Objective, found: Sequence[tuple[TrialRecord, Mapping[str, Interval]]], repeated: Mapping[str, Final]
) -> Steps:
    """Return draws [D, n, m] of figures: what a trial spends is drawn together, since it grows with its length."""
    rng = np.random.default_rng(0)
    drawn = np.empty((_DRAWS, len(found), len(objective.decisive)))
    for row, (record, values) in enumerate(found):
        length = _Length.of(objective, record, repeated.get(record.id))
        lengths = length.draws(rng) / length.middle
        for at, (metric, value) in enumerate(values.items()):
            if metric in SPENT and value.value > 0:
                drawn[:, row, at] = value.value * lengths
            else:
                width = math.log(value.high / value.low) / 2 / _Z95 if value.high > value.low > 0 else 0.0
                drawn[:, row, at] = value.value * np.exp(width * rng.standard_normal(_DRAWS))
    return drawn


def beaten_by(
    objective: Objective,
    curve: list[dict[str, float]],
    finished: Sequence[TrialRecord],
    usd_per_hour: float | None = None,
) -> TrialRecord | None:
    """Return a finished trial that is certain to beat a running one, by the evaluations of that so far; None: none is.

    What it has spent and the peak of its memory can only grow: they are lower bounds. A finished trial has to beat them
    by more than what two runs of one configuration differ by, in 97.5 % of the cases; with a single objective in so
    many that the answer's bound on all other trials excludes it, too. Other metrics have no bound.
    """
    is_single = objective.metrics is None
    if not curve or (is_single and not objective.ends_at_target):
        return None
    if objective.ends_at_target and objective.reached(curve[-1]):
        return None  # it ends here by itself, with its result
    if is_single and curve[-1].get("train_time_s", 0.0) < _WORTH_S:
        return None
    bounds = np.array(so_far(objective, curve, usd_per_hour))
    trials = [one for one in finished if one.status == "done" and one.purpose == "trial"]
    known: list[tuple[TrialRecord, list[Any]]] = [
        (one, [value_of(name, one) for name in objective.decisive]) for one in trials
    ]
    whole = [(one, values) for one, values in known if None not in values]
    if not np.isfinite(bounds).all() or not whole:
        return None
    ratio = FAR_APART if is_single else APART
    apart = np.array([ratio if metric in SPENT else 1.0 for metric in objective.decisive])
    bound, *figures = steps(objective, np.array([bounds, *(np.array(values) * apart for _, values in whole)]))
    slack = np.where(apart > 1, 0.0, 1.0)
    return next((one for (one, _), row in zip(whole, figures, strict=True) if (row <= bound + slack).all()), None)


def so_far(objective: Objective, curve: list[dict[str, float]], usd_per_hour: float | None = None) -> list[float]:
    """Return the least that each of a running trial's figures will be in the end; -inf where that is not known.

    What it has spent is less the most that it may have lost to work beside it, as in `time_alone`.
    """
    row, met_s = curve[-1], time_to_target(objective, curve)
    known = {name: row[name] for name in USED if name in row}
    time_s = row.get("train_time_s") if met_s is None else met_s
    if time_s is not None:
        known["time_to_target"] = time_s
        if usd_per_hour is not None:
            known["usd_to_target"] = dollars(time_s, usd_per_hour)
    known |= {name: known[name] * (1 - row.get(CPU_PRESSURE, 0.0)) for name in SPENT if name in known}
    return [known.get(metric, -math.inf) for metric in objective.decisive]
