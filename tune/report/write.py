"""What a sweep leaves: results.parquet, best.yaml, summary.json and report.html."""

import json
import math
import shlex
from collections import Counter
from importlib import resources
from typing import Any

import pyarrow as pa
from jinja2 import Environment, StrictUndefined
from pyarrow import parquet

from trainers.config.function import build_run
from trainers.config.yaml import dump_yaml
from trainers.errors import STATUSES
from trainers.redaction import escape_controls, redact
from trainers.storage import Storage
from tune.config import SweepConfig, sample_values
from tune.report.answer import Answer, answer, objective_value
from tune.report.figures import figures
from tune.report.table import columns, in_order
from tune.report.words import duration, labels, metric_names, printable, shown
from tune.search.space import trial_tree
from tune.trials.record import TrialRecord


def write_report(
    sweep: Storage,
    config: SweepConfig,
    train: dict[str, Any],
    records: list[TrialRecord],
    environment: dict[str, str],
    *,
    task_dir: str | None,
) -> Answer:
    """Write results.parquet, best.yaml, summary.json and report.html into the sweep's storage.

    `train` is the sweep's mapping of the run, `environment` the names and versions to show. Without a best
    trial there is no best.yaml: one that an earlier report left is deleted.
    """
    found, command = answer(config, records, train), f"python -m trainers {shlex.quote(sweep.locate('best.yaml'))}"
    sweep.write("results.parquet", to_parquet(config, records))
    if found.best:
        tree = trial_tree(train, found.best.config)
        tree |= {"name": f"{config.name}-best", "storage_path": sweep.parent.uri}
        tree |= {"task_dir": task_dir} if task_dir is not None else {}
        resolved = build_run(tree, "best.yaml").tree()
        sweep.write("best.yaml", (_header(command, config, found.best) + dump_yaml(tree)).encode())
    else:
        resolved = train
        sweep.delete("best.yaml")
    summary = _summary(config, records, environment, found)
    sweep.write("summary.json", (json.dumps(_strict(summary), indent=2, allow_nan=False) + "\n").encode())
    text = resources.files("tune.report").joinpath("report.html").read_text(encoding="utf-8")
    # Everything in the page but the figures' markup is escaped.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    html = page.from_string(text).render(
        best=found.best,
        columns=columns(config, records),
        command=command,
        figures=figures(config, records, found.best, train),
        reasons=found.reasons,
        records=in_order(config, records),
        summary=summary,
        times=[duration(summary["wall_time_s"]), duration(summary["trial_time_s"])],
        train=redact(dump_yaml(resolved)),
        verdict=found.verdict,
    )
    sweep.write("report.html", escape_controls(html).encode())
    return found


def _header(command: str, config: SweepConfig, best: TrialRecord) -> str:
    """Return the comment that best.yaml begins with."""
    figure = f"{config.objective.metric} {objective_value(config.objective, best):.6g}"
    lines = [f"The best trial of the sweep {config.name}: {best.id}, {figure}.", f"Run as: {command}"]
    if len(best.schedule) > 1:
        lines.append("The values are its last ones. Its weights had the course below, which this run does not have:")
        for part in best.schedule:
            values = ", ".join(f"{key}: {shown(value)}" for key, value in part["config"].items())
            lines.append(f"  from epoch {part['epoch']:g} in trial {part['trial']}: {values}")
    return "".join(f"# {printable(line)}\n" for line in lines)


def _strict(value: Any) -> Any:
    """Return plain data as strict JSON can hold it: numbers that are not finite as text."""
    if isinstance(value, dict):
        return {key: _strict(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_strict(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _summary(
    config: SweepConfig, records: list[TrialRecord], environment: dict[str, str], found: Answer
) -> dict[str, Any]:
    counts = Counter(record.status for record in records)
    best = found.best
    value = objective_value(config.objective, best) if best else None
    first = min((record.start_time for record in records), default=0.0)
    last = max((record.end_time for record in records), default=0.0)
    return {
        "name": config.name,
        "sentence": found.sentence,
        "objective": config.objective.model_dump(exclude_none=True) | {"mode": config.objective.direction},
        "best": {"id": best.id, "config": best.config, "value": value} if best else None,
        "finalists": [
            {
                "id": final.record.id,
                "config": final.record.config,
                "time_s": [final.time_s.low, final.time_s.value, final.time_s.high],
                "samples_per_s": final.samples_per_s,
                "repeats": final.repeats,
                "equal_to_best": final.equal,
            }
            for final in found.finals
        ],
        "search_ended": found.ended,
        "trials": len(records),
        "status": {status: counts[status] for status in STATUSES if counts[status]},
        "wall_time_s": round(last - first, 3),
        "trial_time_s": round(sum(record.end_time - record.start_time for record in records), 3),
        "environment": environment,
    }


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
    columns["schedule"] = pa.array([json.dumps(r.schedule) if r.schedule else None for r in records], pa.string())
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
