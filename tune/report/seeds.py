"""Configurations that ran with several seeds: a seed is a repeat, never a choice. Pure.

Pure.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainers.measure.step_times import student_t
from tune.objective import MEASURED, Objective
from tune.search.finalists import LEVEL
from tune.trials.interval import Interval
from tune.trials.record import TrialRecord, trial_id


@dataclass(frozen=True)
class Configuration:
    """What its seeds say of a configuration."""

    record: TrialRecord
    """The run whose value is the median, without its seed."""
    runs: list[tuple[float, TrialRecord]]
    """Those with a value of the objective, best first."""
    mean: Interval
    """Of the objective, with the 95 % interval; the spread is pooled over all
    configurations.
    """
    num_missed: int
    """Seeds without a value: their runs failed, or did not reach the target."""
    is_equal: bool
    """Whether the best configuration's mean cannot be told apart from this one's."""


def without_seed(record: TrialRecord) -> TrialRecord:
    """Return a record as one of its configuration, whatever its seed."""
    return replace(
        record,
        config={key: value for key, value in record.config.items() if key != "seed"},
    )


def by_configuration(
    objective: Objective,
    ranked: Sequence[tuple[float, TrialRecord]],
    records: Sequence[TrialRecord],
) -> list[Configuration]:
    """Return the configurations, best mean first; those that miss a value come last.

    What a user has stopped tells nothing, nor does a second run of the very same.

    `ranked`: the records that have a value of the objective, best first. Each
    configuration is compared with the best by a t-test, at a level of 5 % over all
    pairs: the best is chosen by the same values (Bonferroni). Means of what is measured
    are geometric.
    """
    counted = _first_runs(records)
    tried = Counter(_key(record) for record in counted.values())
    groups: dict[str, list[tuple[float, TrialRecord]]] = {}
    for value, record in ranked:
        if record.id in counted:
            groups.setdefault(_key(record), []).append((value, record))
    if not groups:
        return []
    is_ratio = objective.metric in MEASURED and all(value > 0 for value, _ in ranked)
    scale, unscale = (math.log, math.exp) if is_ratio else (float, float)
    means = {}
    missed = {}
    squares = 0.0
    for key, runs in groups.items():
        values = [scale(value) for value, _ in runs]
        means[key] = statistics.fmean(values)
        missed[key] = tried[key] - len(runs)
        squares += sum((value - means[key]) ** 2 for value in values)
    sign = 1 if objective.direction == "min" else -1
    order = sorted(groups, key=lambda key: (missed[key] > 0, sign * means[key]))
    best = order[0]
    level = 1 - LEVEL / max(1, len(order) * (len(order) - 1))
    num_free = sum(len(runs) - 1 for runs in groups.values())
    found = []
    for key in order:
        runs = groups[key]
        half = 0.0
        is_equal = True
        if num_free:
            spread = math.sqrt(squares / num_free)
            half = student_t(num_free, 0.975) * spread / math.sqrt(len(runs))
            error = spread * math.sqrt(1 / len(runs) + 1 / len(groups[best]))
            gap = sign * (means[key] - means[best])
            is_close = gap <= student_t(num_free, level) * error
            is_equal = is_close and missed[key] == missed[best]
        low = unscale(means[key] - half)
        mean = Interval(unscale(means[key]), low, unscale(means[key] + half))
        _, median = runs[(len(runs) - 1) // 2]
        found.append(
            Configuration(without_seed(median), runs, mean, missed[key], is_equal)
        )
    return found


def _first_runs(records: Sequence[TrialRecord]) -> dict[str, TrialRecord]:
    """Return the records that count, by id: the first one of each trial."""
    first: dict[str, TrialRecord] = {}
    for record in records:
        if record.purpose != "repeat" and not record.is_censored:
            first.setdefault(trial_id(record.config), record)
    return {record.id: record for record in first.values()}


def _key(record: TrialRecord) -> str:
    return trial_id(without_seed(record).config)
