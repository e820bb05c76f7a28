"""What a sweep leaves: a table, results.parquet, best.yaml, summary.json and report.html."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.yaml import dump_yaml
from trainers.errors import STATUSES
from trainers.storage import Storage
from tune.config import Range, SweepConfig
from tune.report.answer import (
    FINISHED,
    Answer,
    answer,
    duration,
    is_number,
    labels,
    metric_names,
    number,
    objective_value,
    printable,
    shown,
)
from tune.report.canvas import Figure
from tune.report.trial_figures import figures
from tune.trials.journal import TrialRecord

if TYPE_CHECKING:
    import rich.table

Column = tuple[str, bool, Callable[[TrialRecord], str]]
"""A header, whether the column holds figures, and a trial's cell."""


def table(config: SweepConfig, records: list[TrialRecord], answer: Answer) -> rich.table.Table:
    """The end table of the terminal: a row a trial in the order of the space, the best one marked."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    columns = _columns(config, records)
    result = Table(box=SIMPLE, show_edge=False, padding=0)
    counts = {purpose: sum(record.purpose == purpose for record in records) for purpose in ("trial", "probe", "repeat")}
    said = [f"{n} {purpose}{'s' if n > 1 else ''}" for purpose, n in counts.items() if n]
    result.title = f"{config.name}: {', '.join(said) or 'no trials'}"
    if answer.best is not None:
        result.caption = Text(f"* best by {printable(config.objective.metric)}", "table.caption")
    for header, is_figure, _ in columns:
        narrow = header.replace("_", "_\n").replace(" ", "\n") if len(header) > 8 else header
        justify: Literal["left", "right"] = "right" if is_figure else "left"
        result.add_column(Text(narrow), justify=justify, overflow="fold", min_width=6)
    for record in _in_order(config, records):
        is_best = answer.best is not None and record.id == answer.best.id
        cells = [cell(record) for _, _, cell in columns]
        style = "bold green" if is_best else "" if record.status in FINISHED else "dim"
        result.add_row(*map(Text, [f"* {cells[0]}" if is_best else cells[0], *cells[1:]]), style=style)
    return result


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
    sweep.write("results.parquet", _parquet(config, records))
    resolved = train
    if found.best:
        tree = override(TrainConfig, train, found.best.config)
        tree |= {"name": f"{config.name}-best", "storage_path": sweep.parent.uri}
        if task_dir is not None:
            tree["task_dir"] = task_dir
        resolved = build(TrainConfig, tree, "best.yaml").tree()
        value = objective_value(config.objective, found.best)
        what = f"The best trial of the sweep {config.name}: {found.best.id}, {config.objective.metric} {value:.6g}."
        header = f"# {printable(what)}\n# Run as: {printable(_command(sweep))}\n"
        if len(found.best.schedule) > 1:
            header += (
                "# The values are its last ones. Its weights had the course below, which this run does not have:\n"
            )
            header += "".join(f"#   {printable(_part(part))}\n" for part in found.best.schedule)
        sweep.write("best.yaml", (header + dump_yaml(tree)).encode())
    else:
        sweep.delete("best.yaml")
    summary = _summary(config, records, environment, found)
    sweep.write("summary.json", (json.dumps(_strict(summary), indent=2, allow_nan=False) + "\n").encode())
    drawn = figures(config, records, found.best, train)
    page = _html(config, records, found, drawn, summary, dump_yaml(resolved), _command(sweep))
    sweep.write("report.html", page.encode(errors="backslashreplace"))
    return found


def _part(part: dict[str, Any]) -> str:
    """A part of the course of a population's weights."""
    values = ", ".join(f"{key}: {shown(value)}" for key, value in part["config"].items())
    return f"from epoch {part['epoch']:g} in trial {part['trial']}: {values}"


def _command(sweep: Storage) -> str:
    return f"python -m trainers {shlex.quote(sweep.locate('best.yaml'))}"


