"""Intervals: what a trial needed to the target, in samples and in dollars."""

from __future__ import annotations

import pytest

from tune.trials.interval import Interval, dollars, samples_to_target


def test_dollars_are_for_the_time_on_a_lane() -> None:
    assert dollars(3600, 12.0) == 12.0
    assert dollars(1800, 3.0) == 1.5


def test_the_target_was_met_between_two_evaluations() -> None:
    curve = [{"step": 100.0}, {"step": 200.0}, {"step": 300.0}]
    assert samples_to_target(curve, 2, 64) == Interval(16_000.0, 12_800.0, 19_200.0)
    assert samples_to_target(curve, 0, 64).low == 0.0


def test_an_interval_holds_its_value() -> None:
    with pytest.raises(ValueError, match="must be between"):
        Interval(3.0, 4.0, 5.0)
