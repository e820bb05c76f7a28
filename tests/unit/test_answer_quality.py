"""The claim of benchmarks/answer.py, on the frozen ground truth: right picks for less than a third of the grid."""

from __future__ import annotations

import pytest

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
