"""`python -m cluster start`, a sweep that finds the cluster by itself, `status` and `stop`: nothing is left."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.conftest import Done
from tests.specs import BASE, REPOSITORY

pytestmark = pytest.mark.full


def test_a_cluster_that_stays_up(tmp_path: Path, command: Callable[..., Done]) -> None:
    keys = {key: value for key, value in BASE.items() if key not in ("launcher", "checkpoint")}
    tree = {
        "storage_path": str(tmp_path / "runs"),
        "train": {**keys, "task_dir": str(REPOSITORY)},
        "space": {"seed": [0, 1]},
        "objective": {"metric": "val_loss"},
        "lanes": 1,
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as temporary:  # short: sockets lie in it
        environment = {"TMPDIR": temporary}

        def run(*arguments: str) -> Done:
            return command("-m", *arguments, env=environment, cwd=REPOSITORY)

        assert run("cluster", "status").out == "no cluster is kept on this machine\n"
        started = run("cluster", "start", "--cpus", "2")
        try:
            found = re.fullmatch(
                r"a cluster is up at (127\.0\.0\.1:\d+); `python -m cluster stop` ends it\n", started.out
            )
            assert found, started
            assert run("cluster", "start").out == started.out, "there is one already"
            assert run("tune", str(tmp_path / "sweep.yaml")).code == 0
            shown = run("cluster", "status").out.splitlines()
            cluster = re.fullmatch(rf"cluster {found[1]}, pid (\d+)", shown[0])
            assert cluster, shown
            own = psutil.Process(int(cluster[1]))
            family = [own, *own.children(recursive=True)]
        finally:
            stopped = run("cluster", "stop")
        assert stopped.out == "it has ended\n"
        assert psutil.wait_procs(family, timeout=30)[1] == []
        assert list(Path(temporary).glob("paceline-*")) == []
        assert run("cluster", "stop").out == "there was none\n"
