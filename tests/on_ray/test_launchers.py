"""One loop: the launchers agree, bit for bit at equal world size, and with one
process to rounding.
"""

import sys
from pathlib import Path

import pytest

from tests.distributed.processes import forked_launcher
from tests.specs import evaluations, losses, make, tree
from trainers.config.yaml import dump_yaml
from trainers.launch.local import run_local, run_spawn

pytestmark = pytest.mark.ray

STEPS = 50


@pytest.mark.full
def test_launchers_agree(tmp_path, command, driver):
    """Though a worker of the run on Ray is killed, and one rank out of memory later."""
    from trainers.on_ray.trainer import run_on_ray

    args = {"dtype": "float64"}
    two = {"max_steps": STEPS, "scaling__num_workers": 2}
    spawned = make(
        tmp_path, name="spawn", launcher="spawn", task_args=args, **two
    )
    with forked_launcher():
        run_spawn(spawned)

    killed = {
        "fail_at": [17, 35],
        "failure": ["kill", "oom on rank 1"],
        "marker": str(tmp_path / "failed"),
    }
    rayed = make(
        tmp_path, name="ray", launcher="ray", task_args=args | killed, **two
    )
    result = run_on_ray(rayed)
    assert len([*tmp_path.glob("failed-*")]) == 2
    assert (result.status, result.world_size) == ("done", 2)
    assert (result.microbatch_size, result.accumulation) == (6, 2)
    assert result.checkpoint.endswith(f"step-{STEPS:012d}")

    file = tmp_path / "torchrun.yaml"
    file.write_text(
        dump_yaml(
            tree(tmp_path, name="torchrun", task_args=args, max_steps=STEPS)
        )
    )
    torchrun = str(Path(sys.executable).parent / "torchrun")
    # fmt: off
    done = command("--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 -m trainers", str(file), program=(torchrun,))
    # fmt: on
    assert done.code == 0, done.err
    assert (
        "global batch 24 = microbatch 12 x accumulation 1 x 2 workers (torchrun"
        in done.out
    )
    torchrunned = make(
        tmp_path, name="torchrun", task_args=args, max_steps=STEPS
    )

    alone = make(tmp_path, name="local", task_args=args, max_steps=STEPS)
    run_local(alone)
    assert len(losses(spawned)) == STEPS
    assert losses(spawned) == losses(torchrunned)
    assert evaluations(spawned) == evaluations(torchrunned)
    # From step 30 on it has halves, whose sums round otherwise.
    assert losses(rayed)[:30] == losses(spawned)[:30]
    assert evaluations(rayed)[:3] == evaluations(spawned)[:3]
    assert losses(rayed) == pytest.approx(losses(spawned), rel=1e-9)
    assert evaluations(rayed)[-1] == pytest.approx(
        evaluations(spawned)[-1], rel=1e-9
    )
    assert losses(alone) == pytest.approx(
        losses(spawned), rel=1e-12, abs=1e-12
    )
    assert losses(alone)[-1] < 0.8 * losses(alone)[0], (
        "nothing was learned: the curves prove nothing"
    )
