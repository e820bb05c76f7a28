"""What befalls a Ray run: asked to stop, drained, hung, out of memory in mid-training. The curve stays the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster
from tests.metadata_service import metadata_service
from tests.on_ray.nodes import Node, another_node
from tests.specs import evaluations, losses, make
from tests.waits import HANG_S, when
from trainers.launch.local import run_local
from trainers.launch.spec import RunSpec
from trainers.measure.run_log import read_log

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


@pytest.fixture
def second_node(cluster: Cluster, driver: Any) -> Iterator[Node]:
    """Another node of two CPUs, of which Ray's coordinator of elastic groups has heard."""
    from trainers.on_ray.trainer import count_nodes

    with another_node(cluster, driver, cpus=2) as node:
        count_nodes()
        yield node


@pytest.mark.campaign  # the lab drains a host, too
@pytest.mark.full
def test_a_drained_node_costs_no_step(tmp_path: Path, second_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher hears that EC2 takes a machine: all ranks keep the state at once, and go on with one worker less."""
    from trainers.on_ray.trainer import run_on_ray

    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")  # off where the cluster is embedded
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")
    started = tmp_path / "started"
    spec = make(
        tmp_path,
        name="drained",
        launcher="ray",
        scaling__num_workers=[1, 2],
        scaling__cpus_per_worker=2,
        max_steps=800,
        max_time_s=480.0,
        log_every_steps=100,
        evaluate__every_steps=400,
        checkpoint__every_steps=100_000,
        task_args={"pause_s": 0.01, "pids": str(started)},
    )
    with metadata_service() as machine:
        command = [sys.executable, "-m", "cluster", "watch", "aws", "--address", machine.address]
        watcher = subprocess.Popen([*command, "--node", second_node.id], stdout=subprocess.PIPE, text=True)

        def take_away() -> None:
            time.sleep(2)  # amid the first steps: the log is on storage only when something is kept
            machine.action = {"action": "terminate", "time": datetime.fromtimestamp(time.time() + 12, UTC).isoformat()}
            time.sleep(12)  # the deadline
            second_node.cut_power()

        when(started.exists, take_away)
        result = run_on_ray(spec)
        assert "Ray drains the node" in watcher.communicate(timeout=HANG_S)[0]
    assert (result.status, result.world_size) == ("done", 1)
    records = [record["step"] for record in read_log(spec.storage) if "train_loss" in record]
    assert records == sorted(set(records)), "no step is logged twice"
    at_notice, at_end = (int(name.removeprefix("step-")) for name in spec.storage.names("checkpoints"))
    assert 0 < at_notice < at_end == 800
