"""Write a sweep's results: results.parquet, best.yaml, summary.json, report.html."""

import base64
import hashlib
import json
import logging
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import resources
from typing import Any

import pyarrow as pa
from jinja2 import Environment, FunctionLoader, StrictUndefined
from pyarrow import parquet

from trainers.config.model import Tree
from trainers.config.yaml import dump_yaml
from trainers.errors import STATUSES, CheckpointError, escape_controls, redact
from trainers.output import as_data
from trainers.storage import Storage, validated
from tune.config import SweepConfig, sample_values
from tune.report._figures import figures
from tune.report.answer import Answer, answer
from tune.report.table import best_first, columns, constant
from tune.report.words import Trials, duration, metric_names, printable, target
from tune.search.space import trial_tree
from tune.trials.record import Records, TrialRecord

logger = logging.getLogger(__name__)

_MOST_DRAWN = 300
_FIXED = {
    "id status": pa.string(),
    "samples_per_s step_time_s time_to_target_s time_to_target_low_s": pa.float64(),
    "peak_memory_bytes lane seed": pa.int64(),
    "step_time_ci95_s samples epochs cpu_pressure disturbed_s": pa.float64(),
    "starting_s training_s on_lane_s": pa.float64(),
    "purpose message": pa.string(),
    "start_time end_time": pa.timestamp("us", tz="UTC"),
}
"""The columns that the results of every sweep have: their types, by their names."""


def source(name: str) -> str:
    """Return the text of a file in this folder."""
    return (
        resources.files("tune.report")
        .joinpath(name)
        .read_text(encoding="utf-8")
    )


