"""Whether two runs of a training function have reported the same (tune/ray/reports.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tune.lanes.comparison import difference


@pytest.mark.parametrize(
    ("again", "words"),
    [
        ([[{"loss": 0.5}], [{"loss": float("nan")}]], None),
        ([[{"loss": 0.5}]], None),
        ([[{"loss": 0.5, "epoch_time_s": 3.0, "processId": 7, "samples_per_s": 1e3}], [{"loss": float("nan")}]], None),
        ([[{"loss": 0.5}], [{"loss": 0.25}]], "`loss` is 0.25, not nan (report 2 of rank 0)"),
        ([[{"loss": 0.5, "accuracy": {"top5": 1}}]], "`accuracy.top5` is 1, not missing (report 1 of rank 0)"),
        ([[{"its end": "out of files"}]], "`loss` is missing, not 0.5 (report 1 of rank 0)"),
    ],
)
def test_a_difference_is_named(again: list[list[dict[str, Any]]], words: str | None) -> None:
    first = [[{"loss": 0.5}], [{"loss": float("nan")}]]
    assert difference(first, again) == words


def test_every_rank_is_compared() -> None:
    assert difference([[{"x": 1}, {"x": 2}]], [[{"x": 1}, {"x": 3}]]) == "`x` is 3, not 2 (report 1 of rank 1)"
