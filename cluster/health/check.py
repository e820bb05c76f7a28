"""Pre-flight on a live cluster: an actor on every node measures, and cluster/health/verdicts.py judges (Ray).

Environment read: RAY_ADDRESS, the cluster; PACELINE_STORAGE, the shared storage that is proved.
"""

import logging
import os
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from cluster.health import links, probes
from cluster.health.actors import Call, Nodes
from cluster.health.facts import ClusterFacts, Collective, Kind, LostNode, NodeFinding, Rate
from cluster.health.report import print_report
from cluster.health.verdicts import better, doubtful, judge, unshared
from trainers.errors import PacelineError
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_START_S, _PART_S, _MEASURE_S, _COLLECTIVE_S = 60.0, 20.0, 45.0, 40.0
"""How long a node may take to start an actor, to answer, to measure, and to meet the others."""
_PINGS = 5
_REPEATS = 3  # how often a doubtful rate is measured again
_UNEXPECTED = 2  # of Ray's NodeDeathInfo: neither drained nor scaled down


class ClusterError(PacelineError):
    """Nodes that cannot be trained on, a line each."""


@dataclass
class Checkup:
    """One examination of the connected cluster."""

    nodes: Nodes = field(default_factory=Nodes)
    collectives: list[Collective] = field(default_factory=list)

    def quick(self, uri: str | None) -> None:
        """Examine versions, clocks and storage."""
        self.nodes.learn("versions", "its start", _START_S, probes.versions, False)
        self.nodes.learn("own_address", "its name", _PART_S, probes.own_address)
        self._clocks()
        if uri is not None and len(self.nodes.facts) > 1:
            self._storage(uri)

    def full(self, uri: str | None) -> None:
        """Examine NCCL's version and the GPUs' health, and measure every rate."""
        self.nodes.learn("versions", "importing torch", _START_S, probes.versions, True)
        self.nodes.learn("gpus", "reading its GPUs", _PART_S, probes.gpu_health)
        self.nodes.learn("device", "naming its device", _PART_S, probes.device_name, training=True)
        self._rates(uri)
        self._all_reduce()

    def _clocks(self) -> None:
        """Each clock against this one by the quickest of some questions (Cristian 1989), then against their median."""
        offsets: dict[str, tuple[float, float]] = {}
        for node_id in self.nodes.answering():
            for _ in range(_PINGS):
                asked = time.time()
                answer = self.nodes.ask("reading its clock", _PART_S, {node_id: (time.time,)})
                if node_id not in answer:
                    break
                half_s = (time.time() - asked) / 2
                this_one = (half_s, answer[node_id] - asked - half_s)
                offsets[node_id] = min(this_one, offsets.get(node_id, this_one))
        usual = statistics.median(offset for _, offset in offsets.values()) if offsets else 0.0
        for node_id, (half_s, offset) in offsets.items():
            self.nodes.note(node_id, clock_offset_s=offset - usual, clock_error_s=half_s)

    def _storage(self, uri: str) -> None:
        """Every node writes a marker, reads those of all, and deletes another's; the first sees that they are gone."""
        place = Storage(uri).child(f".check-{uuid.uuid4().hex[:8]}").uri
        calls: dict[str, Call] = {node_id: (probes.write_marker, place, node_id) for node_id in self.nodes.answering()}
        wrote = self.nodes.ask("writing to storage", _PART_S, calls)
        writers = sorted(node_id for node_id, wrong in wrote.items() if wrong is None)
        calls = dict.fromkeys(writers, (probes.seen_markers, place, writers))
        seen = self.nodes.ask("reading from storage", _PART_S, calls)
        apart = unshared({node_id: set(names) for node_id, names in seen.items()})
        together = [node_id for node_id in seen if node_id not in apart]
        others = dict(zip(together, [*together[1:], *together[:1]], strict=True))
        calls = {node_id: (probes.delete_marker, place, other) for node_id, other in others.items()}
        deleted = self.nodes.ask("deleting from storage", _PART_S, calls)
        calls = dict.fromkeys([*together[:1], *apart], (probes.remaining_markers, place))
        left = self.nodes.ask("looking at storage", _PART_S, calls)
        for node_id, wrong in (wrote | deleted).items():
            if node_id in others and wrong is None and others[node_id] in left.get(together[0], []):
                wrong = f"{uri}: a file that it deleted is still seen by another node"
            elif node_id in apart:
                wrong = f"{uri}: a file that {self.nodes.facts[apart[node_id]].host} wrote cannot be read"
            self.nodes.note(node_id, storage=wrong)

    def _rates(self, uri: str | None) -> None:
        """Products, links and disks; a doubtful figure is measured again beside its fastest peer, and the best counts.

        A node that is slow stays slow in every measurement; one that something disturbed for a moment does not.
        """
        kinds: tuple[Kind, ...] = ("matmul", "network", "local disk", *(("storage",) if uri else ()))
        again = {kind: set(self.nodes.answering(training=True)) for kind in kinds}
        times: Counter[tuple[Kind, str]] = Counter()
        while again:
            for kind, node_ids in again.items():
                present = [node_id for node_id in self.nodes.answering(training=True) if node_id in node_ids]
                times.update((kind, node_id) for node_id in present)
                for node_id, rates in self._measure(kind, present, uri).items():
                    self.nodes.note(node_id, rates=better(self.nodes.facts[node_id].rates, rates))
            settled = {each for each, num in times.items() if num > _REPEATS}
            again = doubtful([self.nodes.facts[node_id] for node_id in self.nodes.answering()], settled)

    def _measure(self, kind: Kind, nodes: Sequence[str], uri: str | None) -> dict[str, list[Rate]]:
        """One kind of rate, on all of `nodes` at once."""
        if kind == "network":
            return {node_id: [Rate(kind, kind, value, "MB/s")] for node_id, value in self._links(nodes).items()}
        if kind == "matmul":
            return self.nodes.ask("multiplying", _MEASURE_S, dict.fromkeys(nodes, (probes.matmul_rates,)))
        call = (probes.disk_rates, kind, uri if kind == "storage" else None)
        return self.nodes.ask(f"writing to {kind}", _MEASURE_S, dict.fromkeys(nodes, call))

    def _links(self, nodes: Sequence[str]) -> dict[str, float]:
        """MB/s of each node: the better one of its links with the one before and the one after it."""
        best: dict[str, float] = {}
        for pairs in link_rounds(nodes):
            address = {receiver: self.nodes.facts[receiver].address for _, receiver in pairs}
            ports = self.nodes.ask("listening", _PART_S, {node_id: ("listen", at) for node_id, at in address.items()})
            calls = {sender: (links.send, address[to], ports[to]) for sender, to in pairs if to in ports}
            self.nodes.ask("sending", _MEASURE_S, calls)
            rates = self.nodes.ask("receiving", _MEASURE_S, dict.fromkeys(ports, ("received",)))
            for sender, receiver in pairs:
                for node_id in (sender, receiver):
                    best[node_id] = max(best.get(node_id, 0.0), rates.get(receiver, 0.0))
        return best

    def _all_reduce(self) -> None:
        calls: dict[str, Call] = dict.fromkeys(self.nodes.answering(training=True), (links.all_reduce_within,))
        for node_id, answer in self.nodes.ask("all-reduce", _COLLECTIVE_S, calls).items():
            if answer is not None:
                num_gpus, correct, mb_per_s = answer
                between = f"within {self.nodes.facts[node_id].host}"
                self.collectives.append(Collective(between, num_gpus, mb_per_s, None, () if correct else (node_id,)))
        training = self.nodes.answering(training=True)
        if len(training) < 2:
            return
        address, failure = self.nodes.facts[training[0]].address, None
        port = self.nodes.ask("all-reduce", _PART_S, {training[0]: (links.free_port, address)}).get(training[0])
        meeting = (len(training), address, port, _COLLECTIVE_S / 2)
        calls = {node_id: (links.all_reduce, rank, *meeting) for rank, node_id in enumerate(training)}
        answers = self.nodes.ask("all-reduce", _COLLECTIVE_S, calls)
        for node_id in training:
            facts = self.nodes.facts[node_id]
            if node_id not in answers:
                failure = failure or facts.failure or f"{facts.host} is silent"
                self.nodes.note(node_id, failure=None)  # which node is to blame is not known from this
        slowest = min((mb_per_s for _, mb_per_s in answers.values()), default=None)
        wrong = tuple(node_id for node_id, (correct, _) in answers.items() if not correct)
        self.collectives.append(Collective("between nodes", len(training), slowest, failure, wrong))


