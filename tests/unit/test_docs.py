"""The documents are current: the pages that are made, the tree's map, and the
files that the README names.
"""

import inspect
import re
import runpy

import pytest

from tests.specs import REPOSITORY, read_json
from trainers.task import Task

PAGES = runpy.run_path(str(REPOSITORY / "docs/make.py"))["PAGES"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_is_made_is_current(page):
    assert (REPOSITORY / f"docs/{page}.md").read_text() == PAGES[page](), (
        "run `make docs`"
    )


def test_every_method_of_a_task_has_its_row():
    rows = re.findall(
        r"^\| `(\w+)\(([\w, ]*)\)`",
        (REPOSITORY / "docs/tasks.md").read_text(),
        re.MULTILINE,
    )
    methods = {
        name: inspect.signature(method)
        for name, method in vars(Task).items()
        if not name.startswith("_")
    }
    assert sorted(rows) == sorted(
        (name, ", ".join(list(found.parameters)[1:]))
        for name, found in methods.items()
    )
    assert all(
        method.__doc__
        for name, method in vars(Task).items()
        if name in methods
    )


def test_the_tests_that_show_a_promise_are_there():
    named = re.findall(
        r"`((?:tests|trainers|cluster)/[\w/.]*\w)`",
        (REPOSITORY / "SECURITY.md").read_text(),
    )
    assert len(named) > 10
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_the_readmes_loop_is_the_newest_result():
    newest = max((REPOSITORY / "benchmarks/results").glob("loop-*-cpu.json"))
    found = read_json(newest)["results"]
    works = [
        found[name]
        for name in (
            "mlp, 1 rank",
            "cnn, 1 rank",
            "mlp, 2 ranks",
            "cnn, 2 ranks",
        )
    ]
    ours = [f"{work['rows']['paceline']['ratio']:.2f}" for work in works]
    lightning = [f"{work['rows']['lightning']['ratio']:.2f}" for work in works]
    text = words("README.md")
    assert (
        f"on one rank {ours[0]} times the samples/s for an MLP and {ours[1]} times for a CNN"
        in text
    )
    assert f"on two ranks {ours[2]} and {ours[3]} times" in text
    assert (
        f"Lightning reaches {', '.join(lightning[:3])} and {lightning[3]} times"
        in text
    )
    assert (
        f"medians of {works[0]['rows']['plain']['n']} interleaved rounds"
        in text
    )
    assert (
        f"below {max(work['floor'] for work in works) * 100:.1f} % is noise"
        in text
    )


def test_the_sweeps_that_pages_name_are_the_newest_results():
    results = REPOSITORY / "benchmarks/results"
    found = read_json(max(results.glob("sweep-2*-cpu.json")))["results"]
    few, many = found["rows"]
    ray = f"{few['ray_s']:.0f} s with plain Ray, as documented ({'two trials measured' if few['ray_measured'] == 2 else 'all'}"
    text = words("README.md")
    assert (
        f"took {few['lanes_s']:.0f} s through Paceline, start included, and {ray}"
        in text
    )
    assert (
        f"24 trials took {many['lanes_s']:.0f} s with Paceline, and {many['ray_s']:.0f} s with plain Ray"
        in text
    )
    noop = read_json(max(results.glob("sweep-noop-*-cpu.json")))["results"]
    assert (
        f"the first cost {noop['first_s']:.2f} s each, the last {noop['last_s']:.2f} s"
        in words("docs/scale.md")
    )


def words(page):
    """A page without its line breaks."""
    return " ".join((REPOSITORY / page).read_text().split())
