"""Trials, values and figures in words: for sentences, tables and axes. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from trainers.config.function import BATCH_KEYS
from trainers.errors import printable as printable
from tune.config import Objective, SweepConfig
from tune.trials.record import TrialRecord

_MOST_NAMES = 3


def labels(config: SweepConfig, records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return the column names of dotted keys: the last part where that is clear."""
    keys = dict.fromkeys(config.space)
    for record in records:
        keys.update(dict.fromkeys(record.config))
    taken = Counter(["id", "status", *metric_names(records), *map(_last_part, keys)])
    found = {}
    for key in keys:
        is_clear = taken[_last_part(key)] == 1
        found[key] = printable(_last_part(key) if is_clear else key)
    return found


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def telling(config: SweepConfig, records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return the labels of the keys that tell trials apart; of all where none does."""
    found = labels(config, records)
    varied = {
        key: label
        for key, label in found.items()
        if len({repr(record.config.get(key)) for record in records}) > 1
    }
    return varied or found


def metric_names(records: Sequence[TrialRecord]) -> list[str]:
    """Return all metrics that were reported, in the order in which they first were."""
    names: dict[str, None] = {}
    for record in records:
        names.update(dict.fromkeys(record.metrics))
    return list(names)


def in_words(labels: Mapping[str, str], record: TrialRecord) -> str:
    """Return a trial by the values of labelled keys: "batch 64 in bf16, lr 0.001"."""
    batch = ""
    precision = ""
    rest = []
    for key, label in labels.items():
        value = shown(record.config.get(key))
        if key in BATCH_KEYS:
            batch = f"batch {value}" + " a worker" * (key != "global_batch_size")
        elif key == "precision":
            precision = f"in {value}" if batch else value
        else:
            rest.append(f"{label} {value}")
    first = f"{batch} {precision}".strip()
    return ", ".join([first, *rest] if first else rest)


def capitalized(text: str) -> str:
    """Return a sentence with a capital letter, unless it begins with a key or a value."""
    return text[0].upper() + text[1:] if text.startswith("batch ") else text


def listed(names: Sequence[str]) -> str:
    """Return at most three names, and how many more there are: "a, b, c and 2 more"."""
    rest = len(names) - _MOST_NAMES
    if rest > 0:
        return f"{', '.join(names[:_MOST_NAMES])} and {rest} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def in_a_line(config: Mapping[str, Any]) -> str:
    """Return a trial's configuration by the last parts of its keys."""
    return "  ".join(
        f"{_last_part(key)} {shown(value)}" for key, value in config.items()
    )


def newest(metrics: Mapping[str, float]) -> tuple[str, str]:
    """Return the step of a running trial's newest evaluation, and its figures."""
    figures = [
        f"{key} {value:.4g}"
        for key, value in metrics.items()
        if key.startswith(("val_", "train_l"))
    ]
    step = f"{metrics['step']:.0f}" if "step" in metrics else ""
    return step, "  ".join(figures)


def shown(value: Any) -> str:
    """Return a value as YAML has it in one line, numbers to four digits."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{shown(key)}: {shown(child)}" for key, child in value.items())
            + "}"
        )
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value)) or "''"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value fits on an axis: a number that arithmetic keeps finite."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e100
    )


def number(value: float, digits: int) -> str:
    """Round to a number of digits; thousands are set apart."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e15 else f"{rounded:g}"


def duration(time_s: float) -> str:
    """Return seconds, minutes or hours, to three digits."""
    size_s, unit = time_unit(time_s)
    return f"{number(time_s / size_s, 3)} {unit}"


def span(low_s: float | None, high_s: float) -> str:
    """Return a time between two: "2.9 to 3.1 s", "up to 3.1 s"; no `low_s`: the second."""
    last = duration(high_s)
    if low_s is None:
        return last
    if low_s <= 0:
        return f"up to {last}"
    first = duration(low_s)
    if first == last:
        return last
    start, unit = first.split()
    return f"{start if last.endswith(f' {unit}') else first} to {last}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit that suits times up to `longest_s`: its seconds and name."""
    if longest_s < 120:
        return 1.0, "s"
    if longest_s < 7200:
        return 60.0, "min"
    return 3600.0, "h"


def memory_unit(most_bytes: float) -> tuple[int, str]:
    """Return the bytes of the unit that suits amounts up to `most_bytes`, and its name."""
    return (2**30, "GiB") if most_bytes >= 2**30 else (2**20, "MiB")


def target(objective: Objective) -> str:
    """Return the objective's target: "val_accuracy 0.97"."""
    goal = objective.goal
    return f"{goal.metric} {goal.value:g}" if goal else ""


def amount(metric: str, value: float) -> str:
    """Return a value of the objective with its unit."""
    if metric == "time_to_target":
        return duration(value)
    if metric == "usd_to_target":
        return f"{number(value, 3)} USD"
    if metric == "peak_memory_bytes":
        size, unit = memory_unit(value)
        return f"{number(value / size, 3)} {unit}"
    if metric == "energy_j":
        return _energy(value)
    if metric == "samples_per_s":
        return f"{number(value, 3)} samples/s"
    return number(value, 4)


def _energy(value_j: float) -> str:
    if value_j < 1e3:
        return f"{number(value_j, 3)} J"
    if value_j < 3.6e6:
        return f"{number(value_j / 1e3, 3)} kJ"
    return f"{number(value_j / 3.6e6, 3)} kWh"
