"""Examine a live cluster: an actor on each node measures, probes.py judges (Ray).

Environment variables read: RAY_ADDRESS, the cluster; PACELINE_STORAGE, the shared
storage to test.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.finding import error
from cluster.health import probes
from cluster.health.probes import (
    NETWORK,
    Node,
    NodeFinding,
    different,
    on,
    print_report,
    slow,
    unshared,
)
from trainers.errors import ClusterError, last_line
from trainers.on_ray.internals import available_resources_per_node
from trainers.on_ray.worker_group import hide_unassigned_gpus
from trainers.storage import Storage

_START_S = 60.0
_PART_S = 20.0
_MEASURE_S = 45.0
_MEET_S = 40.0
"""These four: how long a node may take to start an actor, to answer, to measure, and to
connect to another node.
"""
_MEASUREMENTS = 4  # at most: as long as a node looks slow
_UNEXPECTED = 2  # of Ray's NodeDeathInfo: neither drained nor scaled down
_NO_ANSWER = "look at the host and its cable, and at `ray status`"
_NO_LINK = "look at its cable, its name in /etc/hosts, the firewall and NCCL_DEBUG=INFO"

Call = tuple[Any, ...]  # a function of cluster/health/probes.py, and its arguments


class Probe:
    """The actor that runs probes on its node."""

    def __init__(self) -> None:
        # Others may train on unassigned GPUs: matrix products there would be slow, and
        # the node would be judged bad.
        hide_unassigned_gpus()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on this node, and return its result."""
        return function(*args)


