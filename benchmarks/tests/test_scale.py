"""The scale benchmark in miniature, and what it makes of its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import make_state
from benchmarks.scale import trial_costs
from benchmarks.scale_parameters import PARAMETERS, Square, by_parameters, explain, plain_write_ms, verdict


def test_a_cost_that_is_fixed_plus_so_much_a_unit_is_explained() -> None:
    line = explain([10, 100, 1000], [15.0, 60.0, 510.0])
    assert line["fixed"] == pytest.approx(10)
    assert line["unit"] == pytest.approx(0.5)
    assert line["off"] == pytest.approx(1)


def test_a_cost_that_grows_faster_is_not() -> None:
    assert explain([10, 100, 1000], [1.0, 100.0, 10_000.0])["off"] > 5
    assert explain([10, 100, 1000], [1.0, 100.0, 101.0])["off"] > 5


def test_the_verdict_says_what_bends() -> None:
    sizes, straight, bent = [10, 100, 1000], [15.0, 60.0, 510.0], [1.0, 10.0, 1000.0]
    assert verdict(sizes, straight) == "flat"
    assert verdict(sizes, [5.0, 6.0, 5.5]) == "the same at every size"
    assert verdict(sizes, bent) == verdict(sizes, bent, straight) == "NOT EXPLAINED"
    assert verdict(sizes, bent, [cost / 3 for cost in bent]).startswith("the machine's own cost bends as much")


def test_trials_are_counted_from_the_time_when_all_lanes_are_up() -> None:
    # Lane 0 is up after 10 s and alone until lane 1 comes at 20 s; from then on a trial ends every second.
    early = [(100.0 + second, 0) for second in range(10, 20)]
    both = [(100.0 + second, second % 2) for second in range(20, 61)]
    ends, lanes = zip(*[(at, 1 if at == 120.0 else lane) for at, lane in [*early, *both]], strict=True)
    lanes = tuple(0 if at < 120.0 else lane for at, lane in zip(ends, lanes, strict=True))
    found = trial_costs(ends, lanes, began=100.0)
    assert found["up_s"] == 20.0
    assert found["trial_s"] == found["first_s"] == found["last_s"] == 1.0


def test_a_lane_that_came_too_late_gives_no_figure() -> None:
    with pytest.raises(RuntimeError, match="of 11 trials hardly one ended after the last lane was up"):
        trial_costs([float(second) for second in range(11)], [0] * 10 + [1], began=-5.0)


def test_trials_that_become_dearer_show_it() -> None:
    ends = [0.0]
    for number in range(100):
        ends.append(ends[-1] + (1.0 if number < 50 else 3.0))
    found = trial_costs(ends, [0] * len(ends), began=-5.0)
    assert (found["first_s"], found["last_s"], found["trial_s"]) == (1.0, 3.0, 2.0)


@pytest.mark.parametrize("parameters", PARAMETERS[:3])
def test_the_model_has_as_many_parameters_as_it_says(parameters: int) -> None:
    model = Square(parameters).model()
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_the_floor_of_a_checkpoint_writes_every_byte(tmp_path: Path) -> None:
    assert plain_write_ms(make_state(2, torch.device("cpu")), tmp_path) > 0
    assert (tmp_path / "plain").stat().st_size == pytest.approx(2 * 2**20, rel=0.01)


def test_parameters_in_miniature() -> None:
    found = by_parameters([10_000, 40_000], rounds=1)
    assert found["rows"].keys() == {10_000, 40_000}
    for row in found["rows"].values():
        assert row.keys() > {"step", "step floor", "checkpoint", "checkpoint floor", "lane reset"}
        assert all(one["median"] > 0 for one in row.values())