def _in_order(config: SweepConfig, records: list[TrialRecord]) -> list[TrialRecord]:
    """The trials in the order of the space: of its lists, and rising in its ranges."""
    lists = {key: [repr(value) for value in space] for key, space in config.space.items() if isinstance(space, list)}

    def place(key: str, value: Any) -> tuple[float, str]:
        text, listed = repr(value), lists.get(key, [])
        rank = listed.index(text) if text in listed else value if is_number(value) else math.inf
        return rank, shown(value)

    return sorted(records, key=lambda record: [place(key, record.config.get(key)) for key in config.space])


def _columns(config: SweepConfig, records: list[TrialRecord]) -> list[Column]:
    """The table's columns; the objective is one of them."""
    columns: list[Column] = [(label, False, partial(_setting, key)) for key, label in labels(config, records).items()]
    if any(record.purpose != "trial" for record in records):
        columns.append(("run", False, _purpose))
    columns.append(("status", False, lambda record: record.status))

    def add(header: str, find: Callable[[TrialRecord], float | None], form: Callable[[float], str]) -> None:
        columns.append((header, True, lambda record: "-" if (value := find(record)) is None else form(value)))

    add("samples/s", lambda record: record.samples_per_s, lambda value: number(value, 4))
    add("step time, ms", lambda record: record.step_time_s, lambda value: number(value * 1e3, 3))
    add("peak memory", lambda record: record.peak_memory_bytes, _memory)
    taken = {"id", "time to target", *(header for header, _, _ in columns)}
    for name in metric_names(records):
        if name.startswith("val_") or name == config.objective.metric:
            header = printable(f"metrics.{name}" if name in taken else name)
            add(header, partial(_metric, name), lambda value: number(value, 4))
    if config.objective.target:
        add("time to target", lambda record: record.time_to_target_s, duration)
    return columns


def _purpose(record: TrialRecord) -> str:
    return record.purpose if record.seed is None else f"{record.purpose}, seed {record.seed}"


def _setting(key: str, record: TrialRecord) -> str:
    return shown(record.config.get(key))


def _metric(name: str, record: TrialRecord) -> float | None:
    return record.metrics.get(name)


def _memory(amount_bytes: float) -> str:
    size, unit = (2**30, "GiB") if amount_bytes >= 2**30 else (2**20, "MiB")
    return f"{number(amount_bytes / size, 3)} {unit}"


def _parquet(config: SweepConfig, records: list[TrialRecord]) -> bytes:
    """A row a trial, in the order given; a column's type does not depend on which trials have run."""
    import pyarrow as pa
    from pyarrow import parquet

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
    """A figure of the gradient noise scale; None where it was not measured."""
    if record.noise_scale is None:
        return None
    value = record.noise_scale[figure]
    return math.inf if value is None else value


def _config_column(config: SweepConfig, key: str, values: list[Any]) -> Any:
    """One key's values as an Arrow array, typed by all that the space may give it."""
    import pyarrow as pa

    space = config.space.get(key, [])
    if isinstance(space, Range):
        space = space.choice or space.uniform or space.loguniform or [space.min]
    possible = [value for value in [*values, *space] if value is not None]
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
    """Text without lone surrogates, which stand for the bytes of file names that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _strict(value: Any) -> Any:
    """Plain data as strict JSON can hold it: numbers that are not finite as text."""
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


def _html(
    config: SweepConfig,
    records: list[TrialRecord],
    found: Answer,
    drawn: list[Figure],
    summary: dict[str, Any],
    train: str,
    command: str,
) -> str:
    """The page; everything in it but the figures' markup is escaped."""
    import jinja2

    text = resources.files("tune.report").joinpath("report.html").read_text(encoding="utf-8")
    strict = jinja2.StrictUndefined
    page = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(text).render(
        best=found.best,
        columns=_columns(config, records),
        command=command,
        fastest=" ".join(part for part in (found.fastest, found.notes, found.ended) if part),
        figures=drawn,
        finished=FINISHED,
        records=_in_order(config, records),
        summary=summary,
        times=[duration(summary["wall_time_s"]), duration(summary["trial_time_s"])],
        train=train,
        verdict=found.verdict,
    )
