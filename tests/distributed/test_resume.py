"""Killed, and resumed on another number of workers, though the batch size
changes: the same samples, the same curve.
"""

from pathlib import Path

import pytest

from tests.specs import losses, make
from trainers.errors import RunFailedError
from trainers.launch.local import run_local, run_spawn


def spec(tmp_path, name, workers, kill_at=(), **changes):
    args = {"dtype": "float64"}
    if kill_at:
        args |= {
            "fail_at": list(kill_at),
            "failure": "kill",
            "marker": str(tmp_path / f"{name}-killed"),
        }
    changes = {
        "name": name,
        "launcher": "spawn",
        "max_steps": 40,
        "checkpoint__every_steps": 3,
        **changes,
    }
    return make(
        tmp_path, task_args=args, scaling__num_workers=workers, **changes
    )


def run_killed(killed, marker):
    with pytest.raises(RunFailedError) as met:
        run_spawn(killed)
    assert met.value.status == "node_lost"
    assert Path(killed.config.task_args["marker"]).with_name(marker).exists()


def test_so_is_a_run_whose_batch_size_changes_in_mid_epoch(tmp_path):
    changes = {
        "batch_schedule": [
            {"until_samples": 130, "size": 12},
            {"until_samples": 300, "size": 31},
            {"size": 50},
        ],
        "global_batch_size": None,
        "microbatch_size": 7,
        "lr_scaling": {"rule": "linear", "base_batch_size": 12},
        "lr_schedule__name": "cosine",
        "lr_schedule__warmup": 0.1,
        "max_steps": None,
        "epochs": 6,
    }
    unbroken = spec(tmp_path, "unbroken", 1, launcher="local", **changes)
    result = run_local(unbroken)
    run_killed(spec(tmp_path, "moved", 2, [24], **changes), "moved-killed")
    moved = spec(tmp_path, "moved", 3, [24], **changes)
    assert run_spawn(moved).samples == result.samples == 6 * 203
    assert losses(moved) == pytest.approx(losses(unbroken), rel=1e-12)
    assert len(losses(moved)) == result.steps
