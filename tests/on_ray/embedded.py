"""A sweep on an embedded cluster, and what Ray starts for it."""

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.on_ray.test_lanes import run, sweep
from tests.waits import HANG_S, until, when
from trainers.on_ray import cluster
from trainers.on_ray.cluster import connect, disconnect
from trainers.on_ray.internals import own_node


def actors(*filters: tuple[str, str, str]) -> list[Any]:
    """Of the cluster that this process has joined: other clusters may run on
    this machine.
    """
    import ray
    from ray.util.state import list_actors

    return list_actors(
        ray.get_runtime_context().gcs_address,
        list(filters),
        limit=10_000,
        timeout=int(HANG_S),
        detail=True,
    )


def tasks() -> list[str]:
    """The names of all tasks of that cluster, in the order in which they were made."""
    import ray
    from ray.util.state import list_tasks

    found = list_tasks(
        ray.get_runtime_context().gcs_address,
        limit=10_000,
        timeout=int(HANG_S),
        detail=True,
    )
    return [
        task.name
        for task in sorted(found, key=lambda task: task.creation_time_ms)
    ]


def await_end_of_trials() -> None:
    """Until the actors of a killed driver are gone, which may still have
    written a record.
    """
    kinds = {"Mailbox", "ResourceTrainable", "RayTrainWorker"}
    until(
        lambda: (
            not any(
                one.class_name.rpartition(".")[2] in kinds
                for one in actors(("state", "=", "ALIVE"))
            )
        ),
        "the actors' end",
    )


def listening() -> dict[str, list[str]]:
    """The processes of this cluster that accept connections, by the addresses
    on which they do.
    """
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.setdefault(
                        one.laddr.ip.removeprefix("::ffff:"), []
                    ).append(process.name())
    return found


def main(directory: Path) -> dict[str, Any]:
    """What Ray started; the sweep's only lane needs all that there is."""
    pids = directory / "pids"
    cluster._DASHBOARD_AFTER_S = 0.0  # what Ray has started is asked there
    connect(show_workers=False)
    mode = os.environ["RAY_AUTH_MODE"]
    train = {
        "task_args": {"pids": str(pids), "pause_s": 0.05},
        "scaling": {"cpus_per_worker": os.cpu_count()},
    }
    spec = sweep(directory, {"seed": [1, 2, 3]}, train)
    ports = {}

    thread = when(
        lambda: pids.exists() and bool(pids.read_text()),
        lambda: ports.update(listening()),
    )
    records = run(spec)
    thread.join()
    until(lambda: own_node().webui_url, "the dashboard")
    found = actors()
    started = Counter(actor.class_name.rpartition(".")[2] for actor in found)
    shown = sorted(actor.repr_name for actor in found)
    said = [name for name in tasks() if ": trial " in name]
    disconnect()
    statuses = {record.id: record.status for record in records}
    of_ray = {"actors": started, "shown": shown, "said": said, "ports": ports}
    workers = pids.read_text().split()
    return {"statuses": statuses, "workers": workers, "mode": mode, **of_ray}
