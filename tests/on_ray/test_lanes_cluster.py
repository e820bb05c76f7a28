"""Lanes follow the cluster: one more when a node comes, its trial goes elsewhere when that node leaves."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Cluster
from tests.on_ray.test_faults import when
from tests.on_ray.test_lanes import rows, run, sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def cut_power(node: subprocess.Popen[bytes]) -> None:
    """All processes of a node at once."""
    if node.poll() is None:
        process = psutil.Process(node.pid)
        for one in (*process.children(recursive=True), process):
            one.kill()
        node.wait()


def test_a_node_comes_and_goes(tmp_path: Path, cluster: Cluster, driver: Any) -> None:
    pids = tmp_path / "pids"
    space = {"seed": list(range(16)), "task_args": [{"pids": str(pids), "pause_s": 0.1}]}
    spec = sweep(tmp_path, space, {"scaling": {"cpus_per_worker": 2}}, lanes="auto")
    nodes: list[subprocess.Popen[bytes]] = []

    def workers() -> set[str]:
        return set(pids.read_text().split()) if pids.exists() else set()

    def come_and_go() -> None:
        nodes.append(
            subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "ray"),
                    *("start", f"--address={cluster.address}", "--num-cpus=2", "--block", "--disable-usage-stats"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        deadline = time.monotonic() + 120
        while len(workers()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)  # in the middle of its first trial
        cut_power(nodes[0])

    thread: threading.Thread = when(lambda: bool(workers()), come_and_go)
    try:
        records = run(spec)
    finally:
        thread.join(150)
        for node in nodes:
            cut_power(node)
    assert len(records) == 16
    assert {record.status for record in records} == {"done"}, [record.message for record in records]
    assert len(workers()) == 2, "a second lane was there, and the first one never started again"
    assert {len(rows(record.curve)) for record in records} == {3}
    assert len(pids.read_text().split()) == 17, "the trial that the node took with it ran again, and no other"
