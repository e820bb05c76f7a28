"""Trials, values and figures in words: for sentences, tables and axes. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from trainers.errors import printable as printable
from tune.config import Objective, SweepConfig
from tune.trials.record import TrialRecord


def labels(config: SweepConfig, records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return the column names of dotted keys: the last part, or the whole key where that names something else too."""
    keys = dict.fromkeys([*config.space, *(key for record in records for key in record.config)])
    count = Counter(["id", "status", *metric_names(records), *(key.rpartition(".")[2] for key in keys)])
    return {key: printable(last if count[last := key.rpartition(".")[2]] == 1 else key) for key in keys}


def metric_names(records: Sequence[TrialRecord]) -> list[str]:
    """Return all metrics that were reported, in the order in which they first were."""
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def in_short(labels: Mapping[str, str], record: TrialRecord) -> str:
    """Return a trial by its values where they say enough: "64, bf16, lr 0.001"."""
    return ", ".join(
        ("" if "batch_size" in key or key == "precision" else f"{label} ") + shown(record.config.get(key))
        for key, label in labels.items()
    )


def in_full(labels: Mapping[str, str], record: TrialRecord) -> str:
    """Return a trial with the names of its values: "global_batch_size 64 with bf16 and lr 0.001"."""
    keys = sorted(labels, key=lambda key: "batch_size" not in key)
    first, *rest = (
        ("" if key == "precision" and key != keys[0] else f"{labels[key]} ") + shown(record.config.get(key))
        for key in keys
    )
    return f"{first} with {' and '.join(rest)}" if rest else first


def shown(value: Any) -> str:
    """Return a value of the configuration as YAML has it in one line, numbers to four digits."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(key)}: {shown(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value)) or "''"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value fits on an axis: a number that arithmetic does not take to infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def number(value: float, digits: int) -> str:
    """Round to a number of digits; thousands are set apart."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e15 else f"{rounded:g}"


def duration(time_s: float) -> str:
    """Return seconds, minutes or hours, to three digits."""
    size, unit = (1, "s") if time_s < 120 else (60, "min") if time_s < 7200 else (3600, "h")
    return f"{number(time_s / size, 3)} {unit}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the seconds of the unit that suits an axis up to `longest_s`, and its name."""
    return (1.0, "s") if longest_s < 300 else (60.0, "min") if longest_s < 3 * 3600 else (3600.0, "h")


def memory_unit(most_bytes: float) -> tuple[int, str]:
    """Return the bytes of the unit that suits amounts up to `most_bytes`, and its name."""
    return (2**30, "GiB") if most_bytes >= 2**30 else (2**20, "MiB")


def target(objective: Objective) -> str:
    """Return the objective's target: "val_accuracy 0.97"."""
    return " ".join(f"{name} {value:g}" for name, value in (objective.target or {}).items())


def amount(metric: str, value: float) -> str:
    """Return a value of the objective with its unit."""
    if metric == "time_to_target":
        return duration(value)
    if metric == "usd_to_target":
        return f"{number(value, 3)} USD"
    return f"{number(value, 3)} samples/s" if metric == "samples_per_s" else number(value, 4)