def render(template: str, **shown: Any) -> str:
    """Render a template; all values are escaped, except the figures and the script."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(source),
    )
    page = environment.get_template(template).render(**shown)
    return escape_controls(page)


def best_command(sweep: Storage) -> str:
    """Return the command that trains with the best configuration."""
    return f"python -m trainers {shlex.quote(sweep.locate('best.yaml'))}"


def contents(
    sweep: Storage,
    config: SweepConfig,
    train: Tree,
    records: Records,
    environment: Mapping[str, str],
    found: Answer,
) -> Tree:
    """Return the variables of the template report.html for a sweep.

    `train` is the configuration of the run that trials vary.
    """
    tree = train
    if found.best is not None:
        tree = trial_tree(train, found.best.config)
    script = source("table.js")
    digest = hashlib.sha256(script.encode()).digest()
    shown = columns(config, records)
    same = constant(config, records, shown)
    beaten = {record.id for record in found.ranking[_MOST_DRAWN:]}
    drawn = [record for record in records if record.id not in beaten]
    said = []
    for column in same:
        cell = column.cells[records[0].id]
        if cell != "-":
            said.append(f"{column.header} {cell}")
    return {
        "best": found.best,
        "script": script,
        # The script's name in the page's Content-Security-Policy.
        "script_hash": f"sha256-{base64.b64encode(digest).decode()}",
        "columns": [column for column in shown if column not in same],
        "command": best_command(sweep),
        "figures": figures(config, drawn, found.best),
        "left_out": len(records) - len(drawn),
        "answer": found,
        "records": best_first(records, found),
        "same": ", ".join(said),
        "summary": summary(config, records, environment, found),
        "train": redact(dump_yaml(tree)),
        "live": None,
        "duration": duration,
    }


def summary(
    config: SweepConfig,
    records: Records,
    environment: Mapping[str, str],
    found: Answer,
) -> Tree:
    """Return the content of summary.json; its numbers may still be NaN or infinite."""
    counts = Counter(record.status for record in records)
    objective = config.objective.model_dump(exclude_none=True)
    spent = [record.spent for record in records if record.spent is not None]
    totals: dict[str, float | None] = {"starting_s": None, "training_s": None}
    if spent:
        for name in totals:
            times = [getattr(part, name) for part in spent]
            totals[name] = round(sum(times), 3)
    starts = [record.start_time for record in records]
    ends = [record.end_time for record in records]
    wall_s = max(ends, default=0.0) - min(starts, default=0.0)
    best = None
    if found.best is not None:
        best = {
            "id": found.best.id,
            "config": found.best.config,
            "value": found.value,
        }
        if found.best.missed_target_s is not None:
            best["time_to_target_low_s"] = found.best.missed_target_s
    return {
        "name": config.name,
        "answer": found.line,
        "throughput": found.fastest,
        "largest_batch": found.largest,
        "doubts": [asdict(doubt) for doubt in found.doubts],
        "objective": objective | {"mode": config.objective.direction},
        "best": best,
        "finalists": [
            {
                "id": final.record.id,
                "config": final.record.config,
                "time_s": [
                    final.time_s.low,
                    final.time_s.value,
                    final.time_s.high,
                ],
                "samples_per_s": final.samples_per_s,
                "repeats": final.repeats,
                "missed": final.num_missed,
                "equal_to_best": final.equal,
            }
            for final in found.finals
        ],
        "others_times_as_fast_at_most": found.most_ahead,
        "trials": len(records),
        "status": {
            status: counts[status] for status in STATUSES if counts[status]
        },
        "wall_time_s": round(wall_s, 3),
        "trial_time_s": round(sum(record.on_lane_s for record in records), 3),
        **totals,
        "environment": dict(environment),
    }


def write_report(
    sweep: Storage,
    config: SweepConfig,
    train: Tree,
    records: Records,
    environment: dict[str, str],
    *,
    task_dir: str | None,
) -> Answer:
    """Write results.parquet, best.yaml, summary.json and report.html.

    `train` is the run's configuration; `environment` holds the versions and
    nodes to show, by name. If there is no best trial, no best.yaml is written,
    and the best.yaml of an earlier report is deleted.
    """
    found = answer(config, records)
    sweep.write("results.parquet", to_parquet(config, records))
    if found.best is not None:
        tree = trial_tree(train, found.best.config)
        tree |= {
            "name": f"{config.name}-best",
            "storage_path": sweep.parent.uri,
        }
        if task_dir is not None:
            tree["task_dir"] = task_dir
        header = _header(best_command(sweep), config, found)
        sweep.write("best.yaml", (header + dump_yaml(tree)).encode())
    else:
        sweep.delete("best.yaml")
    shown = contents(sweep, config, train, records, environment, found)
    summary = json.dumps(as_data(shown["summary"]), indent=2, allow_nan=False)
    sweep.write("summary.json", f"{summary}\n".encode())
    sweep.write("report.html", render("report.html", **shown).encode())
    return found


def read_environment(sweep: Storage) -> dict[str, str]:
    """Return the versions and nodes of the last report; empty if none can be read."""
    try:
        summary: Tree = {}
        if sweep.exists("summary.json"):
            summary = sweep.read_json("summary.json", Tree)
        return validated(summary.get("environment", {}), dict[str, str])
    except CheckpointError as error:
        logger.warning("%s; the report leaves out versions and nodes", error)
        return {}


def _header(command: str, config: SweepConfig, found: Answer) -> str:
    """Return the comment that best.yaml begins with."""
    best = found.best
    assert best is not None
    lines = [
        f"The best trial of the sweep {config.name}: {best.id}.",
        found.line,
        f"Run as: {command}",
    ]
    if config.objective.ends_at_target and best.time_to_target_s is not None:
        ended = f"The trial ended at its target, {target(config.objective)}"
        lines.append(f"{ended}; this run trains to its last step.")
    return "".join(f"# {printable(line)}\n" for line in lines)


def to_parquet(config: SweepConfig, records: Records) -> bytes:
    """Return a Parquet file with a row per trial; the columns of `_FIXED` come first."""
    schema = [
        (name, kind)
        for names, kind in _FIXED.items()
        for name in names.split()
    ]
    table = pa.Table.from_pylist(list(map(_row, records)), pa.schema(schema))
    taken = {field.name for field in fields(TrialRecord)}
    for key in Trials(config, records).labels:
        if key == "seed":
            continue  # its column also holds the seeds of repeats
        values = [record.config.get(key) for record in records]
        column = f"config.{key}" if key in taken else key
        table = table.append_column(
            column, _config_column(config, key, values)
        )
    for name in metric_names(records):
        column = _encodable(name)
        while column in table.column_names:
            column = f"metrics.{column}"
        found = [record.metrics.get(name) for record in records]
        # Arrow refuses whole numbers that a float would round.
        rounded = [None if value is None else float(value) for value in found]
        table = table.append_column(column, pa.array(rounded, pa.float64()))
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


def _row(record: TrialRecord) -> Tree:
    spent: Tree = vars(record.spent) if record.spent else {}
    return {
        **vars(record),
        **spent,
        "on_lane_s": spent.get("total_s"),
        "time_to_target_low_s": record.missed_target_s,
        "seed": record.given_seed,
        "message": _encodable(record.message),
        "start_time": round(record.start_time * 1e6),
        "end_time": round(record.end_time * 1e6),
    }


def _config_column(config: SweepConfig, key: str, values: list[Any]) -> Any:
    """Return a key's values as an array, typed by all values that the key may have.

    Values without a common type become JSON.
    """
    try:
        kind = pa.array(
            [*values, *sample_values(config.space.get(key, []))]
        ).type
        if not pa.types.is_nested(kind):
            return pa.array(values, kind)
    except (pa.ArrowException, ValueError, OverflowError):
        pass
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _encodable(text: str) -> str:
    """Escape lone surrogates in a text (from file names that are not UTF-8)."""
    return text.encode(errors="backslashreplace").decode()
