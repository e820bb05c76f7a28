"""The search space: dotted TrainConfig paths, checked value by value, as Ray Tune wants them."""

from __future__ import annotations

import itertools
from typing import Any

from trainers.config import TrainConfig
from trainers.errors import MISSING, ConfigError
from trainers.settings import build, override
from tune.config import Range, SweepConfig


def check_space(config: SweepConfig, train: dict[str, Any], source: str) -> None:
    """Every value of the space must make a TrainConfig, alone and (for grids) in every combination."""
    for key, values in config.space.items():
        if key.split(".")[0] in ("scaling", "launcher", "name", "storage_path", "task_dir"):
            raise ConfigError(
                f"space.{key}",
                MISSING,
                "cannot vary inside a sweep: lanes are set up once",
                "set it under `train:` and run a sweep for each",
                source,
            )
        for value in _samples(values):
            _check(train, {key: value}, source)
    for trial in grid(config):
        _check(train, trial, source)


def _check(train: dict[str, Any], trial: dict[str, Any], source: str) -> None:
    try:
        trial_config(train, trial)
    except ConfigError as error:
        if not any(error.field == key or error.field.startswith(f"{key}.") for key in trial):
            keys = ", ".join(f"{key}: {value}" for key, value in trial.items())
            raise ConfigError(
                error.field, error.value, f"{error.rule} (in the trial {keys})", error.fix, source
            ) from error
        raise ConfigError(f"space.{error.field}", error.value, error.rule, error.fix, source) from error


def _samples(values: list[Any] | Range) -> list[Any]:
    if isinstance(values, list):
        return values
    return values.uniform or values.loguniform or values.choice or [values.min, values.max]


def grid(config: SweepConfig) -> list[dict[str, Any]]:
    """All combinations of the lists, in order; none for a random search."""
    if config.search != "grid":
        return []
    keys = list(config.space)
    return [dict(zip(keys, combination, strict=True)) for combination in itertools.product(*config.space.values())]


def trial_config(train: dict[str, Any], trial: dict[str, Any]) -> TrainConfig:
    """The TrainConfig of one trial."""
    return build(TrainConfig, override(TrainConfig, train, trial), "space")


def planned_trials(config: SweepConfig) -> int | None:
    """How many trials there will be, where that is known."""
    budget = config.budget.trials
    if config.search == "random":
        return budget
    combinations = len(grid(config))
    return min(combinations, budget or combinations)


def tune_space(config: SweepConfig) -> dict[str, Any]:
    """The same space as Ray Tune takes it: a grid as one list of whole trials, so that a budget can cut it."""
    from ray import tune

    if config.search == "grid":
        return {"trial": tune.grid_search(grid(config)[: planned_trials(config)])}
    space: dict[str, Any] = {}
    for key, values in config.space.items():
        if isinstance(values, list):
            space[key] = tune.choice(values)
        elif values.uniform:
            space[key] = tune.uniform(*values.uniform)
        elif values.loguniform:
            space[key] = tune.loguniform(*values.loguniform)
        elif values.choice:
            space[key] = tune.choice(values.choice)
        else:
            assert values.min is not None
            assert values.max is not None
            space[key] = tune.lograndint(values.min, values.max + 1)
    return space


def chosen(config: dict[str, Any]) -> dict[str, Any]:
    """The dotted keys and values of a configuration that Tune made from `tune_space`."""
    return dict(config.get("trial", config))
