"""Run Ray's autoscaler so that it takes another node type where the cloud refuses one.

(Ray)

Ray 2.60 ranks node types by whether they could be had of late before it looks at their
`priority`: for ten minutes after a failure the other type is taken, and then the
preferred one again. But it counts as failures only machines that never came up
(ALLOCATION_TIMEOUT), none that the cloud refused at once, such as EC2's
InsufficientInstanceCapacity (ALLOCATION_FAILED): it asks for those again every few
seconds, for ever. This file alone knows of it.
"""

import os
import runpy
import sys
import threading
from collections.abc import Callable
from typing import Any

from cluster.spot.watch import Raylet, find_raylet
from trainers.on_ray.internals import autoscaler_parts

MONITOR = "ray.autoscaler.v2.monitor"


def heed_refusals() -> None:
    """Have Ray's autoscaler count machines that the cloud refuses as failed."""
    reconciler, subscriber, failed = autoscaler_parts()
    for step in ("_try_resolve_pending_allocation", "_handle_stuck_requested_instance"):
        setattr(
            reconciler,
            step,
            staticmethod(_naming_the_type(getattr(reconciler, step), failed)),
        )
    notify = subscriber.notify

    def notify_of_refusals(monitor: Any, events: list[Any]) -> None:
        notify(monitor, events)
        for event in events:
            if event.new_instance_status == failed and event.instance_type:
                monitor.allocation_timeout(event)

    subscriber.notify = notify_of_refusals


def _naming_the_type(step: Callable[..., Any], failed: int) -> Callable[..., Any]:
    """Wrap a step of Ray's that decides on a requested instance.

    A failure then says of which node type it is.
    """

    def named(instance: Any, *args: Any, **kwargs: Any) -> Any:
        update = step(instance, *args, **kwargs)
        if update is not None and update.new_instance_status == failed:
            update.instance_type = instance.instance_type
        return update

    return named


def autoscale(config: str, node_id: str | None = None) -> int:
    """Run Ray's autoscaler for the head on this machine, until Ray ends.

    In the place of the one that `ray start --no-monitor` leaves out, with its log where
    that one has it.
    """
    raylet = find_raylet(node_id)
    threading.Thread(target=_end_with, args=(raylet,), daemon=True).start()
    heed_refusals()
    options = {
        "gcs-address": raylet.gcs_address,
        "autoscaling-config": config,
        "logs-dir": raylet.logs,
    }
    options["monitor-ip"] = raylet.gcs_address.rpartition(":")[0]
    sys.argv = [MONITOR, *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_module(MONITOR, run_name="__main__", alter_sys=True)
    return 0


def _end_with(raylet: Raylet) -> None:
    while not raylet.has_ended(3600.0):
        pass
    os._exit(0)
