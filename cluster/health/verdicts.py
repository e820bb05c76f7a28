"""Pure: from what the nodes of a cluster measured, the verdict on each of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.finding import Finding

Verdict = Literal["ok", "doubtful", "bad"]

CLOCK_S = 1.0
"""NTP keeps a few milliseconds; certificates, tokens and object stores begin to refuse at minutes."""
_MADS = 6.0
_TO_SIGMA = 1.4826  # of a normal distribution's MAD
# How far below its peers a node may be before anything is said: products repeat well, shared links and disks do not.
_FLOORS = {"matmul": 0.2, "network": 0.5, "local disk": 0.6, "storage": 0.6}
_MOST = {"matmul": 0.35, "network": 0.7, "local disk": 0.75, "storage": 0.75}
"""Whatever the spread: of few nodes a slow one is most of it, and of two neither is the usual one."""


@dataclass(frozen=True)
class Rate:
    """One figure that is compared between nodes: higher is better."""

    kind: Literal["matmul", "network", "local disk", "storage"]
    what: str
    """What was measured, such as `matmul of cuda:3` or `writing to storage`."""
    value: float
    unit: str


@dataclass(frozen=True)
class GpuHealth:
    """What NVML says of one GPU."""

    index: int
    name: str
    uncorrected_errors: int = 0
    """Memory errors since the driver was loaded that ECC could not mend."""
    rows_failed: bool = False
    """A defective row could not be replaced, or its replacement waits for a reset."""
    slowed_by: tuple[str, ...] = ()
    other_processes: int = 0
    failure: str | None = None
    """Why NVML says nothing of it."""


@dataclass(frozen=True)
class NodeFacts:
    """What is known of one node that is alive."""

    node_id: str
    host: str
    address: str
    trains: bool
    """Whether it has CPUs or GPUs for workers; a head often has none."""
    silent_in: str | None = None
    """The part of the check in which it gave no answer; nothing later is known of it."""
    failure: str | None = None
    """What it answered instead of a result."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    clock_offset_s: float | None = None
    """Its clock less the mean of all."""
    clock_error_s: float = 0.0
    """The offset is known to within this."""
    own_address: str | None = None
    """What its own name resolves to."""
    storage: str | None = None
    """What is wrong with the shared storage here; None when a marker went both ways."""
    device: str = ""
    """Model of its CPU or GPUs; rates are compared between equal ones."""
    num_gpus: int = 0
    """As Ray counts them."""
    gpus: tuple[GpuHealth, ...] | None = None
    """None where NVML does not answer."""
    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True)
class LostNode:
    """A node that died unasked and did not come back."""

    node_id: str
    host: str
    address: str
    reason: str


@dataclass(frozen=True)
class Collective:
    """One all-reduce over a group of devices."""

    between: str
    num_ranks: int
    mb_per_s: float | None = None
    """Bus bandwidth, as NCCL's own tests define it: what each rank's link carries."""
    failure: str | None = None
    wrong_on: tuple[str, ...] = ()
    """Node ids where the sum was not the right one."""


@dataclass(frozen=True)
class ClusterFacts:
    """All that a check has found out."""

    nodes: tuple[NodeFacts, ...]
    lost: tuple[LostNode, ...] = ()
    workers_wanted: int | None = None
    collectives: tuple[Collective, ...] = ()
    reference: Mapping[str, str | None] = field(default_factory=dict)
    """Versions where the check was started: they decide where the nodes are split in halves."""


@dataclass(frozen=True)
class NodeFinding:
    """A remark on one node, or on the cluster where `node_id` is empty."""

    node_id: str
    host: str
    finding: Finding

    def __str__(self) -> str:
        return f"{self.host}: {self.finding}"


