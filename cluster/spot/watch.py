"""Drain a spot machine's Ray node at its notice: runs write a checkpoint (Ray).

Needs Linux.
"""

import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.spot.notices import SERVICES, Notice, wait_for_notice
from trainers.errors import ClusterError
from trainers.on_ray.internals import drain_node

_RPC_S = 5.0
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Raylet:
    """Ray's process for this node."""

    node_id: str
    gcs_address: str
    logs: str
    """The directory of its session's logs."""
    process: int
    """A file descriptor that is readable once the process has ended."""

    def has_ended(self, wait_s: float) -> bool:
        """Wait for its end for so many seconds; return whether it has ended."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))


def watch(cloud: str, address: str, node_id: str | None = None) -> int:
    """Wait for this machine's spot notice, and drain its Ray node; return the exit code.

    Ends with Ray, and at once on a machine that is not spot. Raises ClusterError where
    there is no such node.
    """
    raylet = find_raylet(node_id)
    try:
        say(f"waiting for a notice that {cloud} takes Ray's node {raylet.node_id} back")
        notice = wait_for_notice(SERVICES[cloud](address), raylet.has_ended, say)
        return 0 if notice is None or drain(raylet, notice) else 1
    finally:
        os.close(raylet.process)


def find_raylet(node_id: str | None = None) -> Raylet:
    """Return this machine's raylet, of several that of `node_id`; raises ClusterError."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            program, *arguments = (
                (process / "cmdline").read_text(errors="replace").split("\0")
            )
            if program.endswith("/raylet/raylet"):
                flags = dict(
                    argument.lstrip("-").split("=", 1)
                    for argument in arguments
                    if "=" in argument
                )
                found.append((int(process.name), flags))
    chosen = [
        (pid, flags) for pid, flags in found if node_id in (None, flags.get("node_id"))
    ]
    if len(chosen) != 1:
        nodes = (
            ", ".join(flags.get("node_id", "one unnamed") for _, flags in found)
            or "none"
        )
        raise ClusterError(
            f"one node of Ray is watched, and on this machine run {nodes}: start Ray, or give --node"
        )
    [(pid, flags)] = chosen
    logs = Path(flags.get("raylet_socket_name", "")).parents[1] / "logs"
    try:
        return Raylet(
            flags["node_id"], flags["gcs-address"], str(logs), os.pidfd_open(pid)
        )
    except ProcessLookupError:
        raise ClusterError(
            "Ray has just ended on this machine: start it again"
        ) from None


def drain(raylet: Raylet, notice: Notice) -> bool:
    """Have Ray drain the node until the notice's deadline; return whether it will.

    Asked again until then.
    """
    say(f"{notice.reason}; gone in {notice.deadline_s - time.time():.0f} s")
    is_first = True
    while is_first or (
        time.time() < notice.deadline_s and not raylet.has_ended(_AGAIN_S)
    ):
        is_first = False
        deadline_ms = int(
            max(notice.deadline_s, time.time() + 1) * 1e3
        )  # 0 would be none at all
        try:
            accepted, words = drain_node(
                raylet.gcs_address, raylet.node_id, notice.reason, deadline_ms, _RPC_S
            )
        except (
            Exception
        ) as error:  # whatever it is, the time that is left is for trying again
            accepted = False
            words = f"{type(error).__name__}: {error}"
        if accepted:
            say("Ray drains the node")
            return True
        say(f"Ray does not drain the node: {words}")
    return False


def say(words: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%Y-%m-%d %H:%M:%S"), words, flush=True)
