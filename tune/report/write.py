"""What a sweep leaves: results.parquet, best.yaml, summary.json and report.html."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.yaml import dump_yaml
from trainers.errors import STATUSES
from trainers.storage import Storage
from tune.config import SweepConfig
from tune.report.answer import Answer, answer, objective_value
from tune.report.canvas import Figure, styled
from tune.report.figure_data import FigureData
from tune.report.parquet import to_parquet
from tune.report.search_figures import beliefs, course, pareto
from tune.report.table import columns, in_order
from tune.report.trial_figures import curves, memory, targets, throughput
from tune.report.words import duration, printable, shown
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

    `train` is the sweep's TrainConfig mapping, `environment` the names and versions to show. Without a best
    trial there is no best.yaml: one that an earlier report left is deleted.
    """
    found = answer(config, records, train)
    sweep.write("results.parquet", to_parquet(config, records))
    if found.best:
        tree = override(TrainConfig, train, found.best.config)
        tree |= {"name": f"{config.name}-best", "storage_path": sweep.parent.uri}
        tree |= {"task_dir": task_dir} if task_dir is not None else {}
        resolved = build(TrainConfig, tree, "best.yaml").tree()
        sweep.write("best.yaml", (_header(sweep, config, found.best) + dump_yaml(tree)).encode())
    else:
        resolved = train
        sweep.delete("best.yaml")
    summary = _summary(config, records, environment, found)
    sweep.write("summary.json", (json.dumps(_strict(summary), indent=2, allow_nan=False) + "\n").encode())
    page = _page(
        best=found.best,
        columns=columns(config, records),
        command=_command(sweep),
        figures=figures(config, records, found.best, train),
        reasons=found.reasons,
        records=in_order(config, records),
        summary=summary,
        times=[duration(summary["wall_time_s"]), duration(summary["trial_time_s"])],
        train=dump_yaml(resolved),
        verdict=found.verdict,
    )
    sweep.write("report.html", page.encode(errors="backslashreplace"))
    return found


def _header(sweep: Storage, config: SweepConfig, best: TrialRecord) -> str:
    """Return the comment that best.yaml begins with."""
    value = objective_value(config.objective, best)
    lines = [
        f"The best trial of the sweep {config.name}: {best.id}, {config.objective.metric} {value:.6g}.",
        f"Run as: {_command(sweep)}",
    ]
    if len(best.schedule) > 1:
        lines.append("The values are its last ones. Its weights had the course below, which this run does not have:")
        for part in best.schedule:
            values = ", ".join(f"{key}: {shown(value)}" for key, value in part["config"].items())
            lines.append(f"  from epoch {part['epoch']:g} in trial {part['trial']}: {values}")
    return "".join(f"# {printable(line)}\n" for line in lines)


def _command(sweep: Storage) -> str:
    return f"python -m trainers {shlex.quote(sweep.locate('best.yaml'))}"


def figures(
    config: SweepConfig,
    records: list[TrialRecord],
    best: TrialRecord | None,
    train: Mapping[str, Any] | None = None,
) -> list[Figure]:
    """Draw the figures that the records have data for; search frontier needs `train`, the TrainConfig mapping."""
    data = FigureData(config, records, best)
    with styled():
        believed = beliefs(data, train) if config.search == "frontier" and train is not None else None
        drawn = [throughput(data), memory(data), curves(data), targets(data), believed, pareto(data), course(data)]
    return [figure for figure in drawn if figure]


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


def _page(**values: Any) -> str:
    """Return the page; everything in it but the figures' markup is escaped."""
    text = resources.files("tune.report").joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(text).render(values)
