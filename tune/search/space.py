"""The search space: dotted keys of a run and their values, and trials. Pure.

Pure.
"""

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.config.function import build_run, kind_of
from trainers.config.model import Tree
from trainers.config.overrides import override
from trainers.errors import MISSING, ConfigError
from tune.config import MOST_TRIALS, Range, SweepConfig, sample_values
from tune.search.around import next_trials, scores_of
from tune.trials.record import TrialRecord, trial_id

WHOLE = "whole_trial"
"""The one key of Tune's configuration of a trial that was not drawn key by key."""


_FIXED = ("scaling", "launcher", "name", "storage_path", "task_dir", "keys")
"""Keys of a run that are the same for all trials."""


def check_space(config: SweepConfig, train: dict[str, Any], source: str) -> None:
    """Check that every value of the space, and every trial of a grid, makes a run.

    Raises ConfigError for one that does not, and where the search is not installed.
    """
    if config.search == "optuna" and importlib.util.find_spec("optuna") is None:
        fix = "run `pip install 'paceline[optuna]'`"
        raise ConfigError(
            "search", "optuna", "the package optuna is not installed", fix, source
        )
    for key, values in config.space.items():
        for value in sample_values(values):
            check_trial(train, {key: value}, source)
    for trial in grid(config):
        check_trial(train, trial, source)


def check_trial(train: dict[str, Any], trial: dict[str, Any], source: str) -> None:
    """Raise ConfigError for what is no trial of a run."""
    for key in trial:
        if key.partition(".")[0] in _FIXED:
            rule = "cannot vary inside a sweep: lanes are set up once"
            fix = "set it under `train:` and run a sweep for each"
            raise ConfigError(f"space.{key}", MISSING, rule, fix, source)
    try:
        build_run(trial_tree(train, trial), "space")
    except ConfigError as error:
        field = error.field
        rule = error.rule
        if any(f"{field}.".startswith(f"{key}.") for key in trial):
            field = f"space.{field}"
        else:
            keys = ", ".join(f"{key}: {value}" for key, value in trial.items())
            rule = f"{rule} (in the trial {keys})"
        raise ConfigError(field, error.value, rule, error.fix, source) from error


def grid(config: SweepConfig) -> list[dict[str, Any]]:
    """Return all combinations of a grid's lists, in order; none for any other search."""
    if config.search != "grid":
        return []
    lists = map(sample_values, config.space.values())
    return [
        dict(zip(config.space, values, strict=True))
        for values in itertools.product(*lists)
    ]


def open_trials(
    config: SweepConfig, records: Sequence[TrialRecord]
) -> list[dict[str, Any]]:
    """Return a grid's trials without a record; of `around` those known to be needed."""
    ended = {record.id for record in records if record.purpose == "trial"}
    if config.around is None:
        return [
            trial
            for trial in grid(config)[: config.budget.trials]
            if trial_id(trial) not in ended
        ]
    num_left = MOST_TRIALS
    if config.budget.trials is not None:
        num_left = max(0, config.budget.trials - len(ended))
    return next_trials(config, scores_of(config.objective, records))[:num_left]


def trial_tree(train: Tree, trial: Mapping[str, Any]) -> Tree:
    """Return the configuration of one trial; a function's `keys` say where values land."""
    keys = train.get("keys") or {}
    values = {keys.get(key, key): value for key, value in trial.items()}
    return override(kind_of(train), train, values)


def known_space(
    space: Mapping[str, list[Any] | Range], train: Tree, source: str
) -> dict[str, list[Any] | Range]:
    """Return a space by the names of a function's `keys`, with the run's own `around`."""
    names = {path: name for name, path in (train.get("keys") or {}).items()}
    for path, name in names.items():
        if path in space and name in space:
            rule = f"is {name}, which is there too"
            fix = "keep one of the two"
            raise ConfigError(f"space.{path}", MISSING, rule, fix, source)
    return {
        names.get(key, key): _from_run(key, values, train, source)
        for key, values in space.items()
    }


def _from_run(
    key: str, values: list[Any] | Range, train: Tree, source: str
) -> list[Any] | Range:
    if isinstance(values, list) or values.around != "run":
        return values
    start = value_at(train, key)
    if isinstance(start, bool) or not isinstance(start, int | float) or not start > 0:
        rule = "begins with the run's own value, which is no number above 0"
        raise ConfigError(
            f"space.{key}", "around", rule, f"give `{key}` below `train`", source
        )
    return Range(around=float(start))


def value_at(tree: Tree, key: str) -> Any:
    """Return what stands at a dotted key; None where nothing does."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def planned_trials(config: SweepConfig) -> int:
    """Return how many trials the search makes."""
    budget = config.budget.trials
    return len(grid(config)[:budget]) if config.search == "grid" else budget or 0


def unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trial that Tune's configuration holds, whole or key by key."""
    return dict(config.get(WHOLE, config))