def judge(cluster: ClusterFacts) -> list[NodeFinding]:
    """Every remark on every node, those on the cluster as a whole last."""
    answering = [node for node in cluster.nodes if node.silent_in is None and node.failure is None]
    found: list[NodeFinding] = []
    for node in cluster.nodes:
        found += [NodeFinding(node.node_id, node.host, finding) for finding in _alone(node, len(cluster.nodes))]
    for name in dict.fromkeys(name for node in answering for name in node.versions):
        found += _versions(name, answering, cluster.reference.get(name))
    found += slow(answering)
    for lost in cluster.lost:
        fix = "look at the host and its cable; Ray takes it back when `ray start` runs there again"
        found.append(NodeFinding(lost.node_id, lost.host, Finding("error", "node", lost.reason, "must be alive", fix)))
    found += _collectives(cluster)
    workers = sum(node.trains for node in answering)
    if cluster.workers_wanted is not None and workers < cluster.workers_wanted:
        rule = f"must be at least {cluster.workers_wanted}"
        finding = Finding("error", "worker nodes", workers, rule, "wait for more, or look at `ray status`")
        found.append(NodeFinding("", "cluster", finding))
    return found


def verdicts(cluster: ClusterFacts, found: Sequence[NodeFinding]) -> dict[str, Verdict]:
    """The verdict on each node, by its id: bad is what has an error, doubtful what has a warning."""
    result: dict[str, Verdict] = {node.node_id: "ok" for node in cluster.nodes}
    result |= {lost.node_id: "bad" for lost in cluster.lost}
    for each in found:
        if each.node_id and result.get(each.node_id) != "bad":
            result[each.node_id] = "bad" if each.finding.level == "error" else "doubtful"
    return result


def label_selector(bad: Sequence[str]) -> dict[str, str]:
    """Ray's label selector for all nodes but these."""
    return {"ray.io/node-id": f"!in({','.join(bad)})"} if bad else {}


def unshared(seen: Mapping[str, set[str]]) -> dict[str, str]:
    """Nodes that do not see the storage that more than half of them share, each with one whose file it misses.

    `seen`: whose markers each node could read.
    """
    together = max(
        Counter(map(frozenset, seen.values())).items(), key=lambda item: (item[1], len(item[0])), default=None
    )
    if together is None or 2 * together[1] <= len(seen):
        together = (frozenset(), 0)
    return {
        node_id: min(set(seen) - own, default=node_id)
        for node_id, own in seen.items()
        if frozenset(own) != together[0] and set(seen) - own
    }


def slow(nodes: Sequence[NodeFacts]) -> list[NodeFinding]:
    """Nodes that fall behind their peers of the same device, by median and MAD (Leys et al. 2013), or of two by their
    ratio; a spread that is usual for the figure is never remarked on.
    """
    measured: dict[tuple[str, str], list[tuple[NodeFacts, Rate]]] = {}
    for node in nodes:
        for rate in node.rates:
            peers = node.device if rate.kind == "matmul" else ""
            what = rate.kind if rate.kind == "matmul" else rate.what
            measured.setdefault((what, peers), []).append((node, rate))
    found = []
    for group in measured.values():
        kind, limit = group[0][1].kind, least([rate.value for _, rate in group], group[0][1].kind)
        usual = statistics.median(rate.value for _, rate in group) if len(group) > 2 else max(r.value for _, r in group)
        for node, rate in group:
            if rate.value < limit:
                value = f"{rate.value:,.3g} {rate.unit}"
                rule = f"must not fall so far behind the {usual:,.3g} of the other nodes"
                fix = {
                    "matmul": "look for another process, heat or a power limit there",
                    "network": "look at its cable, port and MTU",
                }.get(kind, "look for another process or a full disk there")
                # A slow disk delays checkpoints; a slow processor or link every step of every rank.
                level: Literal["error", "warning"] = "error" if kind in ("matmul", "network") else "warning"
                found.append(NodeFinding(node.node_id, node.host, Finding(level, rate.what, value, rule, fix)))
    return found


