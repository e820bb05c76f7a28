"""Throughput between and beyond measured batch sizes: exact where runs repeat themselves, else smoothed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tune.search.speed_model import Rates, log_speeds
from tune.search.time_model import Place

SIZES = [16, 32, 64, 128, 256, 512, 1024]
PLACES = [Place(setting, "all", size) for setting in ("fp32", "bf16") for size in SIZES]


def so(place: Place) -> float:
    """A device that fills up, a third faster in bf16."""
    return math.log((4 / 3 if place.setting == "bf16" else 1.0) * 1e5 / (1 + 200 / place.size))


def measured(spread: float, seed: int, places: list[Place]) -> Rates:
    rng = np.random.default_rng(seed)
    return Rates({place: (math.exp(so(place) + spread * rng.standard_normal()), 0.01) for place in places})


def test_without_any_measurement_nothing_is_told_apart() -> None:
    means, widths = log_speeds(PLACES, [Rates({})])
    assert set(means) == {0.0}
    assert set(widths) == {0.5}


def test_where_runs_repeat_themselves_measured_is_what_is_so() -> None:
    known = [place for place in PLACES if place.size in (16, 64, 256, 1024)]
    means, widths = log_speeds(PLACES, [measured(0.0, 0, known)])
    for place, mean, width in zip(PLACES, means, widths, strict=True):
        assert mean == pytest.approx(so(place), abs=0.02 if place in known else 0.06)
        assert width < 0.08
    # What a measured place does is as sure as its measurement; one beyond them is not.
    [beyond], [unsure] = log_speeds([Place("fp32", "all", 8192)], [measured(0.0, 0, known)])
    assert unsure > 3 * max(widths)
    assert abs(beyond - so(Place("fp32", "all", 8192))) < 3 * unsure


def test_where_they_do_not_neighbours_and_other_settings_tell_more_than_one_run() -> None:
    ours, alone = [], []
    for seed in range(20):
        rates = measured(0.15, seed, PLACES)
        means, widths = log_speeds(PLACES, [rates])
        ours += [mean - so(place) for place, mean in zip(PLACES, means, strict=True)]
        alone += [math.log(rates.speeds[place][0]) - so(place) for place in PLACES]
        assert np.median(widths) > 0.03
    assert np.std(ours) < 0.7 * np.std(alone)


def test_a_setting_without_a_measurement_is_guessed_by_the_others_and_unsure() -> None:
    known = [place for place in PLACES if place.setting == "fp32"]
    means, widths = log_speeds(PLACES, [measured(0.0, 0, known)])
    assert min(widths[len(SIZES) :]) > 0.3
    assert list(np.argsort(means[len(SIZES) :])) == list(range(len(SIZES)))


def test_an_earlier_sweep_that_may_be_off_as_a_whole_tells_the_shape_alone() -> None:
    shape = measured(0.0, 0, PLACES[: len(SIZES)])
    twice = Rates({place: (2 * rate, width) for place, (rate, width) in shape.speeds.items()}, "earlier", 0.7)
    here = Rates({PLACES[3]: shape.speeds[PLACES[3]]})
    means, _ = log_speeds(PLACES[: len(SIZES)], [here, twice])
    for place, mean in zip(PLACES, means, strict=False):
        assert mean == pytest.approx(so(place), abs=0.15)
