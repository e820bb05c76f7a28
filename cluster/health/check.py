"""Examine a live cluster by tasks on each node (Ray); probes.py judges the results.

Environment variables read: RAY_ADDRESS (the cluster) and PACELINE_STORAGE (the
shared storage to test).
"""

import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster import error
from cluster.health import probes
from cluster.health.probes import (
    Node,
    NodeFinding,
    different,
    on,
    print_report,
    unshared,
)
from trainers.errors import ClusterError, last_line
from trainers.storage import Storage

_START_S = 60.0
_PART_S = 20.0
"""Seconds that a node may take for a later task; its first tasks get `_START_S`."""
_NO_ANSWER = "check that the host is up (`ray status`) and has the same packages as the other nodes"

# A function of cluster/health/probes.py, and its arguments.
Call = tuple[Any, ...]


class Checkup:
    """One examination of the connected cluster.

    A node that fails to answer is left out of the steps that follow.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        """The nodes, by node ID."""
        self.found: list[NodeFinding] = []
        for row in ray.nodes():
            if not row["Alive"]:
                continue
            node = Node(
                row["NodeID"],
                row["NodeManagerHostname"],
                row["NodeManagerAddress"],
                num_gpus=int(row["Resources"].get("GPU", 0)),
            )
            self.nodes[node.node_id] = node

    def quick(self, uri: str | None) -> None:
        """Compare versions, and check that the storage is shared."""
        answers = self.ask_all("starting", probes.versions)
        for node_id, versions in answers.items():
            self.nodes[node_id].versions = versions
        self.found += different([self.nodes[node_id] for node_id in answers])
        if uri is not None and len(self.nodes) > 1:
            self._storage(uri)

    def full(self) -> None:
        """Find the name of each node's device, and check the health of the node's GPUs."""
        names = self.ask_all("naming its device", probes.device_name)
        for node_id, name in names.items():
            self.nodes[node_id].device = name
        calls: dict[str, Call] = {}
        for node_id in self.answering():
            calls[node_id] = (
                probes.gpu_findings,
                self.nodes[node_id].num_gpus,
            )
        healths = self.ask("reading its GPUs", _PART_S, calls)
        for node_id, health in healths.items():
            self.found += on(self.nodes[node_id], health)

    def answering(self) -> list[str]:
        """Return the IDs of the nodes that have answered every call so far."""
        return [
            node_id for node_id, node in self.nodes.items() if node.answers
        ]

    def ask_all(self, part: str, *call: Any) -> dict[str, Any]:
        """Make the same call on all nodes that have answered every call so far."""
        return self.ask(part, _START_S, dict.fromkeys(self.answering(), call))

    def ask(
        self, part: str, timeout_s: float, calls: Mapping[str, Call]
    ) -> dict[str, Any]:
        """Run `calls` in parallel, one per node; return the results by node ID.

        A node that fails or gives no result in time gets a finding.
        """
        references: dict[str, Any] = {}
        for node_id, (function, *args) in calls.items():
            task = ray.remote(function).options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    node_id, soft=False
                ),
            )
            references[node_id] = task.remote(*args)
        ready, _ = ray.wait(
            list(references.values()),
            num_returns=len(references),
            timeout=timeout_s,
        )
        results = {}
        for node_id, reference in references.items():
            failure = f"no answer while {part}"
            try:
                if reference in ready:
                    results[node_id] = ray.get(reference)
                    continue
                ray.cancel(reference, force=True)
            except ray.exceptions.RayError as raised:
                failure = f"{part}: {last_line(raised)}"
            self.nodes[node_id].answers = False
            self._note(
                node_id, "node", failure, "must answer the check", _NO_ANSWER
            )
        return results

    def _note(self, node_id: str, *finding: str) -> None:
        self.found += on(self.nodes[node_id], [error(*finding)])

    def _storage(self, uri: str) -> None:
        """Have each node write a marker file, then read the markers of all nodes."""
        place = Storage(uri).child(f".check-{uuid.uuid4().hex[:8]}").uri
        calls: dict[str, Call] = {}
        for node_id in self.answering():
            calls[node_id] = (probes.write_marker, place, node_id)
        wrong = self.ask("writing to storage", _PART_S, calls)
        writers = [
            node_id for node_id, words in wrong.items() if words is None
        ]
        calls = dict.fromkeys(writers, (probes.seen_markers, place, writers))
        seen = self.ask("reading from storage", _PART_S, calls)
        calls = dict.fromkeys(seen, (probes.delete_markers, place))
        self.ask("deleting from storage", _PART_S, calls)
        words = f"{uri}: files that other nodes wrote cannot be read"
        wrong |= dict.fromkeys(unshared(seen), words)
        fix = "mount one directory on every node, writable for the user of Ray, or use a URI such as s3://bucket/path that every node may write to"
        for node_id, why in wrong.items():
            if why is not None:
                self._note(
                    node_id,
                    "storage",
                    why,
                    "must be one place that all nodes can write to and read",
                    fix,
                )


def examine(uri: str | None, quick: bool) -> Checkup:
    """Examine the connected cluster.

    `uri` is the storage that all nodes must share; if None, storage is not
    tested.
    """
    checkup = Checkup()
    checkup.quick(uri)
    if not quick:
        checkup.full()
    return checkup


def require_sound(uri: str | None) -> None:
    """Run the quick examination before a sweep; raise ClusterError for its findings."""
    if sum(row["Alive"] for row in ray.nodes()) < 2:
        return
    found = examine(uri, quick=True).found
    if found:
        fix = "repair these nodes, or skip this check with --no-check (in Python: `check=False`)"
        raise ClusterError("\n".join([*map(str, found), fix]))


def check(storage_path: str | None, as_json: bool, quick: bool) -> int:
    """Run the command: print a table and findings, or JSON.

    Returns 1 if there are findings.
    """
    from trainers.on_ray.cluster import connect

    connect(show_workers=False)
    # No default: a relative path would be a different directory on every node.
    uri = storage_path or os.environ.get("PACELINE_STORAGE")
    checkup = examine(uri, quick)
    nodes = list(checkup.nodes.values())
    if uri is None and len(nodes) > 1:
        print(
            "note: storage was not tested; give --storage_path or set PACELINE_STORAGE",
            file=sys.stderr,
        )
    return print_report(nodes, checkup.found, as_json)