def least(values: Sequence[float], kind: str) -> float:
    """What a figure must reach among its peers not to be called slow; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    if len(values) == 2:
        return (1 - _MOST[kind]) * max(values)
    median = statistics.median(values)
    spread = _MADS * _TO_SIGMA * statistics.median(abs(value - median) for value in values)
    return median - min(max(spread, _FLOORS[kind] * median), _MOST[kind] * median)


def _alone(node: NodeFacts, num_nodes: int) -> Iterator[Finding]:
    """What one node's facts say by themselves."""
    if node.silent_in is not None:
        fix = "look at the host and its cable, and at `ray status`"
        yield Finding("error", "node", f"silent in {node.silent_in}", "must answer", fix)
    if node.failure is not None:
        fix = "install there what the other nodes have"
        yield Finding("error", "node", node.failure, "must be able to run the check", fix)
    if node.clock_offset_s is not None and abs(node.clock_offset_s) > CLOCK_S + node.clock_error_s:
        ahead = f"{abs(node.clock_offset_s):.1f} s {'ahead' if node.clock_offset_s > 0 else 'behind'}"
        yield Finding("error", "clock", ahead, f"must be within {CLOCK_S:g} s of the others", "start NTP there")
    if num_nodes > 1 and node.trains and node.own_address is not None and node.own_address.startswith("127."):
        rule = "should be an address that other nodes reach, or gloo listens where they do not"
        yield Finding(
            "warning", "own name", node.own_address, rule, f"write `{node.address} {node.host}` in /etc/hosts"
        )
    if node.storage is not None:
        fix = "mount the same directory on every node, or use a URI such as s3://bucket/path"
        yield Finding("error", "storage", node.storage, "must be one place for all nodes", fix)
    if node.gpus is not None and len(node.gpus) < node.num_gpus:
        fix = "restart the host, or take it out of the cluster"
        yield Finding("error", "GPUs", len(node.gpus), f"must be the {node.num_gpus} that Ray gives out", fix)
    for gpu in node.gpus or ():
        yield from _gpu(gpu)


def _gpu(gpu: GpuHealth) -> Iterator[Finding]:
    if gpu.failure is not None:
        fix = "restart the host; if it stays so, replace the GPU"
        yield Finding("error", f"GPU {gpu.index}", gpu.failure, "must answer NVML", fix)
    if gpu.uncorrected_errors:
        value = f"{gpu.uncorrected_errors} uncorrected memory errors"
        yield Finding("error", f"GPU {gpu.index}", value, "must have none", "reset it; if they return, replace it")
    if gpu.rows_failed:
        fix = "reset it; if it stays so, replace it"
        yield Finding("error", f"GPU {gpu.index}", "memory rows not remapped", "must be healthy", fix)
    if gpu.slowed_by:
        value = f"slowed by {', '.join(gpu.slowed_by)}"
        yield Finding("error", f"GPU {gpu.index}", value, "must run at its own clocks", "look at cooling and power")
    if gpu.other_processes:
        value = f"used by {gpu.other_processes} other processes"
        yield Finding("warning", f"GPU {gpu.index}", value, "should be free", "see `nvidia-smi` there")


def _versions(name: str, nodes: Sequence[NodeFacts], reference: str | None) -> Iterator[NodeFinding]:
    """Nodes that differ from the most; of equally many, from where the check was started."""
    counts = Counter(node.versions.get(name) for node in nodes)
    most = max(counts.values())
    candidates = [version for version, count in counts.items() if count == most]
    right = reference if reference in candidates else candidates[0]
    for node in nodes:
        version = node.versions.get(name)
        if version != right:
            rule = f"must be {right or 'absent'} as on the other nodes"
            finding = Finding("error", name, version or "absent", rule, "install the same everywhere")
            yield NodeFinding(node.node_id, node.host, finding)


def _collectives(cluster: ClusterFacts) -> Iterator[NodeFinding]:
    hosts = {node.node_id: node.host for node in cluster.nodes}
    fix = "look at the nodes' names in /etc/hosts, the firewall between them and NCCL_DEBUG=INFO"
    for each in cluster.collectives:
        if each.failure is not None:
            finding = Finding("error", f"all-reduce {each.between}", each.failure, "must end with a sum", fix)
            yield NodeFinding("", "cluster", finding)
        for node_id in each.wrong_on:
            finding = Finding(
                "error",
                f"all-reduce {each.between}",
                "a wrong sum",
                "must be right to the last bit",
                "replace the node",
            )
            yield NodeFinding(node_id, hosts.get(node_id, node_id), finding)
