"""Write docs/benchmarks.md: each script's newest figures in benchmarks/results/."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
HEAD = """# Benchmarks

The newest kept figures of each script in `benchmarks/`, from the files in `benchmarks/results/` (`make docs` writes
this page: no figure here is typed). [benchmarks/README.md](../benchmarks/README.md) says what each claim must show,
what is missing, what was slow once, and how to run and to read them; [gpu.md](gpu.md) what waits for a GPU;
[reliability.md](reliability.md) has the faults.

`median`, `smallest` and `largest` are of n rounds; `ratio` is the median of the ratios to the baseline within a round.
The A/A floor is how far the baseline, measured twice, is from itself: a difference below it is none. What has no n is
of one run, or of the replays beside it.
"""
UNITS = {
    "checkpoint": "ms",
    "input": "samples/s",
    "loop": "samples/s",
    "sharded": "ms",
}
"""Of medians whose names have no unit as their suffix."""
LEFT_OUT = ("rounds", "train_loss")
"""What a table is made of, not what it says."""
UNIT_SUFFIXES = ("s", "ms", "mb")
_NAME = re.compile(r"(?P<kind>[a-z-]+)-\d{4}-\d\d-\d\d-(?P<device>\w+)\.json")
_STATISTICS = {
    "median": "median",
    "min": "smallest",
    "max": "largest",
    "ratio": "ratio",
    "n": "n",
}
Row = dict[str, str]


def page() -> str:
    """The whole page."""
    named = [
        (path, match)
        for path in sorted(RESULTS.glob("*.json"))
        if (match := _NAME.fullmatch(path.name))
    ]
    newest = {(match["kind"], match["device"]): path for path, match in named}
    return "\n".join(
        [HEAD, *(_section(kind, path) for (kind, _), path in sorted(newest.items()))]
    )


def _section(kind: str, path: Path) -> str:
    kept = json.loads(path.read_text())
    machine = kept["environment"]
    results = kept["results"]
    named = (
        f"benchmarks/{name}.py"
        for name in (kind.replace("-", "_"), kind.partition("-")[0])
    )
    script = next((file for file in named if (ROOT / file).is_file()), "")
    doc = ast.get_docstring(ast.parse((ROOT / script).read_text())) if script else None
    question = (doc or "").partition("\n\n")[0].replace("\n", " ")
    libraries = ", ".join(
        f"{name} {machine[name]}" for name in ("python", "torch", "ray")
    )
    said = f"{kept['date']}, {machine['cpus']} CPU cores, device {machine['device']}, {libraries}, commit"
    files = [script] * bool(doc) + [str(path.relative_to(ROOT))]
    links = ", ".join(f"[{Path(file).name}](../{file})" for file in files)
    where = "" if machine["device"] == "cpu" else f", {machine['device']}"
    parts = [
        f"## {kind}{where}\n",
        f"{question}\n",
        f"{said} {machine.get('git_commit', '')[:10]}: {links}.\n",
    ]
    works = {
        key: value
        for key, value in results.items()
        if isinstance(value, dict) and not _is_table(value)
    }
    whole = {key: value for key, value in results.items() if key not in works}
    for title, work in [("", whole), *works.items()]:
        found = list(_tables(work, UNITS.get(kind, UNITS.get(f"{kind}: {title}", ""))))
        parts += [f"### {kind}: {_words(title)}\n"] * bool(title and found) + found
    return "\n".join(parts)


def _tables(work: dict[str, Any], unit: str) -> Iterator[str]:
    """Yield a piece of work's plain values, what was measured, and its other rows."""
    if plain := [f"{_words(key)} {value}" for key, value in _plain(work).items()]:
        yield "; ".join(plain) + "\n"
    if measured := dict(_measured(work)):
        head = f"median, {unit}" if unit else "median"
        yield _table(
            {"": name, head: row.pop("median"), **row} for name, row in measured.items()
        )
    below = {
        key: value
        for key, value in work.items()
        if isinstance(value, dict) and key not in LEFT_OUT
    }
    for name, tree in {"": below, **below}.items():
        flat = {
            key: _flat(value)
            for key, value in tree.items()
            if isinstance(value, dict) and "median" not in value
        }
        if any(flat.values()):
            yield _table(
                {_words(name): _words(key), **row} for key, row in flat.items() if row
            )
    for value in work.values():
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            yield _table(map(_plain, value))


def _is_table(tree: dict[str, Any]) -> bool:
    return all(isinstance(value, dict) and "median" in value for value in tree.values())


def _flat(tree: dict[str, Any]) -> Row:
    """The plain values of a row, and of how many picks it is."""
    picks = {"n": f"{sum(tree['picks'].values()):,}"} if "picks" in tree else {}
    return _plain(tree) | picks


def _measured(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Row]]:
    """Whatever has a median, by its place in the file."""
    if "median" in tree:
        row = {
            name: _shown(tree[key]) for key, name in _STATISTICS.items() if key in tree
        }
        yield (
            path,
            row | ({"ratio": f"{tree['ratio']:.2f} x"} if "ratio" in tree else {}),
        )
        return
    for key, value in tree.items():
        if isinstance(value, dict) and key not in LEFT_OUT:
            name = "" if key == "rows" else _words(key)
            yield from _measured(value, ", ".join(filter(None, (path, name))))


def _plain(tree: dict[str, Any]) -> Row:
    return {
        {"floor": "A/A floor"}.get(key, _words(key)): f"{value:.1%}"
        if key == "floor"
        else _shown(value)
        for key, value in tree.items()
        if not isinstance(value, dict | list)
    }


def _table(rows: Iterable[Row]) -> str:
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join(
        [
            *lines,
            *(
                f"| {' | '.join(row.get(column, '') for column in columns)} |"
                for row in rows
            ),
            "",
        ]
    )


def _words(key: str) -> str:
    """A key as a heading, with its unit."""
    words, _, unit = key.rpartition("_")
    return (
        f"{_words(words)} ({unit.replace('mb', 'MB')})"
        if words and unit in UNIT_SUFFIXES
        else key.replace("_", " ")
    )


def _shown(value: Any) -> str:
    """Four digits: what lies behind them is noise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value) or isinstance(value, int):
        return f"{value:,}"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):,.{max(0, digits)}f}"
