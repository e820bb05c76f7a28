"""benchmarks/README.md names every script and kept file, and quotes them."""

from __future__ import annotations

import json
import re

from benchmarks.__main__ import FULL, SHORT
from benchmarks.gpu import PARTS
from tests.specs import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
TEXT = (FOLDER / "README.md").read_text()


def test_every_script_is_in_the_table():
    named = set(re.findall(r"^\| `(\w+\.py)`", TEXT, re.MULTILINE))
    assert all((FOLDER / name).is_file() for name in named)
    scripts = {f"{script.module}.py" for script in (*SHORT, *FULL)}
    of_parts = {part.arguments[0] for part in PARTS if not part.is_test}
    scripts |= {
        f"{module.removeprefix('benchmarks.')}.py" for module in of_parts
    }
    assert scripts <= named


def test_every_kept_file_is_named():
    kept = {path.name for path in (FOLDER / "results").iterdir()}
    assert kept == set(re.findall(r"results/([\w.-]+\.(?:json|md))", TEXT))


def test_the_targets_are_there():
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)", TEXT)):
        assert re.search(
            rf"^[\w -]*\b{target}\b[\w -]*:", makefile, re.MULTILINE
        ), target


def test_quoted_ratios_are_the_kept_ones():
    (before, after) = re.findall(
        r"`loop-2026-11-20-cpu.json`.*\| ([\d.]+) x \| ([\d.]+) x \|", TEXT
    )[0]
    old = json.loads(
        (FOLDER / "results/loop-2026-11-20-cpu.json").read_text()
    )["results"]["mlp"]
    new = json.loads(
        (FOLDER / "results/loop-2026-11-21-cpu.json").read_text()
    )["results"]["mlp, 1 rank"]
    assert before == f"{old['rows']['paceline']['ratio']:.2f}"
    assert after == f"{new['rows']['paceline']['ratio']:.2f}"
