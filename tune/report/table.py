"""The table of a sweep's trials: its columns, and how the terminal shows it."""

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from trainers.errors import counted
from tune.config import Objective, SweepConfig
from tune.report.answer import Answer
from tune.report.words import (
    Trials,
    amount,
    duration,
    metric_names,
    number,
    printable,
    shown,
    span,
)
from tune.trials.record import Records, TrialRecord, trial_id

_MOST_ROWS = 40
_MEASURING = Console(width=10**4)
_four_digits = partial(number, digits=4)
_LEAST_TELLING = (
    "starting",
    "training",
    "disturbed",
    "step time, ms",
    "peak memory",
    "samples/s",
)


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    header: str
    is_figure: bool
    cells: dict[str, str]
    """The text of each cell, by the trial's ID."""
    values: dict[str, float | None] = field(default_factory=dict)
    """For a column of figures, the number behind each cell, by the trial's ID."""


def table(
    config: SweepConfig,
    records: Records,
    answer: Answer,
    width: int | None = None,
) -> Table:
    """Return the final table for the terminal: one row per trial, best first.

    If there are many trials, the table shows the best ones and some that
    failed. If a `width` in characters is given, the least informative columns
    are left out until the rest fits; numbers are never shortened.
    """
    left_out = {record.id for record in answer.ranking[_MOST_ROWS:]}
    if len(records) > _MOST_ROWS:
        failed = [record.id for record in records if not record.finished]
        left_out.update(failed[_MOST_ROWS // 4 :])
    rows = [record for record in records if record.id not in left_out]
    notes = []
    if answer.best is not None:
        notes.append(f"* best by {printable(config.objective.metric)}")
    if left_out:
        words = f"of {len(records):,} rows; report.html has all"
        notes.append(f"best first: {len(rows)} {words}")
    title = _title(config.name, records)
    found = columns(config, rows)
    dispensable = _least_telling(config.objective, found)
    rows = best_first(rows, answer)
    hidden: list[str] = []
    while True:
        said = list(notes)
        if hidden:
            said.append(f"not shown for lack of room: {', '.join(hidden)}")
        drawn = _draw(title, said, found, rows, answer.best)
        is_wide = (
            width is not None and _MEASURING.measure(drawn).minimum > width
        )
        if not is_wide or not dispensable:
            return drawn
        least = dispensable.pop(0)
        found.remove(least)
        hidden.append(least.header)


def _title(name: str, records: Records) -> str:
    counts = Counter(record.purpose for record in records)
    said = [
        counted(counts[purpose], purpose)
        for purpose in ("trial", "clone", "repeat")
        if counts[purpose]
    ]
    return f"{name}: {', '.join(said) or 'no trials'}"


def _draw(
    title: str,
    notes: Sequence[str],
    found: Sequence[Column],
    rows: Records,
    best: TrialRecord | None,
) -> Table:
    result = Table(box=SIMPLE, show_edge=False, padding=0, title=title)
    if notes:
        result.caption = Text("; ".join(notes), "table.caption")
    for column in found:
        header = column.header
        if len(header) > 8:
            header = header.replace("_", "_\n").replace(" ", "\n")
        is_whole = column.is_figure or column.header == "status"
        min_width = 6
        if is_whole:
            min_width = max([6, *map(len, column.cells.values())])
        result.add_column(
            Text(header),
            justify="right" if column.is_figure else "left",
            overflow="fold",
            min_width=min_width,
            no_wrap=is_whole,
        )
    for record in rows:
        cells = [column.cells[record.id] for column in found]
        style = "" if record.finished else "dim"
        if best is not None and record.id == best.id:
            cells[0] = f"* {cells[0]}"
            style = "bold green"
        result.add_row(*map(Text, cells), style=style)
    return result


def _least_telling(
    objective: Objective, found: Sequence[Column]
) -> list[Column]:
    """Return the columns that may be left out, the least informative first."""
    wanted = {"time to target", *objective.watched}
    figures = {
        column.header: column
        for column in found
        if column.is_figure and column.header not in wanted
    }
    least = [
        figures.pop(header) for header in _LEAST_TELLING if header in figures
    ]
    return [*least, *figures.values()]


def as_html(*shown: RenderableType) -> str:
    """Return, as HTML for a notebook, what a terminal would show."""
    console = Console(
        width=140,
        record=True,
        file=io.StringIO(),
        force_jupyter=False,
        highlight=False,
    )
    console.print(*shown, sep="\n")
    frame = '<pre style="white-space: pre; overflow-x: auto; line-height: normal">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=frame)


def best_first(records: Records, answer: Answer) -> list[TrialRecord]:
    """Return the trials in the answer's order, each followed by its repeats.

    Trials without a value of the objective come last, in the order of the
    records.
    """
    places: dict[str, float] = {}
    by_config: dict[str, float] = {}
    for at, record in enumerate(answer.ranking):
        places[record.id] = at
        by_config.setdefault(trial_id(record.config), at)

    def place(record: TrialRecord) -> tuple[float, bool]:
        if record.purpose != "repeat":
            return places.get(record.id, math.inf), False
        return by_config.get(trial_id(record.config), math.inf), True

    return sorted(records, key=place)


def columns(config: SweepConfig, records: Records) -> list[Column]:
    """Return the table's columns; the objective is one of them."""
    found = [*_settings(config, records), *_measured(records)]
    taken = {"id", "time to target", *(column.header for column in found)}
    for name in metric_names(records):
        if name.startswith("val_") or name == config.objective.metric:
            header = printable(f"metrics.{name}" if name in taken else name)
            values = [record.metrics.get(name) for record in records]
            found.append(_figure(header, records, values, _four_digits))
    if config.objective.target:
        found.append(_times(records))
    if any(record.spent is not None for record in records):
        for name in ("starting", "training"):
            spent = [
                getattr(record.spent, f"{name}_s", None) for record in records
            ]
            found.append(_figure(name, records, spent, duration))
    return found


def _settings(config: SweepConfig, records: Records) -> list[Column]:
    """Return the columns for a trial's keys, its purpose and its status."""
    found = []
    for key, label in Trials(config, records).labels.items():
        cells = {}
        for record in records:
            is_set = key in record.config
            cells[record.id] = shown(record.config[key]) if is_set else ""
        found.append(Column(label, False, cells))
    runs = {}
    statuses = {}
    for record in records:
        seed = "" if record.seed is None else f", seed {record.seed}"
        runs[record.id] = f"{record.purpose}{seed}"
        statuses[record.id] = str(record.status)
    if any(record.purpose != "trial" for record in records):
        found.append(Column("run", False, runs))
    return [*found, Column("status", False, statuses)]


def _measured(records: Records) -> list[Column]:
    """Return the columns for a trial's speed and the resources that it used."""
    found = []
    for name, (header, form) in _FORMS.items():
        values = [getattr(record, name) for record in records]
        is_rare = name == "disturbed_s"
        if not is_rare or any(value is not None for value in values):
            found.append(_figure(header, records, values, form))
    return found


def _times(records: Records) -> Column:
    times = [record.time_to_target_s for record in records]
    column = _figure("time to target", records, times, duration)
    for record in records:
        if record.time_to_target_s is not None:
            words = span(record.missed_target_s, record.time_to_target_s)
            column.cells[record.id] = words
    return column


def _figure(
    header: str,
    records: Records,
    values: Sequence[float | None],
    form: Callable[[float], str],
) -> Column:
    """Return a column of figures; records without a value get a "-"."""
    column = Column(header, True, {})
    for record, value in zip(records, values, strict=True):
        column.values[record.id] = value
        column.cells[record.id] = "-" if value is None else form(value)
    return column


def _milliseconds(value_s: float) -> str:
    return number(value_s * 1e3, 3)


_FORMS: dict[str, tuple[str, Callable[[float], str]]] = {
    "samples_per_s": ("samples/s", _four_digits),
    "step_time_s": ("step time, ms", _milliseconds),
    "peak_memory_bytes": ("peak memory", partial(amount, "peak_memory_bytes")),
    "disturbed_s": ("disturbed", duration),
}


def constant(
    config: SweepConfig, records: Records, found: list[Column]
) -> list[Column]:
    """Return the keys' columns that hold only one value, and all empty columns."""
    if len(records) < 2:
        return []
    keys = Trials(config, records).labels.values()
    same = []
    for column in found:
        cells = set(column.cells.values())
        is_idle = column.header in keys or cells == {"-"}
        if len(cells) == 1 and is_idle:
            same.append(column)
    return same
