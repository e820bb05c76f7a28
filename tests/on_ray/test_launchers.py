"""One loop: the launchers agree, bit for bit at equal world size, and with one process to rounding."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.specs import evaluations, losses, make, tree
from trainers.config.yaml import dump_yaml
from trainers.launch.local import run_local, run_spawn
from trainers.launch.spec import RunSpec

pytestmark = pytest.mark.ray

# float64: every step of the curve to 1e-12 over 50 steps; fp32: to 1e-6 over 10.
CASES = [("float64", 50, 1e-12)]


def on_torchrun(directory: Path, command: Command, **changes: Any) -> RunSpec:
    file = directory / "torchrun.yaml"
    file.write_text(dump_yaml(tree(directory, name="torchrun", **changes)))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    # fmt: off
    done = command("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                   "-m", "trainers", str(file), program=(torchrun,))
    # fmt: on
    assert done.code == 0, done.err
    assert "global batch 24 = microbatch 12 x accumulation 1 x 2 workers (torchrun" in done.out
    return make(directory, name="torchrun", **changes)


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), CASES)
@pytest.mark.full
def test_launchers_agree(
    dtype: str, steps: int, tolerance: float, tmp_path: Path, command: Command, driver: Any
) -> None:
    from trainers.on_ray.trainer import run_on_ray

    changes = {"task_args": {"dtype": dtype}, "max_steps": steps}
    two = {**changes, "scaling__num_workers": 2}
    spawned = make(tmp_path, name="spawn", launcher="spawn", **two)
    run_spawn(spawned)
    rayed = make(tmp_path, name="ray", launcher="ray", **two)
    result = run_on_ray(rayed)
    torchrunned = on_torchrun(tmp_path, command, **changes)
    alone = make(tmp_path, name="local", **changes)
    run_local(alone)

    assert result.world_size == 2
    assert len(losses(spawned)) == steps
    assert losses(spawned) == losses(rayed) == losses(torchrunned)
    assert evaluations(spawned) == evaluations(rayed) == evaluations(torchrunned)
    assert losses(alone) == pytest.approx(losses(spawned), rel=tolerance, abs=tolerance)
    assert losses(alone)[-1] < 0.8 * losses(alone)[0], "nothing was learned: the curves prove nothing"