class Checkup:
    """One examination of the connected cluster.

    A node that fails to answer is left out of the steps that follow.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        """The nodes, by node ID."""
        self.found: list[NodeFinding] = []
        self._actors: dict[str, Any] = {}

    def start(self) -> None:
        """Start an actor on every node that is alive.

        The actor reserves all of the node's GPUs if none of them is in use.
        """
        available = available_resources_per_node()
        for row in ray.nodes():
            if not row["Alive"]:
                continue
            node = _node(row)
            self.nodes[node.node_id] = node
            is_free = available.get(node.node_id, {}).get("GPU", 0) >= node.num_gpus
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            actor = ray.remote(Probe).options(
                num_cpus=0,
                num_gpus=node.num_gpus if is_free else 0,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            self._actors[node.node_id] = actor.remote()

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            ray.kill(actor)

    def quick(self, uri: str | None) -> None:
        """Compare versions, and check that the storage is shared."""
        answers = self.ask_all("its start", probes.versions)
        for node_id, versions in answers.items():
            self.nodes[node_id].versions = versions
        self.found += different([self.nodes[node_id] for node_id in answers])
        if uri is not None and len(self.nodes) > 1:
            self._storage(uri)

    def full(self) -> None:
        """Check the GPUs' health, and measure matrix products and network links."""
        names = self.ask_all("importing torch", probes.device_name)
        for node_id, name in names.items():
            self.nodes[node_id].device = name
        calls: dict[str, Call] = {}
        for node_id in self.answering():
            calls[node_id] = (probes.gpu_findings, self.nodes[node_id].num_gpus)
        healths = self.ask("reading its GPUs", _PART_S, calls)
        for node_id, health in healths.items():
            self.found += on(self.nodes[node_id], health)
        cut: dict[str, str] = {}
        for _ in range(_MEASUREMENTS):
            cut = self._measure()
            # A node that is slow stays slow in every measurement; one that something
            # disturbed for a moment does not. Where a link is cut, each try takes its
            # whole timeout.
            if cut or not self._slow():
                break
        for node_id, why in cut.items():
            self._note(node_id, NETWORK, why, "must reach its neighbours", _NO_LINK)
        for finding in self._slow():
            is_link = finding.field == NETWORK
            if not is_link or finding.node_id not in cut:
                self.found.append(finding)

    def answering(self, training: bool = False) -> list[str]:
        """List the nodes that have answered so far, or only those that train."""
        found = []
        for node_id, node in self.nodes.items():
            is_wanted = node.trains or not training
            if node.answers and is_wanted:
                found.append(node_id)
        return found

    def ask_all(self, part: str, *call: Any) -> dict[str, Any]:
        """Make the same call on all nodes that have answered so far."""
        return self.ask(part, _START_S, dict.fromkeys(self.answering(), call))

    def ask(
        self, part: str, timeout_s: float, calls: Mapping[str, Call]
    ) -> dict[str, Any]:
        """Run all `calls` at once, one per node; return the results by node ID.

        A node that fails or gives no result in time gets a finding.
        """
        references = {}
        for node_id, call in calls.items():
            references[node_id] = self._actors[node_id].call.remote(*call)
        ready, _ = ray.wait(
            list(references.values()), num_returns=len(references), timeout=timeout_s
        )
        results = {}
        for node_id, reference in references.items():
            failure = ""
            try:
                if reference in ready:
                    results[node_id] = ray.get(reference)
                    continue
            except ray.exceptions.RayTaskError as raised:
                failure = f"{part}: {last_line(raised)}"
            except ray.exceptions.RayError as raised:
                words = last_line(raised)
                # An actor whose class cannot be imported there has died of it; without
                # such words its node is gone.
                failure = words if "Error:" in words else ""
            self.nodes[node_id].answers = False
            if failure:
                self._note(
                    node_id,
                    "node",
                    failure,
                    "must be able to run the check",
                    "install there what the other nodes have",
                )
            else:
                self._note(
                    node_id, "node", f"silent in {part}", "must answer", _NO_ANSWER
                )
        return results

    def _note(self, node_id: str, *finding: str) -> None:
        self.found += on(self.nodes[node_id], [error(*finding)])

    def _slow(self) -> list[NodeFinding]:
        return slow([self.nodes[node_id] for node_id in self.answering()])

    def _storage(self, uri: str) -> None:
        """Have each node write a marker file, then read the markers of all nodes."""
        place = Storage(uri).child(f".check-{uuid.uuid4().hex[:8]}").uri
        calls: dict[str, Call] = {}
        for node_id in self.answering():
            calls[node_id] = (probes.write_marker, place, node_id)
        wrong = self.ask("writing to storage", _PART_S, calls)
        writers = [node_id for node_id, words in wrong.items() if words is None]
        calls = dict.fromkeys(writers, (probes.seen_markers, place, writers))
        seen = self.ask("reading from storage", _PART_S, calls)
        calls = dict.fromkeys(seen, (probes.delete_markers, place))
        self.ask("deleting from storage", _PART_S, calls)
        words = f"{uri}: files that other nodes wrote cannot be read"
        wrong |= dict.fromkeys(unshared(seen), words)
        fix = "mount the same directory on every node, or use a URI such as s3://bucket/path"
        for node_id, why in wrong.items():
            if why is not None:
                self._note(
                    node_id, "storage", why, "must be one place for all nodes", fix
                )

    def _measure(self) -> dict[str, str]:
        """Measure each node's matrix products, and its faster link to a neighbour.

        Returns the nodes that have no working link, and why.
        """
        calls: dict[str, Call] = dict.fromkeys(
            self.answering(training=True), (probes.matmul_rates,)
        )
        measured = self.ask("multiplying", _MEASURE_S, calls)
        for node_id, rates in measured.items():
            self.nodes[node_id].better(rates)
        links: dict[str, tuple[float, str]] = {}
        for pairs in link_rounds(self.answering(training=True)):
            for node_id, answer in self._meet(pairs).items():
                links[node_id] = max(links.get(node_id, answer), answer)
        cut = {}
        for node_id, (rate, why) in links.items():
            self.nodes[node_id].better({NETWORK: rate})
            if not rate:
                cut[node_id] = why
        return cut

    def _meet(self, pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[float, str]]:
        """Measure these links at once; return each node's rate, or why it has none."""
        calls: dict[str, Call] = {}
        for first, _ in pairs:
            calls[first] = (probes.free_port, self.nodes[first].address)
        ports = self.ask("meeting", _PART_S, calls)
        calls = {}
        for first, second in pairs:
            if first in ports:
                place = (self.nodes[first].address, ports[first], _MEET_S / 2)
                calls[first] = (probes.link, 0, *place)
                calls[second] = (probes.link, 1, *place)
        return self.ask("meeting", _MEET_S, calls)


