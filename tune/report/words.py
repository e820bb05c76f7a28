"""Trials, values and figures as text, for sentences, tables and axes; no I/O."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeGuard

from trainers.config.function import BATCH_KEYS
from trainers.config.yaml import is_plain_text
from trainers.errors import printable as printable
from tune.config import Objective, SweepConfig
from tune.trials.record import Records, TrialRecord

_MOST_NAMES = 3


class Trials:
    """The trials of a sweep, and their names in texts."""

    def __init__(self, config: SweepConfig, records: Records) -> None:
        self.config = config
        self.objective = config.objective
        self.records = records

    @cached_property
    def labels(self) -> dict[str, str]:
        """The column names of dotted keys: the last part, if it is unambiguous."""
        keys = dict.fromkeys(self.config.space)
        for record in self.records:
            keys.update(dict.fromkeys(record.config))
        metrics = metric_names(self.records)
        taken = Counter(["id", "status", *metrics, *map(_last_part, keys)])
        found = {}
        for key in keys:
            is_clear = taken[_last_part(key)] == 1
            found[key] = printable(_last_part(key) if is_clear else key)
        return found

    @cached_property
    def telling(self) -> dict[str, str]:
        """The labels of the keys that vary between trials; of all keys if none does."""
        varied = {}
        for key, label in self.labels.items():
            values = {repr(record.config.get(key)) for record in self.records}
            if len(values) > 1:
                varied[key] = label
        return varied or self.labels

    def name(self, record: TrialRecord) -> str:
        """Name a trial by the keys that vary: "batch 64 in bf16, lr 0.001"."""
        return in_words(self.telling, record)


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def metric_names(records: Records) -> list[str]:
    """Return all reported metrics, in the order of their first report."""
    names: dict[str, None] = {}
    for record in records:
        names.update(dict.fromkeys(record.metrics))
    return list(names)


def in_words(labels: Mapping[str, str], record: TrialRecord) -> str:
    """Name a trial by its values of labelled keys: "batch 64 in bf16, lr 0.001"."""
    batch = ""
    precision = ""
    rest = []
    for key, label in labels.items():
        if key not in record.config:  # a clone has a key that this trial lacks
            continue
        value = shown(record.config[key])
        if key in BATCH_KEYS:
            batch = f"batch {value}" + " a worker" * (
                key != "global_batch_size"
            )
        elif key == "precision":
            precision = f"in {value}" if batch else value
        else:
            rest.append(f"{label} {value}")
    first = f"{batch} {precision}".strip()
    return ", ".join([first, *rest] if first else rest)


def capitalized(text: str) -> str:
    """Capitalize a text that begins with "batch"; keys and values stay as they are."""
    if text.startswith("batch "):
        return f"B{text[1:]}"
    return text


def listed(names: Sequence[str]) -> str:
    """Return at most three names, and how many more there are: "a, b, c and 2 more".

    Names with commas are separated by semicolons.
    """
    first = list(names[:_MOST_NAMES])
    last = f"{len(names) - _MOST_NAMES} more"
    if len(names) <= _MOST_NAMES:
        last = first.pop()
    if not first:
        return last
    if any("," in name for name in names):
        return "; ".join([*first, f"and {last}"])
    return f"{', '.join(first)} and {last}"


def in_a_line(config: Mapping[str, Any]) -> str:
    """Return a trial's configuration as one line, with the last part of each key."""
    parts = [
        f"{_last_part(key)} {shown(value)}" for key, value in config.items()
    ]
    return "  ".join(parts)


def newest(metrics: Mapping[str, float]) -> tuple[str, str]:
    """Return the step of a running trial's newest evaluation, and its figures."""
    figures = [
        f"{key} {value:.4g}"
        for key, value in metrics.items()
        if key.startswith(("val_", "train_l"))
    ]
    step = ""
    if "step" in metrics:
        step = f"{metrics['step']:.0f}"
    return step, "  ".join(figures)


def shown(value: Any) -> str:
    """Return a value as one line of YAML, with floats to four digits.

    Text that YAML would read as something else is in quotes.
    """
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        parts = [
            f"{shown(key)}: {shown(child)}" for key, child in value.items()
        ]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, float):
        text = f"{value:.4g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text
    text = printable(str(value))
    if isinstance(value, str) and not is_plain_text(value):
        return f"'{text}'"
    return text


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value can be drawn: a number below 1e100, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e100


def number(value: float, digits: int) -> str:
    """Format a number with `digits` significant digits; large ones as "12,345"."""
    rounded = float(f"{value:.{digits}g}")
    if 1000 <= abs(rounded) < 1e15:
        return f"{rounded:,.0f}"
    return f"{rounded:g}"


def duration(time_s: float) -> str:
    """Return a time in seconds, minutes or hours, to three digits."""
    size_s, unit = time_unit(time_s)
    return f"{number(time_s / size_s, 3)} {unit}"


def span(low_s: float | None, high_s: float) -> str:
    """Return a range of times: "2.9 to 3.1 s", "up to 3.1 s"; or just `high_s`."""
    last = duration(high_s)
    if low_s is None:
        return last
    if high_s == math.inf:
        return f"at least {duration(low_s)}"
    if low_s <= 0:
        return f"up to {last}"
    first = duration(low_s)
    if first == last:
        return last
    start, unit = first.split()
    if last.endswith(f" {unit}"):
        first = start
    return f"{first} to {last}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit that suits times up to `longest_s`: its seconds, and its name."""
    if longest_s < 120:
        return 1.0, "s"
    if longest_s < 7200:
        return 60.0, "min"
    return 3600.0, "h"


def memory_unit(most_bytes: float) -> tuple[int, str]:
    """Return the bytes of the unit that suits amounts up to `most_bytes`, and its name."""
    if most_bytes < 2**30:
        return 2**20, "MiB"
    return 2**30, "GiB"


def target(objective: Objective) -> str:
    """Return the objective's target: "val_accuracy 0.97"."""
    goal = objective.goal
    return f"{goal.metric} {goal.value:g}" if goal else ""


def amount(metric: str, value: float) -> str:
    """Return a value of the objective with its unit."""
    if metric == "time_to_target":
        return duration(value)
    if metric == "peak_memory_bytes":
        size, unit = memory_unit(value)
        return f"{number(value / size, 3)} {unit}"
    units = {"usd_to_target": "USD", "samples_per_s": "samples/s"}
    if metric in units:
        return f"{number(value, 3)} {units[metric]}"
    return number(value, 4)
