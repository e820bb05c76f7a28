"""The search space: its trials, and which trials of an `around` search come next."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from trainers.config.function import build_run, kind_of
from trainers.config.model import Tree, override, refuse_changes
from trainers.errors import MISSING, ConfigError
from trainers.versions import require_package
from tune.config import (
    MOST_TRIALS,
    Objective,
    Range,
    SweepConfig,
    sample_values,
)
from tune.trials.record import Records, TrialRecord, trial_id, value_of

_FIRST_STEPS = (0, 1, -1)
_MOST_STEPS = 6
"""The most doublings of the rate on either side of the start."""
_ALL_STEPS = range(-_MOST_STEPS, _MOST_STEPS + 1)
WHOLE = "whole_trial"
"""The only key in Tune's configuration if Tune got the trial as a whole."""
_FIXED = ("scaling", "launcher", "name", "storage_path", "task_dir", "keys")
"""Keys of a run that are the same for all trials."""

Values = list[Any] | Range
Space = Mapping[str, Values]
Score = tuple[float, float]
"""Smaller is better: the objective's value and, to compare trials that have
none, the last value of the target's metric.
"""
NO_SCORE: Score = (math.inf, math.inf)
"""The score of a trial that failed."""


def score(
    objective: Objective, value: float | None, metrics: Mapping[str, float]
) -> Score:
    """Return the score of a trial that did not fail."""
    far = math.inf
    goal = objective.goal
    if goal is not None:
        far = _smaller_is_better(goal.mode, metrics.get(goal.metric))
    near = _smaller_is_better(objective.direction, value)
    return near, far


