"""The population of `scheduler: pbt`: its members, and the values that they may change to. Pure.

Jaderberg et al. 2017, Population Based Training of Neural Networks, arXiv 1711.09846. Ray Tune's
PopulationBasedTraining decides; it is told of a trial after each stage (sweep/population_trial.py). Only keys with
which a run may go on from its checkpoint change: the others a trial takes over with the weights.
"""

import math
import random
from typing import Any

from tune.config import Range, SweepConfig, may_change, sample_values
from tune.search.space import grid
from tune.trials.journal import trial_id


def population(config: SweepConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return each trial's id and first configuration: the grid, or drawn with the sweep's seed."""
    if config.search == "grid":
        trials = grid(config)[: config.budget.trials]
    else:
        draws = random.Random(config.seed)
        members = range(config.budget.trials or 1)
        trials = [{key: _draw(values, draws) for key, values in config.space.items()} for _ in members]
    # A draw may come twice: the number makes two trials of it.
    return [(trial_id({"member": number, **trial}), trial) for number, trial in enumerate(trials)]


def _draw(values: list[Any] | Range, draws: random.Random) -> Any:
    if isinstance(values, list) or values.choice:
        return draws.choice(sample_values(values))
    if values.uniform:
        return draws.uniform(*values.uniform)
    low, high = sample_values(values)
    if values.loguniform:
        return _clipped(math.exp(draws.uniform(math.log(low), math.log(high))), low, high)
    return _clipped(math.floor(math.exp(draws.uniform(math.log(low), math.log(high + 1)))), low, high)


def _clipped(value: Any, low: Any, high: Any) -> Any:
    return min(max(value, low), high)


def within(config: SweepConfig, trial: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration, with values that a factor has taken out of their range brought back to its end."""
    changed = dict(trial)
    for key, values in config.space.items():
        if isinstance(values, Range) and not values.choice and may_change(key):
            changed[key] = _clipped(trial[key], *sample_values(values))
    return changed
