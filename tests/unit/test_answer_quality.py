"""The claims of benchmarks/answer.py and knowledge.py, on the frozen ground truth: right picks for less than a third of
the grid, and for less still after an earlier sweep.
"""

from __future__ import annotations

import pytest

import benchmarks.knowledge
from benchmarks.answer import judge, load


@pytest.mark.full
@pytest.mark.parametrize("name", ["digits", "rows"])
def test_the_search_finds_the_best_of_the_frozen_tables(name: str) -> None:
    table = load(name)
    assert len(table.places) == 16
    assert all(len(runs) == 3 for runs in table.runs.values())
    found = judge(table, replays=25)
    frontier, largest = found["searches"]["frontier"], found["searches"]["largest samples/s"]
    assert frontier["right"] >= 0.8
    assert frontier["ratio_worst"] < 1.5
    assert largest["right"] == 0  # the question would otherwise be none
    assert found["frontier_samples_of_grid"]["max"] <= 1 / 3
    assert found["rank_correlation"]["median"] > 0.7


@pytest.mark.full
def test_a_search_that_knows_an_earlier_one_takes_fewer_samples() -> None:
    found = benchmarks.knowledge.judge("digits", "rows", replays=2)
    for row in found["related"].values():
        assert row["samples_ratio"] < 0.8
        assert row["second"]["out_of_memory"] == 0
    assert found["related"]["a small memory"]["without"]["out_of_memory"] > 0
    for row in found["misleading"].values():
        assert row["samples_ratio"] < 1.6
