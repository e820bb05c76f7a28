"""A comparison as it is shown: tables of the terminal, and a page."""

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tune.report.page import render
from tune.report.words import printable
from tune.views.compare import Comparison, Row


def tables(found: Comparison) -> list[RenderableType]:
    """Return what the terminal shows, for rich."""
    names = [side.name for side in found.sides]
    shown: list[RenderableType] = [_table("", ["", *names], found.answers)]
    shown += [Text(change, "bold") for change in found.changes]
    if found.differences:
        shown.append(_table("what differs", ["", *names], found.differences))
    if found.shared:
        rows = [(one.words, cells(one.figures, one.against, at)) for one in found.shared for at in (0, 1)]
        kept = [(words if at % 2 == 0 else "", row) for at, (words, row) in enumerate(rows) if set(row[1:]) != {"-"}]
        shown.append(_table("configurations that they share", ["", *_headers(found)], kept))
    return [*shown, Text(found.rest)] if found.rest else shown


def cells(figures: list[tuple[str, str]], against: list[tuple[str, str]], at: int) -> list[str]:
    """Return a row of a shared configuration: 0 of the objective, 1 of samples/s."""
    return ["samples/s" if at else "objective", *(one[at] for one in figures), *(one[at] for one in against)]


def page(found: Comparison) -> str:
    """Return the page: one file, without scripts or requests."""
    return render("compare.html", found=found, headers=_headers(found), cells=cells)


def _headers(found: Comparison) -> list[str]:
    names = [side.name for side in found.sides]
    return ["figure", *names, *(f"{name} against {names[0]}" for name in names[1:])]


def _table(title: str, headers: list[str], rows: list[Row]) -> Table:
    result = Table(box=SIMPLE, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    for header in headers:
        result.add_column(Text(header), overflow="fold")
    for name, row in rows:
        result.add_row(*(Text(printable(cell)) for cell in (name, *row)))
    return result
