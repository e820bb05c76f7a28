"""The start-up benchmark in miniature, and what a start may not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup import REPOSITORY, first_step_ms, floor_command, measure, paceline_command

# What takes long to import and no small run needs: 1 to 8 s each.
# fmt: off
HEAVY = {
    "ray", "torchvision", "sklearn", "scipy", "pandas", "matplotlib", "transformers", "torchmetrics", "tensorboardX",
}
# fmt: on
_SAY = """
import json, sys
from trainers.__main__ import main
code = main(sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
raise SystemExit(code)
"""


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


def test_a_local_run_imports_nothing_heavy_but_torch(tmp_path: Path) -> None:
    arguments = paceline_command("local", tmp_path / "runs")[3:]
    command = [sys.executable, "-c", _SAY, str(tmp_path / "modules"), *arguments]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=200)
    imported = set(json.loads((tmp_path / "modules").read_text()))
    assert "torch" in imported
    assert not imported & HEAVY
    assert not imported & {"tune", "cluster"}