def _smaller_is_better(mode: str, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value


def scores_of(
    objective: Objective, records: Iterable[TrialRecord]
) -> dict[str, Score]:
    """Return the scores of trials that have ended, by ID.

    A trial that a user has stopped is scored without an objective value.
    """
    found = {}
    for record in records:
        if record.purpose != "trial":
            continue
        found[record.id] = NO_SCORE
        value = value_of(objective.metric, record)
        if record.is_censored:
            value = None
        if record.finished:
            found[record.id] = score(objective, value, record.metrics)
    return found


def next_trials(
    config: SweepConfig, scores: Mapping[str, Score]
) -> list[Tree]:
    """Return the trials to run next; empty when the search is over.

    `scores` are those of the trials that have ended, by ID.

    `lr: around` searches the best rate for each combination of the space's
    other values. It starts with the run's own rate, which `lr_scaling` adapts
    to the batch size, and with half and twice that rate. As long as the best
    rate is the smallest or largest that was tried, the next rate beyond it
    follows, until the best one has worse neighbours on both sides, or is six
    doublings away.

    The start rates of all combinations come first, then their neighbours, so
    that beaten combinations show early.
    """
    others = dict(config.space)
    key = str(config.around)
    around = others.pop(key)
    assert isinstance(around, Range)
    found = []
    for combination in _combinations(others):
        trials = {}
        known = {}
        for step in _ALL_STEPS:
            trial = combination | {key: around.start * 2.0**step}
            trials[step] = trial
            name = trial_id(trial)
            if name in scores:
                known[step] = scores[name]
        for step in _next_steps(known):
            found.append((abs(step), trials[step]))
    found.sort(key=itemgetter(0))
    return [trial for _, trial in found]


def _combinations(space: Space) -> list[Tree]:
    """Return all combinations of a space's values, in order, each once."""
    lists = map(sample_values, space.values())
    found: dict[str, Tree] = {}
    for values in itertools.product(*lists):
        trial = dict(zip(space, values, strict=True))
        found.setdefault(trial_id(trial), trial)
    return list(found.values())


def _next_steps(scores: Mapping[int, Score]) -> list[int]:
    """Return the steps, in doublings of the rate, to try next for one combination."""
    missing = [step for step in _FIRST_STEPS if step not in scores]
    if missing:
        return missing
    best = min(scores, key=lambda step: (scores[step], abs(step)))
    # The neighbour on the side of the start has been tried.
    beyond = best + 1 if best > 0 else best - 1
    if beyond in scores or beyond not in _ALL_STEPS:
        return []
    return [beyond]


def is_inside(
    config: SweepConfig, records: Iterable[TrialRecord], trial: Tree
) -> bool:
    """Return whether both neighbours of a trial's rate have been tried."""
    tried = {record.id for record in records}
    key = str(config.around)
    rate = trial[key]
    neighbours = [{**trial, key: rate / 2}, {**trial, key: rate * 2.0}]
    return tried.issuperset(map(trial_id, neighbours))


def check_space(config: SweepConfig, train: Tree, source: str) -> None:
    """Check that each value of the space, and each trial of a grid, gives a valid run.

    Raises ConfigError if one does not, or if the search's package is not
    installed.
    """
    if config.search == "optuna":
        require_package("search", "optuna", source)
    for key, values in config.space.items():
        name = f"space.{key}"
        # Ray's OptunaSearch takes it for a path of keys.
        if "/" in key and config.search == "optuna":
            raise ConfigError(
                name,
                MISSING,
                "contains a `/`, which `search: optuna` does not allow",
                "rename the key, or set `search: random`",
                source,
            )
        for value in sample_values(values):
            refuse_changes(
                {name: json.loads(json.dumps(value))},
                {name: value},
                "the trials' records, where keys are text",
                "write its keys in quotes",
                source,
            )
            check_trial(train, {key: value}, source)
    for trial in grid(config):
        check_trial(train, trial, source)


def check_trial(train: Tree, trial: Tree, source: str) -> None:
    """Raise ConfigError if a trial sets a fixed key or does not give a valid run."""
    for key in trial:
        if key.partition(".")[0] in _FIXED:
            rule = "cannot vary inside a sweep"
            fix = "remove it, or run one sweep for each value"
            raise ConfigError(f"space.{key}", MISSING, rule, fix, source)
    try:
        build_run(trial_tree(train, trial), "space")
    except ConfigError as error:
        raise error_in_space(error, trial, source) from error


def error_in_space(
    error: ConfigError, trial: Tree, source: str
) -> ConfigError:
    """Return a run's error, with `space.` before its field if the trial sets that field.

    Otherwise the error's text is extended by the values of the trial.
    """
    field = error.field
    rule = error.rule
    own_keys = tuple(f"{key}." for key in trial)
    if f"{field}.".startswith(own_keys):
        field = f"space.{field}"
    else:
        pairs = [f"{key}: {value}" for key, value in trial.items()]
        rule = f"{rule} (in the trial {', '.join(pairs)})"
    return ConfigError(field, error.value, rule, error.fix, source)


def grid(config: SweepConfig) -> list[Tree]:
    """Return all combinations of a grid in order; empty for any other search."""
    if config.search != "grid":
        return []
    return _combinations(config.space)


def open_trials(config: SweepConfig, records: Records) -> list[Tree]:
    """Return a grid's trials without a record, or an `around` search's next trials."""
    ended = {record.id for record in records if record.purpose == "trial"}
    if config.around is None:
        planned = grid(config)[: config.budget.trials]
        return [trial for trial in planned if trial_id(trial) not in ended]
    num_left = MOST_TRIALS
    if config.budget.trials is not None:
        num_left = max(0, config.budget.trials - len(ended))
    scores = scores_of(config.objective, records)
    return next_trials(config, scores)[:num_left]


def trial_tree(train: Tree, trial: Tree) -> Tree:
    """Return a trial's whole configuration: the run's, with the trial's values.

    A training function's mapping `keys` translates the trial's names. The value
    of a section is set before the values of single keys in that section.
    """
    keys = train.get("keys") or {}
    values = {keys.get(key, key): value for key, value in trial.items()}
    return override(kind_of(train), train, dict(sorted(values.items())))


def known_space(space: Space, train: Tree, source: str) -> Space:
    """Return a space with our names for the keys of a function that `keys` lists.

    `around: run` becomes the run's own value.
    """
    keys = train.get("keys") or {}
    names = {path: name for name, path in keys.items()}
    for path, name in names.items():
        if path in space and name in space:
            rule = f"is the same key as `{name}` (by the function's `keys`), and the space has both"
            fix = "keep one of the two"
            raise ConfigError(f"space.{path}", MISSING, rule, fix, source)
    return {
        names.get(key, key): _from_run(key, values, train, source)
        for key, values in space.items()
    }


def _from_run(key: str, values: Values, train: Tree, source: str) -> Values:
    if isinstance(values, list) or values.around != "run":
        return values
    start = value_at(train, key)
    if (
        isinstance(start, bool)
        or not isinstance(start, int | float)
        or not start > 0
    ):
        rule = (
            "starts from the run's own value, which must be a number above 0"
        )
        fix = f"set `{key}` in `train`, or write `{{around: 0.003}}`"
        raise ConfigError(f"space.{key}", "around", rule, fix, source)
    return Range(around=float(start))


def value_at(tree: Tree, key: str) -> Any:
    """Return the value at a dotted key, or None if there is none."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, dict):
            return None
        node = node.get(part)
    return node


def planned_trials(config: SweepConfig) -> int:
    """Return how many trials the search makes."""
    if config.search == "grid":
        return len(grid(config)[: config.budget.trials])
    return config.budget.trials or 0


def unwrap(config: Tree) -> Tree:
    """Return the trial in Tune's configuration, stored whole or key by key."""
    return dict(config.get(WHOLE, config))
