"""A sweep's report as a page: what it shows, and its HTML."""

import base64
import hashlib
import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from trainers.config.yaml import dump_yaml
from trainers.errors import STATUSES
from trainers.redaction import escape_controls, redact
from trainers.storage import Storage
from tune.config import SweepConfig
from tune.report.answer import Answer
from tune.report.figures import figures
from tune.report.table import best_first, columns, constant
from tune.report.words import duration
from tune.search.finalists import Final
from tune.search.space import trial_tree
from tune.trials.record import TrialRecord

_MOST_DRAWN = 300


def source(name: str) -> str:
    """Return a file of this folder."""
    return resources.files("tune.report").joinpath(name).read_text(encoding="utf-8")


def render(template: str, **shown: Any) -> str:
    """Return a page. Everything in it but the figures' markup is escaped."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(source),
    )
    return escape_controls(environment.get_template(template).render(**shown))


def best_command(sweep: Storage) -> str:
    """Return the command that trains with the best configuration."""
    return f"python -m trainers {shlex.quote(sweep.locate('best.yaml'))}"


def contents(
    sweep: Storage,
    config: SweepConfig,
    train: dict[str, Any],
    records: list[TrialRecord],
    environment: Mapping[str, str],
    found: Answer,
) -> dict[str, Any]:
    """Return what the template report.html shows of a sweep.

    `train` is the run that is varied.
    """
    tree = train if found.best is None else trial_tree(train, found.best.config)
    shown = columns(config, records)
    same = constant(config, records, shown)
    whole = summary(config, records, environment, found)
    beaten = {record.id for record in found.ranking[_MOST_DRAWN:]}
    drawn = [record for record in records if record.id not in beaten]
    said = []
    for column in same:
        cell = next(iter(column.cells.values()))
        if cell != "-":
            said.append(f"{column.header} {cell}")
    return {
        "best": found.best,
        "script": source("table.js"),
        "script_hash": _hash(source("table.js")),
        "columns": [column for column in shown if column not in same],
        "command": best_command(sweep),
        "figures": figures(config, drawn, found.best),
        "left_out": len(records) - len(drawn),
        "answer": found,
        "records": best_first(records, found),
        "same": ", ".join(said),
        "summary": whole,
        "train": redact(dump_yaml(tree)),
        "live": None,
        "duration": duration,
    }


def _hash(script: str) -> str:
    """Return a script's name in a Content-Security-Policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def summary(
    config: SweepConfig,
    records: list[TrialRecord],
    environment: Mapping[str, str],
    found: Answer,
) -> dict[str, Any]:
    """Return what summary.json holds, with numbers that may not be finite."""
    counts = Counter(record.status for record in records)
    objective = config.objective.model_dump(exclude_none=True)
    spent = [record.spent for record in records if record.spent is not None]
    starting_s = sum(each.starting_s for each in spent)
    training_s = sum(each.training_s for each in spent)
    starts = [record.start_time for record in records]
    ends = [record.end_time for record in records]
    best = None
    if found.best is not None:
        best = {"id": found.best.id, "config": found.best.config, "value": found.value}
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
        "finalists": [_finalist(final) for final in found.finals],
        "others_times_as_fast_at_most": found.most_ahead,
        "trials": len(records),
        "status": {status: counts[status] for status in STATUSES if counts[status]},
        "wall_time_s": round(max(ends, default=0.0) - min(starts, default=0.0), 3),
        "trial_time_s": round(sum(ends) - sum(starts), 3),
        "starting_s": round(starting_s, 3) if spent else None,
        "training_s": round(training_s, 3) if spent else None,
        "environment": dict(environment),
    }


def _finalist(final: Final) -> dict[str, Any]:
    return {
        "id": final.record.id,
        "config": final.record.config,
        "time_s": [final.time_s.low, final.time_s.value, final.time_s.high],
        "samples_per_s": final.samples_per_s,
        "repeats": final.repeats,
        "missed": final.num_missed,
        "equal_to_best": final.equal,
    }


def strict(value: Any) -> Any:
    """Return plain data as strict JSON can hold it: infinite numbers and NaN as text."""
    if isinstance(value, dict):
        return {key: strict(child) for key, child in value.items()}
    if isinstance(value, list):
        return [strict(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
