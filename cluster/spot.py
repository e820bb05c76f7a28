"""Spot machines: drain their nodes on notice, and avoid refused node types (Ray).

Needs Linux.
"""

import os
import runpy
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.notices import SERVICES, Notice, wait_for_notice
from trainers.errors import ClusterError
from trainers.on_ray.internals import autoscaler_parts, drain_node

MONITOR = "ray.autoscaler.v2.monitor"
_RPC_S = 5.0
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Raylet:
    """Ray's process for this node."""

    node_id: str
    gcs_address: str
    logs: str
    """The log directory of its Ray session."""
    process: int
    """A file descriptor that is readable once the process has ended."""

    def has_ended(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for the process to end; return whether it has ended."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))


def watch(cloud: str, address: str, node_id: str | None = None) -> int:
    """Wait for this machine's spot notice, drain its Ray node, and return the exit code.

    When the node is drained, runs on it write a checkpoint. If there is no
    notice, this function returns when Ray ends. Raises ClusterError if this
    machine has no such node.
    """
    raylet = find_raylet(node_id)
    try:
        say(
            f"waiting for a notice that {cloud} takes back Ray's node {raylet.node_id}"
        )
        notice = wait_for_notice(
            SERVICES[cloud](address), raylet.has_ended, say
        )
        return 0 if notice is None or drain(raylet, notice) else 1
    finally:
        os.close(raylet.process)


def find_raylet(node_id: str | None = None) -> Raylet:
    """Return this machine's raylet; `node_id` chooses among several.

    Raises ClusterError if there is not exactly one such raylet.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            command = (process / "cmdline").read_text(errors="replace")
            program, *arguments = command.split("\0")
            if program.endswith("/raylet/raylet"):
                flags = {}
                for argument in arguments:
                    name, _, value = argument.partition("=")
                    flags[name.lstrip("-")] = value
                found.append((int(process.name), flags))
    chosen = [
        (pid, flags)
        for pid, flags in found
        if node_id in (None, flags.get("node_id"))
    ]
    if len(chosen) != 1:
        names = [flags.get("node_id", "one unnamed") for _, flags in found]
        nodes = ", ".join(names) or "none"
        words = (
            f"this machine runs several Ray nodes; give --node one of {nodes}"
        )
        if node_id is not None:
            words = f"the Ray node {node_id} is not among those of this machine ({nodes}); start Ray, or give another --node"
        elif not names:
            words = "no Ray node runs on this machine; start Ray"
        raise ClusterError(words)
    [(pid, flags)] = chosen
    logs = Path(flags.get("raylet_socket_name", "")).parents[1] / "logs"
    try:
        return Raylet(
            flags["node_id"],
            flags["gcs-address"],
            str(logs),
            os.pidfd_open(pid),
        )
    except ProcessLookupError:
        raise ClusterError(
            "Ray has just ended on this machine; start Ray again"
        ) from None


def drain(raylet: Raylet, notice: Notice) -> bool:
    """Ask Ray to drain the node by the notice's deadline; return whether Ray accepts.

    Until the deadline, the request is repeated if it fails.
    """
    say(
        f"{notice.reason}; the machine is taken back in {notice.deadline_s - time.time():.0f} s"
    )
    while True:
        # Always in the future: to Ray, 0 means no deadline.
        deadline_s = max(notice.deadline_s, time.time() + 1)
        deadline_ms = int(deadline_s * 1e3)
        try:
            accepted, words = drain_node(
                raylet.gcs_address,
                raylet.node_id,
                notice.reason,
                deadline_ms,
                _RPC_S,
            )
        # Whatever the error is, use the remaining time to try again.
        except Exception as error:
            accepted = False
            words = f"{type(error).__name__}: {error}"
        if accepted:
            say("Ray is draining the node")
            return True
        say(f"Ray does not drain the node: {words}")
        if time.time() >= notice.deadline_s or raylet.has_ended(_AGAIN_S):
            return False


def say(words: str) -> None:
    """Print a line that begins with the current time."""
    print(time.strftime("%Y-%m-%d %H:%M:%S"), words, flush=True)


def heed_refusals() -> None:
    """Make Ray's autoscaler count it as a failure when the cloud refuses a machine.

    Ray 2.60 ranks node types by their recent availability before it considers
    their `priority`: for ten minutes after a failure it takes another type,
    and then the preferred one again. But Ray counts as failures only machines
    that never came up (ALLOCATION_TIMEOUT). It does not count machines that
    the cloud refused (ALLOCATION_FAILED), as EC2 does with
    InsufficientInstanceCapacity; Ray requests them again every few seconds,
    forever.
    """
    reconciler, subscriber, failed = autoscaler_parts()
    for step in (
        "_try_resolve_pending_allocation",
        "_handle_stuck_requested_instance",
    ):
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


def _naming_the_type(
    step: Callable[..., Any], failed: int
) -> Callable[..., Any]:
    """Wrap a step of Ray's autoscaler that decides about a requested instance.

    The wrapped step adds the node type to each failure.
    """

    def named(instance: Any, *args: Any, **kwargs: Any) -> Any:
        update = step(instance, *args, **kwargs)
        if update is not None and update.new_instance_status == failed:
            update.instance_type = instance.instance_type
        return update

    return named


def autoscale(config: str, node_id: str | None = None) -> int:
    """Run Ray's autoscaler for the head on this machine, until Ray ends.

    This replaces the autoscaler that `ray start --no-monitor` leaves out. The
    log goes to the log directory of the Ray session.
    """
    raylet = find_raylet(node_id)
    threading.Thread(target=_end_with, args=(raylet,), daemon=True).start()
    heed_refusals()
    options = {
        "gcs-address": raylet.gcs_address,
        "autoscaling-config": config,
        "logs-dir": raylet.logs,
        "monitor-ip": raylet.gcs_address.rpartition(":")[0],
    }
    sys.argv = [
        MONITOR,
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    runpy.run_module(MONITOR, run_name="__main__", alter_sys=True)
    return 0


def _end_with(raylet: Raylet) -> None:
    while not raylet.has_ended(3600.0):
        pass
    os._exit(0)