def link_rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pair the nodes in a ring, in rounds in which each node is in one pair at most."""
    first = list(zip(nodes[::2], nodes[1::2], strict=False))
    second = list(zip(nodes[1::2], nodes[2::2], strict=False))
    rounds = [first, second]
    if len(nodes) > 2:
        rounds.append([(nodes[-1], nodes[0])])
    return list(filter(None, rounds))


def _node(row: Mapping[str, Any]) -> Node:
    resources = row["Resources"]
    return Node(
        row["NodeID"],
        row["NodeManagerHostname"],
        row["NodeManagerAddress"],
        trains=_trains(resources),
        num_gpus=int(resources.get("GPU", 0)),
    )


def _trains(resources: Mapping[str, float]) -> bool:
    return resources.get("CPU", 0) + resources.get("GPU", 0) > 0


def lost_nodes(
    rows: Sequence[Mapping[str, Any]], examined: Iterable[str]
) -> list[NodeFinding]:
    """Find nodes that died unexpectedly, with no live node at their address.

    Those among `examined` are left out: they have a finding already if they are silent.
    """
    alive = {row["NodeManagerAddress"] for row in rows if row["Alive"]}
    lost = {}
    for row in rows:
        address = row["NodeManagerAddress"]
        is_known = address in alive or row["NodeID"] in examined
        if row["DeathReason"] == _UNEXPECTED and not is_known:
            lost[address] = row
    fix = "look at the host and its cable; Ray takes it back when `ray start` runs there again"
    found: list[NodeFinding] = []
    for row in lost.values():
        reason = (row["DeathReasonMessage"] or "dead").strip()
        found += on(_node(row), [error("node", reason, "must be alive", fix)])
    return found


def wait_for_workers(num_workers: int, timeout_s: float) -> None:
    """Wait until `num_workers` worker nodes are alive, or `timeout_s` has passed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        alive = [row for row in ray.nodes() if row["Alive"]]
        up = sum(_trains(row["Resources"]) for row in alive)
        if up >= num_workers:
            return
        print(
            f"waiting for {num_workers} worker nodes, {up} are up",
            end="\r",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1)


def examine(uri: str | None, quick: bool) -> Checkup:
    """Examine the connected cluster.

    `uri` is the storage that all nodes must share; if None, storage is not tested.
    """
    checkup = Checkup()
    try:
        checkup.start()
        checkup.quick(uri)
        if not quick:
            checkup.full()
    finally:
        checkup.close()
    return checkup


def require_sound(uri: str | None) -> None:
    """Run the quick examination before a sweep; raise ClusterError for its findings."""
    if sum(row["Alive"] for row in ray.nodes()) < 2:
        return
    found = examine(uri, quick=True).found
    if found:
        fix = "fix these nodes, or go on all the same with --no-check"
        raise ClusterError("\n".join([*map(str, found), fix]))


def check(
    storage_path: str | None,
    num_workers: int | None,
    wait_s: float,
    as_json: bool,
    exclude_bad: bool,
    quick: bool,
) -> int:
    """Run the command: print a table and findings, JSON, or a selector of good nodes.

    Returns 1 if there are findings; with `exclude_bad`, if too few good nodes remain.
    """
    from trainers.on_ray.cluster import connect

    connect(show_workers=False)
    if num_workers is not None:
        wait_for_workers(num_workers, wait_s)
    # No relative default, which would be a different directory on every node.
    uri = storage_path or os.environ.get("PACELINE_STORAGE")
    checkup = examine(uri, quick)
    rows = ray.nodes()
    lost = lost_nodes(rows, checkup.nodes)
    gone = {each.node_id for each in lost}
    nodes = list(checkup.nodes.values())
    for row in rows:
        if row["NodeID"] in gone:
            nodes.append(_node(row))
    found = [*checkup.found, *lost]
    workers = len(checkup.answering(training=True))
    if num_workers is not None and workers < num_workers:
        fix = "wait for more, or look at `ray status`"
        rule = f"must be at least {num_workers}"
        few = error("worker nodes", workers, rule, fix)
        found += on(Node("", "cluster", ""), [few])
    if uri is None and len(nodes) > 1:
        print(
            "note: storage was not looked at; give --storage_path or set PACELINE_STORAGE",
            file=sys.stderr,
        )
    return print_report(nodes, found, as_json, exclude_bad, num_workers)
