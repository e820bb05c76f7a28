"""Several objectives in words: the front of a sweep in a sentence, and as the page lets its reader weigh it."""

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tune.config import SweepConfig
from tune.objective import Objective
from tune.report.words import amount, in_full, in_short, metric_words, telling
from tune.search.front import Member, score
from tune.trials.interval import EQUAL, Interval
from tune.trials.record import TrialRecord


def front_words(config: SweepConfig, records: Sequence[TrialRecord], members: Sequence[Member]) -> tuple[str, str]:
    """Return the best of the front and how many trials that has, and then who else is first in a metric."""
    objective, names = config.objective, telling(config, records)
    own = [member for member in members if member.is_on_front]
    best, num_trials = chosen(objective, own), sum(record.purpose != "repeat" for record in records)
    by = f"the weights {_weights(objective)}" if objective.weights else metric_words(objective.metric)
    what = _joined([metric_words(metric) for metric in objective.decisive])
    verdict = f"{in_full(names, best.record)} is the best of the front by {by}: {_figures(best)}. "
    if len(own) == 1:
        verdict += f"No other of {num_trials} trials is better by more than {EQUAL:.0%} in any of {what}."
    else:
        verdict += f"{len(own)} of {num_trials} trials are on it: no other beats one of them in all of {what}."
    firsts: dict[str, list[str]] = {}
    for at, metric in enumerate(objective.decisive):
        first = min(own, key=lambda member: member.steps[at])
        if first.steps[at] < best.steps[at]:
            extreme = "lowest" if objective.sign(metric) > 0 else "highest"
            who = f"has {in_short(names, first.record)}: {_figures(first)}."
            firsts.setdefault(who, []).append(f"{extreme} {metric_words(metric)}")
    said = [f"The {_joined(metrics)} {who}" for who, metrics in firsts.items()]
    if open_ones := len(members) - len(own):
        said.append(f"{open_ones} more may be on it: one run each cannot exclude {'it' if open_ones == 1 else 'them'}.")
    return verdict, " ".join(said)


def chosen(objective: Objective, members: Sequence[Member]) -> Member:
    """Return the trial of the front that the weights, or the first metric, make the best."""
    return min((one for one in members if one.is_on_front), key=lambda member: score(objective, member))


def chance(member: Member) -> str:
    """Return a trial's place on the front as the table has it: "yes, 93 %"."""
    return f"{'yes' if member.is_on_front else 'perhaps'}, {member.chance:.0%}"


def weighing(config: SweepConfig, records: Sequence[TrialRecord], members: Sequence[Member], command: str) -> Any:
    """Return what the page needs to weigh the front: its metrics with their weights, and a row a trial."""
    objective, names = config.objective, telling(config, records)
    weights = objective.weights or {objective.metric: 1.0}
    rows = [
        {
            "name": in_short(names, member.record),
            "cells": [_span(metric, value) for metric, value in member.values.items()],
            "chance": chance(member),
            "steps": json.dumps([round(one, 4) for one in member.steps]),
            "front": member.is_on_front,
            "command": f"{command} {_overrides(member.record.config)}",
        }
        for member in sorted(members, key=lambda one: (not one.is_on_front, score(objective, one)))
    ]
    most = max(weights.values())
    metrics = [(metric_words(metric), round(10 * weights.get(metric, 0.0) / most, 1)) for metric in objective.decisive]
    return {"metrics": metrics, "rows": rows} if rows else None


def script_hash(script: str) -> str:
    """Return a script's name in a Content-Security-Policy, which lets that one run and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _overrides(trial: Mapping[str, Any]) -> str:
    return " ".join(
        f"--{key} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}" for key, value in trial.items()
    )


def _figures(member: Member) -> str:
    return ", ".join(_with_unit(metric, value.value) for metric, value in member.values.items())


def _with_unit(metric: str, value: float) -> str:
    """Return a figure that says what it is."""
    text = amount(metric, value)
    return text if " " in text else f"{metric_words(metric)} {text}"


def _span(metric: str, value: Interval) -> str:
    """Return a figure with its 95 % interval, where it has one."""
    if value.low == value.high:
        return amount(metric, value.value)
    return f"{amount(metric, value.value)} ({amount(metric, value.low)} to {amount(metric, value.high)})"


def _weights(objective: Objective) -> str:
    return ", ".join(f"{metric} {weight:g}" for metric, weight in (objective.weights or {}).items())


def _joined(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
