"""A sweep on a cluster with every tracker at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster
from tests.specs import BASE, REPOSITORY
from trainers.config.yaml import dump_yaml
from tune.sweeps.spec import read_saved
from tune.trials.journal import Journal

pytestmark = [pytest.mark.ray, pytest.mark.campaign]  # tests/unit/test_tracking_clients.py has a sweep


def test_every_tracker_has_the_sweep(
    tmp_path: Path, command: Callable[..., Any], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.unit.test_tracking_clients import assert_is_sweep, everywhere, send_rest

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking, environment = everywhere(tmp_path, "files")
    train = {key: value for key, value in BASE.items() if key not in ("launcher", "checkpoint")}
    train |= {"task_dir": str(REPOSITORY), "tracking": [*tracking, "tensorboard"]}  # a sweep has those of its run
    given = {"train": train, "space": {"global_batch_size": [8, 24], "seed": [1, 2]}, "lanes": 1}
    (tmp_path / "sweep.yaml").write_text(dump_yaml({**given, "storage_path": str(tmp_path)}))
    start = ("-m", "tune", str(tmp_path / "sweep.yaml"), "--no-check")
    done = command(*start, cwd=tmp_path, env=environment, ray_address=cluster.address, forked=True)
    assert done.code == 0, done.out + done.err
    spec = read_saved(str(tmp_path / "sweep"))
    send_rest(command, done, "tune resume", spec.storage, cwd=tmp_path, env=environment)
    assert_is_sweep(tmp_path, spec, Journal(spec.storage).records())
    assert "tracking:" in spec.storage.read("best.yaml").decode(), "the winner's own run has them, too"