def link_rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return a ring of (sender, receiver) in rounds in which every node is in one pair at most."""
    if len(nodes) <= 2:
        return [[(nodes[0], nodes[1])]] if len(nodes) == 2 else []
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    last = [ring.pop()] if len(nodes) % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def lost_nodes(nodes: Iterable[Mapping[str, Any]], examined: Iterable[str]) -> tuple[LostNode, ...]:
    """Return those of Ray's nodes that died unexpectedly and whose address has no living one.

    Not those among `examined`: that they are silent is said already.
    """
    nodes, known = list(nodes), set(examined)
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    found = {}
    for node in nodes:
        address, node_id = node["NodeManagerAddress"], node["NodeID"]
        if address not in alive and node_id not in known and node["DeathReason"] == _UNEXPECTED:
            reason = (node["DeathReasonMessage"] or "dead").strip()
            found[address] = LostNode(node_id, node["NodeManagerHostname"], address, reason)
    return tuple(found.values())


def wait_for_workers(num_workers: int, timeout_s: float) -> None:
    """Wait until `num_workers` nodes for workers are alive, or the time is up."""
    deadline, told = time.monotonic() + timeout_s, -1
    while True:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        up = sum(each.get("CPU", 0) + each.get("GPU", 0) > 0 for each in resources)
        if up >= num_workers or time.monotonic() > deadline:
            return
        if up != told:
            print(f"waiting for {num_workers} worker nodes, {up} are up", file=sys.stderr, flush=True)
            told = up
        time.sleep(1)


def examine(uri: str | None, quick: bool, workers_wanted: int | None = None) -> tuple[ClusterFacts, list[NodeFinding]]:
    """Measure the connected cluster and judge it. `uri` is the storage that all nodes must share; None: not proved."""
    checkup = Checkup()
    try:
        checkup.nodes.start()
        checkup.quick(uri)
        if not quick:
            checkup.full(uri)
    finally:
        checkup.nodes.close()
    facts = ClusterFacts(
        tuple(checkup.nodes.facts.values()),
        lost_nodes(ray.nodes(), checkup.nodes.facts),
        workers_wanted,
        tuple(checkup.collectives),
        probes.versions(with_nccl=False),
    )
    return facts, judge(facts)


def quick_check(uri: str | None) -> list[NodeFinding]:
    """Return what the quick part says of the living nodes of the connected cluster; nothing on one node."""
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return []
    facts, _ = examine(uri, quick=True)
    return judge(replace(facts, lost=()))  # a sweep starts on the living nodes


def require_sound(uri: str | None) -> None:
    """Before a sweep: log the warnings of the quick part, and raise ClusterError when a node has an error."""
    found = quick_check(uri)
    for each in found:
        if each.finding.level == "warning":
            logger.warning("%s", each)
    errors = [str(each) for each in found if each.finding.level == "error"]
    if errors:
        raise ClusterError("\n".join([*errors, "fix these nodes, or go on all the same with --no-check"]))


def check(
    storage_path: str | None, num_workers: int | None, wait_s: float, as_json: bool, exclude_bad: bool, quick: bool
) -> int:
    """Run the command: print table and findings, or JSON, or Ray's label selector for the nodes in order.

    Returns 1 when there is an error; with `exclude_bad` when too few nodes are left.
    """
    from trainers.on_ray.connect import connect

    connect(show_workers=False)
    if num_workers is not None:
        wait_for_workers(num_workers, wait_s)
    # A relative default would be another directory on every node.
    uri = storage_path or os.environ.get("PACELINE_STORAGE")
    began = time.monotonic()
    facts, found = examine(uri, quick, num_workers)
    return print_report(facts, found, uri, time.monotonic() - began, as_json, exclude_bad)
