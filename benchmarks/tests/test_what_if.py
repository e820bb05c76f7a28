"""The predictions of what-if on made-up machines: near, and within their intervals as often as these say."""

from __future__ import annotations

from benchmarks.what_if import replay


def test_made_up_machines_are_predicted_within_the_intervals() -> None:
    found = replay(worlds=10, seed=7)["all"]
    assert found["predictions"] == 10 * 6
    assert found["coverage"] >= 0.9
    assert found["median_error"] <= 0.15
