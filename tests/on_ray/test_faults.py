"""What befalls a Ray run: asked to stop, drained, hung, out of memory in mid-training. The curve stays the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.specs import evaluations, losses, make
from tests.waits import when
from trainers.launch.local import run_local
from trainers.launch.spec import RunSpec

pytestmark = pytest.mark.ray


def has_checkpoint(spec: RunSpec) -> bool:
    return any(spec.storage.exists(f"checkpoints/{name}/manifest.json") for name in spec.storage.names("checkpoints"))


def assert_equal_curves(spec: RunSpec, tmp_path: Path, **changes: Any) -> None:
    unbroken = make(tmp_path, name="unbroken", **changes)
    run_local(unbroken)
    assert losses(spec) == pytest.approx(losses(unbroken), rel=1e-5)
    assert len(losses(spec)) == len(losses(unbroken))
    for ours, theirs in zip(evaluations(spec), evaluations(unbroken), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.full
def test_asked_to_stop_it_keeps_its_state_and_goes_on(tmp_path: Path, driver: Any) -> None:
    """SIGTERM is what `ray job stop` sends to the driver."""
    from trainers.on_ray.trainer import run_on_ray

    endless = make(tmp_path, name="stopped", launcher="ray", max_steps=1_000_000, log_every_steps=10)
    when(lambda: has_checkpoint(endless), lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = run_on_ray(endless)
    assert result.status == "stopped"
    assert result.checkpoint is not None
    assert result.checkpoint.endswith(f"step-{result.steps:012d}"), "nothing before the stop is done again"

    steps = result.steps + 20 - result.steps % 10
    rest = make(tmp_path, name="stopped", launcher="ray", max_steps=steps, log_every_steps=10)
    assert run_on_ray(rest).status == "done"
    assert_equal_curves(rest, tmp_path, max_steps=steps, log_every_steps=10)


def test_out_of_memory_on_one_rank_in_mid_training(tmp_path: Path, driver: Any) -> None:
    """The group starts again with half the microbatch; the result is that of the same global batch."""
    from trainers.on_ray.trainer import run_on_ray

    args = {"fail_at": 17, "failure": "oom on rank 1", "marker": str(tmp_path / "oom")}
    spec = make(tmp_path, name="oom", launcher="ray", task_args=args, scaling__num_workers=2)
    result = run_on_ray(spec)
    assert (tmp_path / "oom").exists()
    assert (result.status, result.microbatch_size, result.accumulation) == ("done", 6, 2)
    assert_equal_curves(spec, tmp_path)
