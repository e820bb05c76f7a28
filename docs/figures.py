"""Write docs/benchmarks.md: each script's newest figures in benchmarks/results/."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
HEAD = """# Benchmarks

The newest kept figures of each script in `benchmarks/`, from `benchmarks/results/` (`make docs` writes this page).
[benchmarks/README.md](../benchmarks/README.md) says how to run the scripts, and what their figures mean and must show.
[reliability.md](reliability.md) has the results under faults.

`median`, `smallest` and `largest` are over n rounds; `ratio` is the median of the ratios to the baseline within a
round. The A/A floor is how far the baseline, measured twice, differs from itself; a smaller difference is noise.
Figures without n come from one run, or from replayed sweeps. The scripts' docstrings explain the rows. Unless a
section says otherwise, the machine was: """
UNITS = {
    "checkpoint": "ms",
    "input": "samples/s",
    "loop": "samples/s",
    "sharded": "ms",
}
"""Units of medians whose names do not end in a unit, by benchmark."""
LEFT_OUT = ("rounds", "train_loss")
"""Keys that are not shown: the figures of single rounds, and losses."""
UNIT_SUFFIXES = ("s", "ms", "mb")
_NAME = re.compile(r"(?P<kind>[a-z-]+)-\d{4}-\d\d-\d\d-(?P<device>\w+)\.json")
_HEADERS = {
    "lanes_s": "Paceline sweep (s)",
    "import_s": "Ray script on lanes (s)",
    "ray_s": "plain Ray (s)",
    "ray_measured": "Ray trials measured",
    "ray_trial_s": "Ray trial (s)",
    "speedup": "plain Ray / Paceline",
    "import_speedup": "plain Ray / script on lanes",
    "train_s": "training (s)",
    "lanes": "number of lanes",
    "each_s": "trial to trial (s)",
    "marginal_s": "overhead of a trial (s)",
    "ahead": "paceline over",
    "low": "95 % from",
    "high": "95 % to",
    "async": "async (held up)",
    "slowdown": "async (steps slowed)",
    "mb": "parameters (MB)",
    "share_mb": "a rank's state (MB)",
    "memory_mb": "peak memory above state (MB)",
    "share_of_slice": "relative to slice",
    "first_s": "early trial (s)",
    "last_s": "late trial (s)",
    "same_winner": "pairs with one winner",
    "same_or_equal": "with equal winners",
    "names_the_usual": "name the usual",
    "regret_median": "winner's time over best",
    "regret_worst": "at worst",
    "samples_of_grid": "samples over a grid's",
}
"""Headings of figures whose names do not say what they measure."""
_STATISTICS = {
    "median": "median",
    "min": "smallest",
    "max": "largest",
    "ratio": "ratio",
    "n": "n",
}
Row = dict[str, str]


def page() -> str:
    """Return the whole page."""
    named = [
        (path, match)
        for path in sorted(RESULTS.glob("*.json"))
        if (match := _NAME.fullmatch(path.name))
    ]
    newest = {(match["kind"], match["device"]): path for path, match in named}
    usual = Counter(
        _machine(json.loads(path.read_text())["environment"])
        for path in newest.values()
    ).most_common(1)[0][0]
    sections = (
        _section(kind, path, usual)
        for (kind, _), path in sorted(newest.items())
    )
    return "\n".join([f"{HEAD}{usual}.\n", *sections])


def _machine(found: dict[str, Any]) -> str:
    libraries = (
        f"{name} {found[name]}" for name in ("python", "torch", "ray")
    )
    return f"{found['cpus']} CPU cores, device {found['device']}, {', '.join(libraries)}"


def _section(kind: str, path: Path, usual: str) -> str:
    kept = json.loads(path.read_text())
    machine = kept["environment"]
    results = kept["results"]
    named = (
        f"benchmarks/{name}.py"
        for name in (kind.replace("-", "_"), kind.partition("-")[0])
    )
    script = next((file for file in named if (ROOT / file).is_file()), "")
    doc = (
        ast.get_docstring(ast.parse((ROOT / script).read_text()))
        if script
        else None
    )
    question = (doc or "").partition("\n\n")[0].replace("\n", " ")
    other = f"{_machine(machine)}, " if _machine(machine) != usual else ""
    files = [script] * bool(doc) + [str(path.relative_to(ROOT))]
    links = ", ".join(f"[{Path(file).name}](../{file})" for file in files)
    where = "" if machine["device"] == "cpu" else f", {machine['device']}"
    parts = [
        f"## {kind}{where}\n",
        f"{question}\n",
        f"{kept['date']}, {other}commit {machine.get('git_commit', '')[:10]}: {links}.\n",
    ]
    works = {
        key: value
        for key, value in results.items()
        if isinstance(value, dict) and not _is_table(value)
    }
    whole = {key: value for key, value in results.items() if key not in works}
    for title, work in [("", whole), *works.items()]:
        found = list(
            _tables(work, UNITS.get(kind, UNITS.get(f"{kind}: {title}", "")))
        )
        parts += [f"### {_words(title)}\n"] * bool(title and found) + found
    return "\n".join(parts)


def _tables(work: dict[str, Any], unit: str) -> Iterator[str]:
    """Yield a workload's plain values, its table of medians, and its other tables."""
    plain = [f"{_words(key)} {value}" for key, value in _plain(work).items()]
    measured = dict(_measured(work))
    counts = {row.get("n") for row in measured.values()}
    if len(counts) == 1 and None not in counts:
        plain += [f"n {counts.pop()}"]
        for row in measured.values():
            del row["n"]
    if plain:
        yield "; ".join(plain) + "\n"
    if measured:
        head = f"median, {unit}" if unit else "median"
        yield _table(
            {"": name, head: row.pop("median"), **row}
            for name, row in measured.items()
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
                {_words(name): _words(key), **row}
                for key, row in flat.items()
                if row
            )
    for value in work.values():
        if isinstance(value, list) and all(
            isinstance(row, dict) for row in value
        ):
            yield _table(map(_plain, value))


def _is_table(tree: dict[str, Any]) -> bool:
    return all(
        isinstance(value, dict) and "median" in value
        for value in tree.values()
    )


def _flat(tree: dict[str, Any]) -> Row:
    """Return a row's plain values, and as n its number of picks if it has any."""
    picks = (
        {"n": f"{sum(tree['picks'].values()):,}"} if "picks" in tree else {}
    )
    return _plain(tree) | picks


def _measured(
    tree: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, Row]]:
    """Yield every value with a median as a row, named by its place in the file."""
    if "median" in tree:
        row = {
            name: _shown(tree[key])
            for key, name in _STATISTICS.items()
            if key in tree
        }
        yield (
            path,
            row
            | ({"ratio": f"{tree['ratio']:.2f}"} if "ratio" in tree else {}),
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
        if value is not None and not isinstance(value, dict | list)
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
    """Return a key as a heading, with its unit."""
    if key in _HEADERS:
        return _HEADERS[key]
    words, _, unit = key.rpartition("_")
    return (
        f"{_words(words)} ({unit.replace('mb', 'MB')})"
        if words and unit in UNIT_SUFFIXES
        else key.replace("_", " ")
    )


def _shown(value: Any) -> str:
    """Return a value as text, a float with four digits: further ones are noise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value) or isinstance(value, int):
        return f"{value:,}"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):,.{max(0, digits)}f}"
