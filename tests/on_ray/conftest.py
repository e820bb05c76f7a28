"""One Ray cluster for all tests of this folder; it ends with them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Cluster, free_port
from tests.on_ray.nodes import ray_start
from tests.waits import until


@pytest.fixture(scope="package")
def cluster():
    """The cluster, in a directory that goes with it."""
    import psutil

    directory = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
    gcs_port = free_port()
    dashboard_port = free_port()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        # What looks at all files and processes does so twice a second and once
        # a minute, not always.
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        # A killed node is missed after five looks, else three seconds apart; a
        # slow one has as long as ever.
        "RAY_health_check_period_ms": "1000",
        # By default its workers step aside for whatever else runs, which here
        # are other tests.
        "RAY_worker_niceness": "0",
    }
    log = directory / "head.log"
    head = ray_start(
        "--head",
        "--num-cpus=2",
        f"--port={gcs_port}",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
        f"--temp-dir={directory}",
        "--include-log-monitor=true",
        is_up=lambda: (
            log.exists() and "Ray runtime started" in log.read_text()
        ),
        env=environment,
        stdout=log.open("a"),
        stderr=subprocess.STDOUT,
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            # A Python for each group of workers that only watches for drained
            # nodes; the lab's hosts are drained.
            patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
            yield Cluster(
                f"127.0.0.1:{gcs_port}",
                f"http://127.0.0.1:{dashboard_port}",
                directory,
            )
    finally:
        family = [
            *psutil.Process(head.pid).children(recursive=True),
            psutil.Process(head.pid),
        ]
        head.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=3)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="package")
def driver(cluster):
    """This process as a driver of the cluster."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        ray.init(address=cluster.address, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.fixture(autouse=True)
def _cluster_given_back(request):
    """What a test leaves reserved would let the next ones wait forever, and
    nobody would know why.
    """
    yield
    ray = sys.modules.get("ray")
    if (
        "driver" in request.fixturenames
        and ray is not None
        and ray.is_initialized()
    ):
        until(
            lambda: (
                ray.available_resources().get("CPU", 0.0)
                >= ray.cluster_resources()["CPU"]
            ),
            lambda: (
                f"all of the cluster's CPUs free, only {ray.available_resources().get('CPU', 0.0):g}"
            ),
        )
