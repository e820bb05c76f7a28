"""results.parquet: a row a trial, a column a setting, figure or metric."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tune.config import SweepConfig, sample_values
from tune.report.words import labels, metric_names
from tune.trials.record import TrialRecord


def to_parquet(config: SweepConfig, records: list[TrialRecord]) -> bytes:
    """Return a row a trial, in the order given; a column's type does not depend on which trials have run."""
    columns: dict[str, Any] = {}

    def add(kind: Any, *names: str) -> None:
        for name in names:
            columns[name] = pa.array([getattr(record, name) for record in records], kind)

    add(pa.string(), "id", "status")
    for key in labels(config, records):
        columns[key] = _config_column(config, key, [record.config.get(key) for record in records])
    add(pa.float64(), "samples_per_s", "step_time_s", "time_to_target_s")
    add(pa.int64(), "peak_memory_bytes", "lane", "seed")
    add(pa.string(), "purpose", "exploited_from")
    add(pa.float64(), "step_time_ci95_s", "samples", "epochs", "cpu_pressure")
    for name, figure in (("noise_scale", "value"), ("noise_scale_low", "low"), ("noise_scale_high", "high")):
        columns[name] = pa.array([_noise(record, figure) for record in records], pa.float64())
    schedules = [json.dumps(record.schedule) if record.schedule else None for record in records]
    columns["schedule"] = pa.array(schedules, pa.string())
    columns["message"] = pa.array([_encodable(record.message) for record in records], pa.string())
    for name in ("start_time", "end_time"):
        times = [round(getattr(record, name) * 1e6) for record in records]
        columns[name] = pa.array(times, pa.timestamp("us", tz="UTC"))
    for name in metric_names(records):
        values = [record.metrics.get(name) for record in records]
        column = _encodable(name)
        while column in columns:
            column = f"metrics.{column}"
        columns[column] = pa.array([None if value is None else float(value) for value in values], pa.float64())
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def _noise(record: TrialRecord, figure: str) -> float | None:
    """Return a figure of the gradient noise scale; None where it was not measured."""
    if record.noise_scale is None:
        return None
    value = record.noise_scale[figure]
    return math.inf if value is None else value


def _config_column(config: SweepConfig, key: str, values: list[Any]) -> Any:
    """Return one key's values as an array, typed by all that the space may give it."""
    possible = [value for value in [*values, *sample_values(config.space.get(key, []))] if value is not None]
    kinds = {type(value) for value in possible}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds and kinds <= {int, float} and all(-(2**63) <= value < 2**63 for value in possible if type(value) is int):
        if kinds == {int}:
            return pa.array(values, pa.int64())
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array([None if text is None else _encodable(text) for text in texts], pa.string())


def _encodable(text: str) -> str:
    """Return text without lone surrogates, which stand for the bytes of file names that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
