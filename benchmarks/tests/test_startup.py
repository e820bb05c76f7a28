"""The start-up benchmark in miniature."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.startup import first_step_ms, floor_command, measure, paceline_command


@pytest.mark.campaign
def test_first_steps_are_timed() -> None:
    found = measure("local", rounds=1)
    assert found["rows"].keys() == {"floor", "paceline", "floor again"}
    assert all(row["median"] > 100 for row in found["rows"].values()), "no command imports torch in less"
    times = {name: row["median"] for name, row in found["rows"].items()}
    assert found["above_floor_ms"]["median"] == pytest.approx(times["paceline"] - times["floor"])


def test_first_steps_under_torchrun_are_timed(tmp_path: Path) -> None:
    assert first_step_ms(floor_command("torchrun")) > 100
    assert first_step_ms(paceline_command("torchrun", tmp_path)) > 100


def test_on_ray_both_train_in_as_many_workers() -> None:
    assert floor_command("ray")[-1] == "2"
    assert paceline_command("ray", Path("/tmp"))[-4:] == ["--launcher", "ray", "--scaling.num_workers", "2"]


def test_a_command_without_a_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        first_step_ms([sys.executable, "-c", "raise SystemExit(3)"])
