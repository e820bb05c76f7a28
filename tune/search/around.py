"""Search a rate for each combination of the space's other values: `lr: around`. Pure.

Pure.

Each begins with the run's own value, of which `lr_scaling` makes the rule's rate for
its batch size, and with the neighbours by 2. Where the best rate is the smallest or
largest that was tried, the next one beyond it follows, until the best has a worse one
on either side.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tune.config import Range, SweepConfig
from tune.objective import Objective
from tune.trials.record import TrialRecord, trial_id, value_of

_FIRST_STEPS = (0, 1, -1)
_MOST_STEPS = 6
"""Doublings on either side."""

Score = tuple[float, float]
"""The smaller the better: the objective, and what decides without it, how far the
target's metric came.
"""
NO_SCORE: Score = (math.inf, math.inf)
"""Of a trial that failed."""


def score(
    objective: Objective, value: float | None, metrics: Mapping[str, float]
) -> Score:
    """Return the score of a trial that did not fail."""
    goal = objective.goal
    far = math.inf
    if goal is not None:
        far = _smaller_is_better(goal.mode, metrics.get(goal.metric))
    return _smaller_is_better(objective.direction, value), far


def _smaller_is_better(mode: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value


def scores_of(objective: Objective, records: Iterable[TrialRecord]) -> dict[str, Score]:
    """Return the scores of trials that have ended, by id.

    One that a user has stopped has no value, as when it ran.
    """
    found = {}
    for record in records:
        if record.purpose != "trial":
            continue
        value = None if record.is_censored else value_of(objective.metric, record)
        found[record.id] = (
            score(objective, value, record.metrics) if record.finished else NO_SCORE
        )
    return found


def next_trials(
    config: SweepConfig, scores: Mapping[str, Score]
) -> list[dict[str, Any]]:
    """Return the trials to run as far as `scores` tell; none where the search is over.

    Every combination's own rate comes first, then its neighbours: that tells early what
    is beaten.
    """
    assert config.around is not None
    others = {
        key: values for key, values in config.space.items() if key != config.around
    }
    wanted: list[tuple[int, dict[str, Any]]] = []
    for values in itertools.product(*others.values()):
        trials = {
            step: _trial(config, dict(zip(others, values, strict=True)), step)
            for step in _ALL_STEPS
        }
        ids = {step: trial_id(trial) for step, trial in trials.items()}
        known = {step: scores[name] for step, name in ids.items() if name in scores}
        wanted += [(step, trials[step]) for step in _next_steps(known)]
    return [trial for _, trial in sorted(wanted, key=lambda pair: abs(pair[0]))]


_ALL_STEPS = range(-_MOST_STEPS, _MOST_STEPS + 1)


def _trial(config: SweepConfig, others: dict[str, Any], step: int) -> dict[str, Any]:
    values = config.space[config.around or ""]
    assert isinstance(values, Range)
    return {**others, str(config.around): values.start * 2.0**step}


def _next_steps(scores: Mapping[int, Score]) -> list[int]:
    """Return the doublings that one combination needs next."""
    missing = [step for step in _FIRST_STEPS if step not in scores]
    if missing:
        return missing
    best = min(scores, key=lambda step: (scores[step], abs(step)))
    beyond = best + 1 if best > 0 else best - 1  # the side of the start has been tried
    return [] if beyond in scores or abs(beyond) > _MOST_STEPS else [beyond]


def is_inside(
    config: SweepConfig, records: Iterable[TrialRecord], trial: Mapping[str, Any]
) -> bool:
    """Whether both neighbours of a trial's rate have been tried."""
    tried = {record.id for record in records}
    key = str(config.around)
    return all(
        trial_id({**trial, key: trial[key] * factor}) in tried for factor in (0.5, 2.0)
    )
