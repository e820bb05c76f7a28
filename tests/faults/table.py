"""The tables of docs/reliability.md: fault, runs, held, median recovery."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.runner import Row
from tests.faults.scenarios import REPOSITORY

PAGE = REPOSITORY / "docs" / "reliability.md"
RESULTS = REPOSITORY / "benchmarks" / "results"


def summary(rows: Sequence[Row]) -> str:
    """One line."""
    landed = [row for row in rows if row.landed]
    held = sum(row.held for row in landed)
    redrawn = sum(row.attempts - 1 for row in rows)
    return f"{held} of {len(landed)} held; {redrawn} drawn anew because the fault did not land"


def tables(kept: Mapping[str, Sequence[Row]]) -> str:
    """All rows by fault, ours beside plain Ray's."""
    groups = {
        way: [row for name, rows in kept.items() if name.startswith(way) for row in rows if row.landed]
        for way in ("paceline", "plain")
    }
    seeds = ", ".join(f"{name} {summary(rows)}" for name, rows in kept.items())
    lines = [seeds, "", "| fault | runs | held | median recovery | plain Ray: runs | held | median recovery |"]
    lines += ["|---|---|---|---|---|---|---|"]
    faults = sorted({row.fault for rows in groups.values() for row in rows})
    for fault in faults:
        cells = [_cells([row for row in rows if row.fault == fault]) for rows in groups.values()]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    lines.append(f"| **all** | {' | '.join(_cells(rows) for rows in groups.values())} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> str:
    times = [row.recovery_s for row in rows if row.held and row.recovery_s is not None]
    median = f"{statistics.median(times):.1f} s" if times else ""
    return f"{len(rows) or ''} | {sum(row.held for row in rows) if rows else ''} | {median}"


def write_page(part: str, text: str) -> None:
    """Write the output of a command into its part of the page."""
    begin, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    page = PAGE.read_text()
    before, rest = page.split(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}")


def keep(kept: Mapping[str, Sequence[Row]]) -> Path:
    """Write the tables into the page, and every row beside the benchmarks' results."""
    write_page("campaign", tables(kept))
    path = RESULTS / "faults.json"
    path.write_text(json.dumps({name: [asdict(row) for row in rows] for name, rows in kept.items()}, indent=1) + "\n")
    return path
