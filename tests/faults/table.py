"""The table of docs/reliability.md: fault, cases that held of those that ran,
median recovery.
"""

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
    return f"{held} of {len(landed)} held, {redrawn} drawn anew"


def table(kept: Mapping[str, Sequence[Row]]) -> str:
    """All rows by fault."""
    landed = [row for rows in kept.values() for row in rows if row.landed]
    seeds = "; ".join(
        f"{name.replace('paceline-', '').replace('-', ' ')}: {summary(rows)}"
        for name, rows in kept.items()
    )
    lines = [
        seeds,
        "",
        "| fault | held | median recovery, s |",
        "|---|---|---|",
    ]
    for fault in sorted({row.fault for row in landed}):
        lines.append(
            f"| {fault} | {_cells([row for row in landed if row.fault == fault])} |"
        )
    lines.append(f"| **all** | {_cells(landed)} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> str:
    times = [
        row.recovery_s
        for row in rows
        if row.held and row.recovery_s is not None
    ]
    median = f"{statistics.median(times):.1f}" if times else ""
    return f"{sum(row.held for row in rows)}/{len(rows)} | {median}"


def keep(kept: Mapping[str, Sequence[Row]]) -> Path:
    """Write the table into the page, and every row beside the benchmarks' results."""
    begin = "<!-- campaign -->\n"
    end = "<!-- end of campaign -->"
    before, rest = PAGE.read_text().split(begin)
    PAGE.write_text(
        f"{before}{begin}\n{table(kept)}\n\n{end}{rest.split(end)[1]}"
    )
    path = RESULTS / "faults.json"
    path.write_text(
        json.dumps(
            {
                name: [asdict(row) for row in rows]
                for name, rows in kept.items()
            },
            indent=1,
        )
        + "\n"
    )
    return path
