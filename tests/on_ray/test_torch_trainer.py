"""The TorchTrainer around the loop: failures by kind, each with its own
budget, and what Ray is told.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from tests.on_ray.embedded import actors
from tests.specs import REPOSITORY, evaluations, losses, make, tree
from tests.waits import until, when
from trainers.errors import ConfigError, RunFailedError
from trainers.launch.local import run_local

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_an_error_of_the_task_is_not_retried(tmp_path, driver):
    from trainers.on_ray.trainer import run_on_ray

    spec = make(
        tmp_path, launcher="ray", task_args={"fail_at": 3, "failure": "raise"}
    )
    with pytest.raises(
        RunFailedError,
        match=r"rank 0: ValueError: injected: the task fails here \(tasks.py:\d+\)",
    ) as met:
        run_on_ray(spec)
    assert met.value.status == "error"


@pytest.mark.full
def test_elastic_workers_though_a_killed_driver_had_them(
    tmp_path, cluster, driver
):
    """Ray believes for 180 s that a run whose driver was killed still needs
    what it had.
    """
    from trainers.on_ray.trainer import run_on_ray

    options = {
        "launcher": "ray",
        "scaling__num_workers": [1, 2],
        "task_args": {"pause_s": 0.02},
    }
    endless = tree(tmp_path, **options, max_steps=1_000_000)
    run = make(tmp_path, **options).storage
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(endless))
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    killed = subprocess.Popen(
        [sys.executable, "-m", "trainers", str(file)],
        cwd=REPOSITORY,
        env=environment,
    )
    kept = "checkpoints/step-000000000020/manifest.json"
    try:
        until(lambda: run.exists(kept), "a checkpoint", process=killed)
    finally:
        killed.kill()
        killed.wait()
    alive = ("state", "=", "ALIVE"), ("class_name", "=", "RayTrainWorker")
    until(
        lambda: not actors(*alive), "the end of its workers, which trained on"
    )
    newest = max(int(name[5:]) for name in run.names("checkpoints"))
    spec = make(tmp_path, **options, max_steps=newest + 10)
    result = run_on_ray(spec)
    assert result.status == "done"
    assert result.world_size == 2, (
        "as many as the cluster holds, without a wait for those 180 s"
    )
    assert len(losses(spec)) == result.steps == newest + 10
    kept = json.loads(spec.storage.read("environment.json"))
    assert kept["device"] == "cpu"
    assert {"torch", "ray", "python"} <= set(kept)


def test_a_group_that_waits_for_nodes_asks_once_a_second(driver):
    from ray.train.v2._internal.execution.controller.state import (
        InitializingState,
    )

    from trainers.on_ray.trainer import ASK_AGAIN_S, NodeCount

    callback, waits = NodeCount(), InitializingState()
    began = time.monotonic()
    for _ in range(3):  # Ray's loop has no pause of its own
        callback.after_controller_state_update(waits, waits)
    assert time.monotonic() - began >= 3 * ASK_AGAIN_S


def test_more_workers_than_the_cluster_can_hold(tmp_path, driver):
    from trainers.on_ray.cluster import check_cluster

    with pytest.raises(
        ConfigError,
        match=r"scaling.num_workers: 3` must fit on .* 2 CPUs .* at most 2\.",
    ):
        check_cluster(make(tmp_path, launcher="ray", scaling__num_workers=3))
    with pytest.raises(ConfigError, match="add nodes with a GPU"):
        check_cluster(make(tmp_path, launcher="ray", scaling__use_gpu=True))
    assert (
        check_cluster(make(tmp_path, launcher="ray", scaling__num_workers=2))
        == "cpu"
    )


def test_what_the_cluster_file_allows_counts_before_it_is_up(
    tmp_path, driver, monkeypatch
):
    """As on the head of a `ray up` cluster that grows from zero."""
    from trainers.on_ray import capacity as growth
    from trainers.on_ray.capacity import capacity

    types = {
        "head": {"resources": {"CPU": 0}, "max_workers": 0},
        "spot": {"resources": {"CPU": 8, "GPU": 1}, "max_workers": 3},
    }
    file = tmp_path / "ray_bootstrap_config.yaml"
    file.write_text(
        json.dumps(
            {
                "available_node_types": types,
                "head_node_type": "head",
                "max_workers": 2,
            }
        )
    )
    monkeypatch.setattr(growth, "BOOTSTRAP", file)
    growth._file.cache_clear()
    with monkeypatch.context() as patch:
        own = SimpleNamespace(is_head=lambda: True)
        patch.setattr(growth, "own_node", lambda: own)
        assert capacity().get("GPU") is None, (
            "a cluster of this process is not the one of the file"
        )
    growth._file.cache_clear()
    monkeypatch.delenv("RAY_ADDRESS")
    assert (capacity()["CPU"], capacity()["GPU"]) == (16, 2)
    growth._file.cache_clear()


def has_checkpoint(spec):
    return any(
        spec.storage.exists(f"checkpoints/{name}/manifest.json")
        for name in spec.storage.names("checkpoints")
    )


def assert_equal_curves(spec, tmp_path, **changes):
    unbroken = make(tmp_path, name="unbroken", **changes)
    run_local(unbroken)
    assert losses(spec) == pytest.approx(losses(unbroken), rel=1e-5)
    assert len(losses(spec)) == len(losses(unbroken))
    for ours, theirs in zip(
        evaluations(spec), evaluations(unbroken), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.full
def test_asked_to_stop_it_keeps_its_state_and_goes_on(tmp_path, driver):
    """SIGTERM is what `ray job stop` sends to the driver."""
    from trainers.on_ray.trainer import run_on_ray

    endless = make(
        tmp_path,
        name="stopped",
        launcher="ray",
        max_steps=1_000_000,
        log_every_steps=10,
    )
    when(
        lambda: has_checkpoint(endless),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    result = run_on_ray(endless)
    assert result.status == "stopped"
    assert result.checkpoint.endswith(f"step-{result.steps:012d}"), (
        "nothing before the stop is done again"
    )

    steps = result.steps + 20 - result.steps % 10
    rest = make(
        tmp_path,
        name="stopped",
        launcher="ray",
        max_steps=steps,
        log_every_steps=10,
    )
    assert run_on_ray(rest).status == "done"
    assert_equal_curves(rest, tmp_path, max_steps=steps, log_every_steps=10)
