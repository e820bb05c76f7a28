"""The search space: dotted TrainConfig paths, checked value by value, as Ray Tune wants them."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.errors import MISSING, ConfigError
from tune.config import BATCH_KEYS, Range, SweepConfig
from tune.trials.journal import TrialRecord
from tune.trials.microbatch_bounds import bisection_order
from tune.trials.stop_rule import Purpose


def check_space(config: SweepConfig, train: dict[str, Any], source: str) -> None:
    """Every value of the space must make a TrainConfig, alone and (for grids) in every combination; the search must
    be installed.
    """
    if config.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "search", "optuna", "the package optuna is not installed", "run `pip install 'paceline[optuna]'`", source
        )
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


def listed(values: list[Any] | Range) -> list[Any]:
    """A list's values, or those batch sizes of a range that the frontier's search may try."""
    if isinstance(values, list):
        return values
    from tune.search.frontier import grid_sizes

    assert values.min is not None
    assert values.max is not None
    return grid_sizes(values.min, values.max)


def _samples(values: list[Any] | Range) -> list[Any]:
    if isinstance(values, list):
        return values
    return values.uniform or values.loguniform or values.choice or [values.min, values.max]


def grid(config: SweepConfig) -> list[dict[str, Any]]:
    """All combinations of the lists, in order; none for any other search."""
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
    if config.search == "frontier":  # about: trials worth a third of the grid, and three probes of each setting
        whole = math.prod(len(listed(values)) for values in config.space.values())
        settings = whole // max(len(listed(config.space[key])) for key in BATCH_KEYS if key in config.space)
        likely = max(3, math.ceil(whole / 2)) + 3 * settings
        return min(budget or likely, likely)
    if config.search != "grid":
        return budget
    combinations = len(grid(config))
    return min(combinations, budget or combinations)


def in_probing_order(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same trials, fixed microbatches in the order in which the fewest of them run out of memory."""
    sizes = [trial.get("microbatch_size") for trial in trials]
    order = bisection_order(size for size in sizes if type(size) is int)
    place: dict[Any, int] = {size: index for index, size in enumerate(order)}
    return sorted(trials, key=lambda trial: place.get(trial.get("microbatch_size", "auto"), -1))


def tune_space(config: SweepConfig) -> dict[str, Any]:
    """The same space as Ray Tune takes it: a grid as one list of whole trials, so that a budget can cut it."""
    from ray import tune

    if config.search == "frontier":
        return {}
    if config.search == "grid":
        return {"trial": tune.grid_search(in_probing_order(grid(config)[: planned_trials(config)]))}
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


def num_samples(config: SweepConfig, before: int) -> int:
    """How many trials Tune asks the search for, `before` of which an earlier start has made; -1: until it ends."""
    if config.search == "grid" or config.scheduler == "pbt":
        return 1
    if config.search == "frontier" and config.budget.trials is None:
        return -1
    return max(0, (config.budget.trials or 1) - before)


def searcher(
    config: SweepConfig,
    lanes: int,
    before: Sequence[tuple[dict[str, Any], float]] = (),
    train: Mapping[str, Any] | None = None,
    records: Callable[[], list[TrialRecord]] = list,
) -> Any:
    """Who chooses the next trial, at most `lanes` at a time.

    `before` are the trials of an earlier start with their objectives (inf or -inf for those that have none): optuna
    goes on from them, frontier from the journal's `records`, the others choose the same again.
    """
    if config.search == "frontier":
        from ray.tune.search import ConcurrencyLimiter

        from tune.search.frontier_search import Frontier, frontier_searcher

        return ConcurrencyLimiter(frontier_searcher(Frontier(config, train or {}), records), max_concurrent=lanes)
    if config.search != "optuna":
        from ray.tune.search import BasicVariantGenerator

        # A population is trained side by side, a stage of each in turn on the lanes.
        at_a_time = max(lanes, planned_trials(config) or 1) if config.scheduler == "pbt" else lanes
        return BasicVariantGenerator(max_concurrent=at_a_time, random_state=config.seed)
    import optuna
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep has a line of its own for each trial
    search = OptunaSearch(
        metric="objective",
        mode=config.objective.direction,
        seed=config.seed + len(before),  # else a resumed search would draw its first random trials again
        points_to_evaluate=[trial for trial, _ in before],
        evaluated_rewards=[value for _, value in before] or None,
    )
    return ConcurrencyLimiter(search, max_concurrent=lanes)


def purpose_of(config: dict[str, Any]) -> Purpose:
    """What a configuration that Tune made is run for."""
    return config["purpose"] if "trial" in config and "purpose" in config else "trial"


def chosen(config: dict[str, Any]) -> dict[str, Any]:
    """The dotted keys and values of a configuration that Tune made from `tune_space`, or of a population's trial."""
    config = config.get("member", config)
    return dict(config.get("trial", config))
