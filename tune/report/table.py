"""The table of a sweep's trials: its rows and columns for terminal and page, and as
rich draws it.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tune.config import SweepConfig
from tune.report.answer import Answer
from tune.report.words import (
    amount,
    duration,
    is_number,
    labels,
    metric_names,
    number,
    printable,
    shown,
    span,
)
from tune.trials.record import TrialRecord, trial_id

_MOST_ROWS = 40
_LEAST_TELLING = (
    "starting",
    "training",
    "energy",
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
    """By the trial's id."""
    values: dict[str, float | None] = field(default_factory=dict)
    """Of a figure, the numbers to sort by."""


def table(
    config: SweepConfig,
    records: list[TrialRecord],
    answer: Answer,
    width: int | None = None,
) -> Table:
    """Return the end table of the terminal: a row a trial, best first.

    Of many trials it has the best, and some that failed.

    A terminal of `width` characters gets as many columns as fit: those that say least
    are left out, never digits.
    """
    beaten = {record.id for record in answer.ranking[_MOST_ROWS:]}
    failed = [record.id for record in records if not record.finished]
    left_out = beaten.union(
        failed[_MOST_ROWS // 4 :] if len(records) > _MOST_ROWS else ()
    )
    rows = [record for record in records if record.id not in left_out]
    shown = columns(config, rows)
    counts = {
        purpose: sum(record.purpose == purpose for record in records)
        for purpose in ("trial", "clone", "repeat")
    }
    said = [
        f"{n} {purpose}{'s' if n > 1 else ''}" for purpose, n in counts.items() if n
    ]
    title = f"{config.name}: {', '.join(said) or 'no trials'}"
    notes = (
        []
        if answer.best is None
        else [f"* best by {printable(config.objective.metric)}"]
    )
    if left_out:
        notes.append(
            f"the best {len(rows)} of {len(records):,} rows; report.html has all"
        )
    hidden: list[str] = []
    while True:
        note = f"not shown for want of room: {', '.join(hidden)}"
        drawn = _draw(
            title,
            [*notes, note] if hidden else notes,
            shown,
            best_first(config, rows, answer),
            answer,
        )
        least = next((column for column in _least_telling(config, shown)), None)
        if (
            width is None
            or least is None
            or Console(width=10**4).measure(drawn).minimum <= width
        ):
            return drawn
        shown.remove(least)
        hidden.append(least.header)


def _draw(
    title: str,
    notes: Sequence[str],
    shown: Sequence[Column],
    rows: Sequence[TrialRecord],
    answer: Answer,
) -> Table:
    result = Table(box=SIMPLE, show_edge=False, padding=0, title=title)
    if notes:
        result.caption = Text("; ".join(notes), "table.caption")
    for column in shown:
        header = column.header
        narrow = (
            header.replace("_", "_\n").replace(" ", "\n") if len(header) > 8 else header
        )
        justify: Literal["right", "left"] = "right" if column.is_figure else "left"
        result.add_column(
            Text(narrow),
            justify=justify,
            overflow="fold",
            min_width=6,
            no_wrap=column.is_figure or header == "status",
        )
    for record in rows:
        is_best = answer.best is not None and record.id == answer.best.id
        first, *rest = (column.cells[record.id] for column in shown)
        style = "bold green" if is_best else "" if record.finished else "dim"
        result.add_row(
            *map(Text, [f"* {first}" if is_best else first, *rest]), style=style
        )
    return result


def _least_telling(config: SweepConfig, shown: Sequence[Column]) -> Iterator[Column]:
    """Yield the columns that a narrow table can do without, the least telling first."""
    wanted = {"time to target", *config.objective.watched}
    figures = [
        column for column in shown if column.is_figure and column.header not in wanted
    ]
    headers = [column.header for column in figures]
    for header in _LEAST_TELLING:
        if header in headers:
            yield figures[headers.index(header)]
    yield from (column for column in figures if column.header not in _LEAST_TELLING)


def as_html(*shown: RenderableType) -> str:
    """Return what a terminal would show as a page of a notebook can."""
    console = Console(
        width=140, record=True, file=io.StringIO(), force_jupyter=False, highlight=False
    )
    console.print(*shown, sep="\n")
    frame = '<pre style="white-space: pre; overflow-x: auto; line-height: normal">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=frame)


def in_order(config: SweepConfig, records: list[TrialRecord]) -> list[TrialRecord]:
    """Return the trials in the order of the space: of its lists, and rising in its
    ranges.
    """
    lists = {
        key: [repr(value) for value in space]
        for key, space in config.space.items()
        if isinstance(space, list)
    }

    def place(key: str, value: Any) -> tuple[float, str]:
        text = repr(value)
        listed = lists.get(key, [])
        rank = (
            listed.index(text)
            if text in listed
            else value
            if is_number(value)
            else math.inf
        )
        return rank, shown(value)

    return sorted(
        records,
        key=lambda record: [place(key, record.config.get(key)) for key in config.space],
    )


def best_first(
    config: SweepConfig, records: list[TrialRecord], answer: Answer
) -> list[TrialRecord]:
    """Return the trials in the answer's order, each followed by its repeats; then, in
    the order of the space, those without a value of the objective.
    """
    places = {record.id: at for at, record in enumerate(answer.ranking)}
    by_config = {
        trial_id(record.config): places[record.id]
        for record in records
        if record.id in places
    }

    def place(record: TrialRecord) -> tuple[float, bool]:
        last = (
            by_config.get(trial_id(record.config), math.inf)
            if record.purpose == "repeat"
            else math.inf
        )
        return places.get(record.id, last), record.purpose == "repeat"

    return sorted(in_order(config, records), key=place)


def columns(config: SweepConfig, records: list[TrialRecord]) -> list[Column]:
    """Return the table's columns; the objective is one of them."""
    found: list[Column] = []

    ids = [record.id for record in records]

    def add(
        header: str, values: Iterable[Any], form: Callable[[float], str] | None = None
    ) -> None:
        given = dict(zip(ids, values, strict=True))
        if form is None:
            found.append(Column(header, False, given))
            return
        cells = {
            name: "-" if value is None else form(value) for name, value in given.items()
        }
        found.append(Column(header, True, cells, given))

    for key, label in labels(config, records).items():
        add(label, (shown(record.config.get(key)) for record in records))
    if any(record.purpose != "trial" for record in records):
        add(
            "run",
            (
                r.purpose if r.seed is None else f"{r.purpose}, seed {r.seed}"
                for r in records
            ),
        )
    add("status", (record.status for record in records))
    add(
        "samples/s",
        (record.samples_per_s for record in records),
        lambda value: number(value, 4),
    )
    add(
        "step time, ms",
        (record.step_time_s for record in records),
        lambda value: number(value * 1e3, 3),
    )
    peaks = (record.peak_memory_bytes for record in records)
    add("peak memory", peaks, lambda value: amount("peak_memory_bytes", value))
    if any(record.disturbed_s for record in records):
        add("disturbed", (record.disturbed_s for record in records), duration)
    if any(record.energy_j is not None for record in records):
        add(
            "energy",
            (record.energy_j for record in records),
            lambda value: amount("energy_j", value),
        )
    taken = {"id", "time to target", *(column.header for column in found)}
    for name in metric_names(records):
        if name.startswith("val_") or name == config.objective.metric:
            header = printable(f"metrics.{name}" if name in taken else name)
            add(
                header,
                (record.metrics.get(name) for record in records),
                lambda value: number(value, 4),
            )
    if config.objective.target:
        times = {record.id: record.time_to_target_s for record in records}
        missed = {record.id: record.missed_target_s for record in records}
        cells = {
            name: "-" if time_s is None else span(missed[name], time_s)
            for name, time_s in times.items()
        }
        found.append(Column("time to target", True, cells, times))
    if any(record.spent is not None for record in records):
        add(
            "starting",
            (record.spent and record.spent.starting_s for record in records),
            duration,
        )
        add(
            "training",
            (record.spent and record.spent.training_s for record in records),
            duration,
        )
    return found


def constant(
    config: SweepConfig, records: list[TrialRecord], found: list[Column]
) -> list[Column]:
    """Return the columns that say the same of every trial: of the configuration, or
    that there is nothing.
    """
    keys = set(labels(config, records).values())
    same = [
        column
        for column in found
        if len(records) > 1 and len(set(column.cells.values())) == 1
    ]
    return [
        column
        for column in same
        if column.header in keys or set(column.cells.values()) == {"-"}
    ]
