"""The table of a sweep's trials: its columns for terminal and page, and as rich draws it."""

import io
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tune.config import SweepConfig
from tune.report.answer import Answer
from tune.report.words import amount, duration, is_number, labels, metric_names, number, printable, shown, span
from tune.trials.record import TrialRecord

_MOST_ROWS = 40


class Column(NamedTuple):
    """A column of the table."""

    header: str
    is_figure: bool
    cells: dict[str, str]
    """By the trial's id."""


def table(config: SweepConfig, records: list[TrialRecord], answer: Answer) -> Table:
    """Return the end table of the terminal: a row a trial in the order of the space, the best one marked. Of many
    trials it has the best, and some that failed.
    """
    beaten = {record.id for record in answer.ranking[_MOST_ROWS:]}
    failed = [record.id for record in records if not record.finished]
    left_out = beaten.union(failed[_MOST_ROWS // 4 :] if len(records) > _MOST_ROWS else ())
    rows = [record for record in records if record.id not in left_out]
    found = columns(config, rows)
    result = Table(box=SIMPLE, show_edge=False, padding=0)
    counts = {purpose: sum(record.purpose == purpose for record in records) for purpose in ("trial", "repeat")}
    said = [f"{n} {purpose}{'s' if n > 1 else ''}" for purpose, n in counts.items() if n]
    result.title = f"{config.name}: {', '.join(said) or 'no trials'}"
    notes = [] if answer.best is None else [f"* best by {printable(config.objective.metric)}"]
    if left_out:
        notes.append(f"the best {len(rows)} of {len(records):,} rows; report.html has all")
    if notes:
        result.caption = Text("; ".join(notes), "table.caption")
    for header, is_figure, _ in found:
        narrow = header.replace("_", "_\n").replace(" ", "\n") if len(header) > 8 else header
        result.add_column(Text(narrow), justify="right" if is_figure else "left", overflow="fold", min_width=6)
    for record in in_order(config, rows):
        is_best = answer.best is not None and record.id == answer.best.id
        first, *rest = (cells[record.id] for _, _, cells in found)
        style = "bold green" if is_best else "" if record.finished else "dim"
        result.add_row(*map(Text, [f"* {first}" if is_best else first, *rest]), style=style)
    return result


def as_html(*shown: RenderableType) -> str:
    """Return what a terminal would show as a page of a notebook can."""
    console = Console(width=140, record=True, file=io.StringIO(), force_jupyter=False, highlight=False)
    console.print(*shown, sep="\n")
    frame = '<pre style="white-space: pre; overflow-x: auto; line-height: normal">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=frame)


def in_order(config: SweepConfig, records: list[TrialRecord]) -> list[TrialRecord]:
    """Return the trials in the order of the space: of its lists, and rising in its ranges."""
    lists = {key: [repr(value) for value in space] for key, space in config.space.items() if isinstance(space, list)}

    def place(key: str, value: Any) -> tuple[float, str]:
        text, listed = repr(value), lists.get(key, [])
        rank = listed.index(text) if text in listed else value if is_number(value) else math.inf
        return rank, shown(value)

    return sorted(records, key=lambda record: [place(key, record.config.get(key)) for key in config.space])


def columns(config: SweepConfig, records: list[TrialRecord]) -> list[Column]:
    """Return the table's columns; the objective is one of them."""
    found: list[Column] = []

    def add(header: str, values: Iterable[Any], form: Callable[[float], str] | None = None) -> None:
        cells = (value if form is None else "-" if value is None else form(value) for value in values)
        found.append(Column(header, form is not None, dict(zip([record.id for record in records], cells, strict=True))))

    for key, label in labels(config, records).items():
        add(label, (shown(record.config.get(key)) for record in records))
    if any(record.purpose != "trial" for record in records):
        add("run", (r.purpose if r.seed is None else f"{r.purpose}, seed {r.seed}" for r in records))
    add("status", (record.status for record in records))
    add("samples/s", (record.samples_per_s for record in records), lambda value: number(value, 4))
    add("step time, ms", (record.step_time_s for record in records), lambda value: number(value * 1e3, 3))
    peaks = (record.peak_memory_bytes for record in records)
    add("peak memory", peaks, lambda value: amount("peak_memory_bytes", value))
    if any(record.disturbed_s for record in records):
        add("disturbed", (record.disturbed_s for record in records), duration)
    if any(record.energy_j is not None for record in records):
        add("energy", (record.energy_j for record in records), lambda value: amount("energy_j", value))
    taken = {"id", "time to target", *(column.header for column in found)}
    for name in metric_names(records):
        if name.startswith("val_") or name == config.objective.metric:
            header = printable(f"metrics.{name}" if name in taken else name)
            add(header, (record.metrics.get(name) for record in records), lambda value: number(value, 4))
    if config.objective.target:
        met = [(one.missed_target_s, one.time_to_target_s) for one in records]
        cells = ["-" if time_s is None else span(before, time_s) for before, time_s in met]
        found.append(Column("time to target", True, dict(zip([record.id for record in records], cells, strict=True))))
    if any(record.spent is not None for record in records):
        add("starting", (record.spent and record.spent.starting_s for record in records), duration)
        add("training", (record.spent and record.spent.training_s for record in records), duration)
    return found


def constant(config: SweepConfig, records: list[TrialRecord], found: list[Column]) -> list[Column]:
    """Return the columns that say the same of every trial: of the configuration, or that there is nothing."""
    keys = set(labels(config, records).values())
    same = [column for column in found if len(records) > 1 and len(set(column.cells.values())) == 1]
    return [column for column in same if column.header in keys or set(column.cells.values()) == {"-"}]
