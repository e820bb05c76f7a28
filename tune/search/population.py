"""The population of `scheduler: pbt`: who is in it, and how its values change.

Jaderberg et al. 2017, Population Based Training of Neural Networks, arXiv 1711.09846. Ray Tune's
PopulationBasedTraining decides; it is told of a trial after each stage (population_trial.py). Only keys with which
a run may go on from its checkpoint change: the others a trial takes over with the weights.
"""

from __future__ import annotations

import math
import random
from typing import Any

from tune.config import Range, SweepConfig, may_change
from tune.search.space import grid, planned_trials
from tune.trials.journal import Journal, trial_id


def population(config: SweepConfig) -> list[tuple[str, dict[str, Any]]]:
    """Each trial's id and the configuration that it begins with: the grid, or drawn with the sweep's seed."""
    if config.search == "grid":
        trials = grid(config)[: planned_trials(config)]
    else:
        draws = random.Random(config.seed)
        members = range(config.budget.trials or 1)
        trials = [{key: _draw(values, draws) for key, values in config.space.items()} for _ in members]
    # A draw may come twice: the number makes two trials of it.
    return [(trial_id({"member": number, **trial}), trial) for number, trial in enumerate(trials)]


def _draw(values: list[Any] | Range, draws: random.Random) -> Any:
    if isinstance(values, list) or values.choice:
        return draws.choice(values if isinstance(values, list) else values.choice or [])
    if values.uniform:
        return draws.uniform(*values.uniform)
    if values.loguniform:
        low, high = values.loguniform
        return _clipped(math.exp(draws.uniform(math.log(low), math.log(high))), low, high)
    assert values.min is not None
    assert values.max is not None
    drawn = math.exp(draws.uniform(math.log(values.min), math.log(values.max + 1)))
    return _clipped(math.floor(drawn), values.min, values.max)


def _clipped(value: Any, low: Any, high: Any) -> Any:
    return min(max(value, low), high)


def within(config: SweepConfig, trial: dict[str, Any]) -> dict[str, Any]:
    """A configuration with each value that a factor has taken out of its range brought back to the range's end."""
    changed = dict(trial)
    for key, values in config.space.items():
        bounds = (values.uniform or values.loguniform) if isinstance(values, Range) else None
        if bounds and may_change(key):
            changed[key] = _clipped(trial[key], *bounds)
    return changed


def population_space(config: SweepConfig, journal: Journal) -> dict[str, Any]:
    """The population as Ray Tune takes it, each trial with the values that it had last (a resumed sweep)."""
    from ray import tune

    members = []
    for name, first in population(config):
        stage = journal.newest_stage(name)
        members.append({"id": name, "trial": first if stage is None else stage.config})
    return {"member": tune.grid_search(members)}


def member_name(trial: Any) -> str:
    """Our id of one of Tune's trials when it is made; Tune keeps it through every change of the configuration."""
    return str(trial.config["member"]["id"])


def population_scheduler(config: SweepConfig) -> Any:
    """Ray Tune's PopulationBasedTraining: each of its iterations is a stage."""
    from ray.tune.schedulers import PopulationBasedTraining

    def explored(tune_config: dict[str, Any]) -> dict[str, Any]:
        member = tune_config["member"]
        return {**tune_config, "member": {**member, "trial": within(config, member["trial"])}}

    return PopulationBasedTraining(
        time_attr="training_iteration",
        metric="objective",
        mode=config.objective.direction,
        perturbation_interval=1,
        hyperparam_mutations={"member": {"trial": _mutations(config)}},
        quantile_fraction=config.pbt.quantile_fraction,
        resample_probability=config.pbt.resample_probability,
        custom_explore_fn=explored,
        log_config=False,  # the journal does
    )


def _mutations(config: SweepConfig) -> dict[str, Any]:
    """What Ray draws new values from, or changes by a factor; of a list it takes the neighbour."""
    from ray import tune

    mutations: dict[str, Any] = {}
    for key, values in config.space.items():
        if not may_change(key):
            continue
        if isinstance(values, list):
            mutations[key] = values
        elif values.uniform:
            mutations[key] = tune.uniform(*values.uniform)
        elif values.loguniform:
            mutations[key] = tune.loguniform(*values.loguniform)
        else:
            mutations[key] = values.choice
    return mutations
