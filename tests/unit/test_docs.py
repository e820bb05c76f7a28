"""The documents are current: the pages that are made, the tree's map, and the files that the README names."""

import inspect
import json
import re
import runpy

import pytest

from tests.specs import REPOSITORY
from trainers.task import Task

PAGES = runpy.run_path(str(REPOSITORY / "docs/make.py"))["PAGES"]
PEERS = ("paceline", "ray prepare", "accelerate", "fabric", "lightning")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_is_made_is_current(page: str) -> None:
    assert (REPOSITORY / f"docs/{page}.md").read_text() == PAGES[page](), "run `make docs`"


def test_every_method_of_a_task_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)\(([\w, ]*)\)`", (REPOSITORY / "docs/tasks.md").read_text(), re.MULTILINE)
    methods = {name: inspect.signature(method) for name, method in vars(Task).items() if not name.startswith("_")}
    assert sorted(rows) == sorted((name, ", ".join(list(found.parameters)[1:])) for name, found in methods.items())
    assert all(method.__doc__ for name, method in vars(Task).items() if name in methods)


def test_the_tests_that_show_a_promise_are_there() -> None:
    named = re.findall(r"`((?:tests|trainers|cluster)/[\w/.]*\w)`", (REPOSITORY / "SECURITY.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_the_readmes_figures_are_the_newest_results() -> None:
    newest = max((REPOSITORY / "benchmarks/results").glob("loop-*-cpu.json"))
    text = (REPOSITORY / "README.md").read_text()
    for found in json.loads(newest.read_text())["results"].values():
        rows = found["rows"]
        ratios = " | ".join(f"{rows[peer]['ratio']:.2f} x" for peer in PEERS)
        assert f"| {rows['plain']['median']:,.0f} | {ratios} | {found['floor']:.1%} |" in text
        assert f"medians of {rows['plain']['n']}" in text


def test_the_readmes_sweep_is_the_newest_result() -> None:
    results = REPOSITORY / "benchmarks/results"
    text = " ".join((REPOSITORY / "README.md").read_text().split())
    found = json.loads(max(results.glob("sweep-2*-cpu.json")).read_text())["results"]
    few, many = found["rows"]
    ray = f"{few['ray_s']:.0f} s as Ray documents it ({'two of them measured' if few['ray_measured'] == 2 else 'all'}"
    assert f"took {few['lanes_s']:.0f} s through lanes, start included, and {ray}" in text
    assert f"24 trials {many['lanes_s']:.0f} s and {many['ray_s']:.0f} s" in text
    noop = json.loads(max(results.glob("sweep-noop-*-cpu.json")).read_text())["results"]
    assert f"the last cost {noop['last_s']:.2f} s each, the first {noop['first_s']:.2f} s" in text
