"""A campaign of faults over real processes: what happens when anything is
killed, stopped, filled or broken.

Run as: python -m tests.faults [--runs 500] [--seed 1] [--only NAME] [--jobs 1]
    [--case 1-37] [--table]

Cases are drawn by seed and number, so that each can be run again alone
(`--case 1-37`). What has ended is kept in build/faults, and the same command
goes on from there. `--only` names a scenario (local, spawn, ...) or a kind of
fault (signal, storage, ...). The table of docs/reliability.md is made of all
that is kept (`--table` only makes it; `--keep` writes it and the JSON).
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from tests.faults.cases import draw
from tests.faults.runner import Row, Unavailable, run_case
from tests.faults.scenarios import WORKSPACE
from tests.faults.table import keep, summary, table

_MAX_DRAWS = 8


def one(
    seed: int, number: int, only: str = "", workspace: Path = WORKSPACE
) -> Row:
    """The case of a seed and a number; drawn anew where the fault does not land."""
    spent_s = 0.0
    for attempt in range(_MAX_DRAWS):
        try:
            row = run_case(draw(seed, number, only, attempt), workspace)
        except Unavailable as reason:
            print(f"{seed}-{number} is drawn anew: {reason}", file=sys.stderr)
            continue
        spent_s += row.wall_s
        if row.landed:
            return replace(row, attempts=attempt + 1)
    return replace(row, wall_s=spent_s, attempts=_MAX_DRAWS)


def journal(seed: int, only: str) -> Path:
    """Where the rows of a campaign are kept."""
    return WORKSPACE / f"paceline-seed-{seed}{only and '-' + only}.jsonl"


def campaign(runs: int, seed: int, only: str, jobs: int) -> list[Row]:
    """Run what is not in the journal yet; returns all rows."""
    file = journal(seed, only)
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = read(file)
    known = {row.case for row in rows}
    numbers = [
        number
        for number in range(1, runs + 1)
        if f"{seed}-{number}" not in known
    ]
    with ThreadPoolExecutor(jobs) as pool, file.open("a") as kept:
        for row in pool.map(lambda number: one(seed, number, only), numbers):
            print(row.line(), flush=True)
            kept.write(json.dumps(asdict(row)) + "\n")
            kept.flush()
            rows.append(row)
    return rows


def read(file: Path) -> list[Row]:
    """The rows of a journal."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def main() -> int:
    """Run what was asked for; 1 where anything did not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="a scenario or a kind of fault"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--case", help="one case alone, as 1-37")
    parser.add_argument(
        "--table",
        action="store_true",
        help="only make the table of what is kept",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="write it to docs/reliability.md, and the JSON",
    )
    given = parser.parse_args()
    if given.case:
        seed, number = map(int, given.case.split("-"))
        row = one(seed, number, given.only)
        print(row.line())
        return 0 if row.held else 1
    rows = []
    if not given.table:
        began = time.monotonic()
        rows = campaign(given.runs, given.seed, given.only, given.jobs)
        print(
            f"\n{summary(rows)}; {(time.monotonic() - began) / 60:.0f} minutes"
        )
    kept = {
        file.stem: read(file)
        for file in sorted(WORKSPACE.glob("*-seed-?*.jsonl"))
    }
    print(table(kept))
    if given.keep:
        print(f"kept in {keep(kept)}")
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
