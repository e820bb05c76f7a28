"""Ray's autoscaler as on the head of `ray up`, with a GCS that knows what is wanted, and which hosts were told to join.

Run as: python -m tests.lab.ec2_head CONFIG INSTANCE, which is the head's; a number of GPUs on standard input is a new
demand, answered once the autoscaler has met it and come to rest.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from ray.autoscaler.v2.autoscaler import Autoscaler
from ray.autoscaler.v2.instance_manager.config import FileConfigReader
from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus

from cluster.spot.autoscaler import heed_refusals

_JOINED = re.compile(r"RAY_CLOUD_INSTANCE_ID=(i-\w+);.* RAY_NODE_TYPE_NAME=(\w+);.*ray start --address=")
_ROUND_S, _REST_S, _IDLE_MS = 0.25, 2.0, 3_600_000


class Gcs:
    """The part of Ray's GCS client that the autoscaler uses."""

    address = "172.31.0.4:6379"

    def __init__(self, head: str) -> None:
        self.wanted = 0
        self.dead: set[str] = set()
        self._head, self._log = head, Path(os.environ["LAB"], "ssh.jsonl")

    def nodes(self) -> dict[str, str]:
        """Ray's nodes by instance: the head, and each that has been told to join and not drained since."""
        found = dict(_JOINED.findall(self._log.read_text()))
        return {self._head: "head"} | {name: kind for name, kind in found.items() if name not in self.dead}

    def get_cluster_resource_state(self) -> bytes:
        """Return the nodes, all of them idle where nothing is wanted, and the demand."""
        reply = GetClusterResourceStateReply()
        state = reply.cluster_resource_state
        state.cluster_resource_state_version = time.time_ns()
        state.cluster_session_name = "lab"
        for instance, kind in self.nodes().items():
            node = state.node_states.add(node_id=_id(instance), instance_id=instance, ray_node_type_name=kind)
            node.status = NodeStatus.RUNNING if self.wanted or kind == "head" else NodeStatus.IDLE
            node.idle_duration_ms = 0 if self.wanted else _IDLE_MS
            resources = {"node:__internal_head__": 1.0} if kind == "head" else {"CPU": 8.0, "GPU": 1.0}
            node.total_resources.update(resources)
            node.available_resources.update(resources)
        if self.wanted:
            request = state.cluster_resource_constraints.add().resource_requests.add()
            request.count = self.wanted
            request.request.resources_bundle["GPU"] = 1
        return reply.SerializeToString()

    def drain_node(self, node_id: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Let a node leave at once."""
        self.dead |= {instance for instance in self.nodes() if _id(instance).hex() == node_id}
        return True, ""


def _id(instance: str) -> bytes:
    return instance.encode().ljust(28, b"-")[:28]


def main(config: str, head: str) -> None:
    """Serve demands until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints, too
    heed_refusals()
    gcs = Gcs(head)
    autoscaler = Autoscaler("lab", FileConfigReader(config_file=config, skip_content_hash=True), gcs)
    for line in sys.stdin:
        gcs.wanted = int(line)
        deadline, nodes = time.monotonic() + _REST_S, gcs.nodes()
        while time.monotonic() < deadline:
            autoscaler.update_autoscaling_state()
            time.sleep(_ROUND_S)
            if nodes != gcs.nodes() or len(nodes) != 1 + gcs.wanted:
                deadline, nodes = time.monotonic() + _REST_S, gcs.nodes()
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
