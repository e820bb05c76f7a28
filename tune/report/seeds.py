"""Configurations that ran with several seeds: a seed is a repeat, never a choice. Pure.

Pure.
"""

import math
import statistics
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
    pairs: the best is chosen by the same values (Bonferroni).
    """
    searched = [
        record
        for record in reversed(records)
        if record.purpose != "repeat" and not record.is_censored
    ]
    first = {trial_id(record.config): record for record in searched}.values()
    ids = {record.id for record in first}
    ranked = [(value, record) for value, record in ranked if record.id in ids]
    groups: dict[str, list[tuple[float, TrialRecord]]] = {}
    for value, record in ranked:
        groups.setdefault(_key(record), []).append((value, record))
    is_ratio = objective.metric in MEASURED and all(
        value > 0 for value, _ in ranked
    )  # means are geometric
    samples = {
        key: [math.log(value) if is_ratio else value for value, _ in runs]
        for key, runs in groups.items()
    }
    freedom = len(ranked) - len(groups)
    squares = sum(
        statistics.variance(own) * (len(own) - 1)
        for own in samples.values()
        if len(own) > 1
    )
    spread = math.sqrt(squares / freedom) if freedom else 0.0
    tried = {key: sum(_key(record) == key for record in first) for key in groups}
    missed = {key: tried[key] - len(runs) for key, runs in groups.items()}
    means = {key: statistics.fmean(own) for key, own in samples.items()}
    sign = 1 if objective.direction == "min" else -1
    order = sorted(groups, key=lambda key: (missed[key] > 0, sign * means[key]))
    found = []
    for key in order:
        runs = groups[key]
        half = (
            student_t(freedom, 0.975) * spread / math.sqrt(len(runs))
            if freedom
            else 0.0
        )
        ends = [means[key], means[key] - half, means[key] + half]
        mean = Interval(*(map(math.exp, ends) if is_ratio else ends))
        _, median = runs[(len(runs) - 1) // 2]
        gap = sign * (means[key] - means[order[0]])
        level = 1 - LEVEL / max(1, len(order) * (len(order) - 1))
        error = spread * math.sqrt(1 / len(runs) + 1 / len(groups[order[0]]))
        is_equal = not freedom or (
            gap <= student_t(freedom, level) * error and missed[key] == missed[order[0]]
        )
        found.append(
            Configuration(without_seed(median), runs, mean, missed[key], is_equal)
        )
    return found


def _key(record: TrialRecord) -> str:
    return trial_id(without_seed(record).config)
