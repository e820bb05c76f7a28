"""The documents are current: the reference page, the tree's map, and the files that the README names."""

from __future__ import annotations

import json
import re
import runpy

from tests.specs import REPOSITORY


def test_the_configuration_reference_is_current() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs/make.py"))["page"]()
    assert (REPOSITORY / "docs/config.md").read_text() == page, "run `make docs`"


def test_what_the_readme_names_is_there() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for name in re.findall(r"(?:examples|cluster|docs)/[\w./-]*\w", text):
        assert (REPOSITORY / name).exists(), name
    targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"\bmake (sweep|test|lint|docs|install)\b", text):
        assert target in targets
    for name in re.findall(r"^    (\w+)/ ", text, re.MULTILINE):
        assert (REPOSITORY / name).is_dir(), name


def test_the_readmes_figures_are_the_newest_results() -> None:
    newest = max((REPOSITORY / "benchmarks/results").glob("loop-*-cpu.json"))
    text = (REPOSITORY / "README.md").read_text()
    for found in json.loads(newest.read_text())["results"].values():
        rows = found["rows"]
        ratios = " | ".join(f"{rows[peer]['ratio']:.2f} x" for peer in ("paceline", "accelerate", "fabric"))
        assert f"| {rows['plain']['median']:,.0f} | {ratios} | {found['floor']:.1%} |" in text
        assert f"medians of {rows['plain']['n']}" in text
