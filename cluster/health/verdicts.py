"""Judge what nodes have measured: far below the others' median is slow. Pure."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.finding import Finding, error

Kind = Literal["matmul", "network"]
"""What is measured of every node that trains."""

# NTP keeps a few milliseconds; certificates, tokens and object stores begin to refuse
# at minutes
CLOCK_S = 1.0
_LEAST: dict[Kind, float] = {"matmul": 0.65, "network": 0.3}
"""What share of the others' median a node must reach: products repeat well, shared
links do not.
"""
_SLOW_FIX: dict[Kind, str] = {
    "matmul": "look for another process, heat or a power limit there",
    "network": "look at its cable, port and MTU",
}


@dataclass(frozen=True)
class Rate:
    """One figure that is compared between nodes: higher is better."""

    kind: Kind
    what: str
    """What was measured, such as `matmul of cuda:3`."""
    value: float
    unit: str


@dataclass(frozen=True)
class GpuHealth:
    """What NVML says of one GPU."""

    index: int
    uncorrected_errors: int = 0
    """Memory errors since the driver was loaded that ECC could not correct."""
    rows_failed: bool = False
    """A defective row could not be replaced, or its replacement waits for a reset."""
    slowed_by: tuple[str, ...] = ()
    failure: str | None = None
    """Why NVML says nothing of it."""


@dataclass(frozen=True)
class AllReduce:
    """A sum over one device of each node, as one rank saw it, or all of them."""

    num_ranks: int
    mb_per_s: float | None = None
    """Bus bandwidth, as NCCL's own tests define it: what each rank's link carries."""
    failure: str | None = None
    is_right: bool = True


@dataclass(frozen=True)
class NodeFacts:
    """What is known of a node that is alive, or has died unexpectedly for good."""

    node_id: str
    host: str
    address: str
    trains: bool
    """Whether it has CPUs or GPUs for workers; a head often has none."""
    lost: str | None = None
    """Why Ray has given it up; None of one that is alive."""
    silent_in: str | None = None
    """The part of the check in which it gave no answer; nothing later is known of it.
    """
    failure: str | None = None
    """What it answered instead of a result."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    clock_offset_s: float | None = None
    """Its clock less the median of all."""
    clock_error_s: float = 0.0
    """The offset is known to within this."""
    storage: str | None = None
    """What is wrong with the shared storage here; None when its marker was seen, and
    those of others.
    """
    device: str = ""
    """Model of its CPU or GPUs; products are compared between equal ones."""
    num_gpus: int = 0
    """As Ray counts them."""
    gpus: tuple[GpuHealth, ...] | None = None
    """None where NVML does not answer."""
    rates: tuple[Rate, ...] = ()
    wrong_sum: bool = False
    """Whether its all-reduce with the other nodes had another sum than the right one.
    """

    @property
    def answers(self) -> bool:
        """Whether it has answered everything so far."""
        return self.lost is None and self.silent_in is None and self.failure is None


@dataclass(frozen=True)
class ClusterFacts:
    """All that a check has found out."""

    nodes: tuple[NodeFacts, ...]
    workers_wanted: int | None = None
    all_reduce: AllReduce | None = None
    """Of all nodes that train; None with fewer than two, or where it was not tried."""


@dataclass(frozen=True)
class NodeFinding:
    """What is wrong with one node, or with the cluster where `node_id` is empty."""

    node_id: str
    host: str
    finding: Finding

    def __str__(self) -> str:
        return f"{self.host}: {self.finding}"


def judge(cluster: ClusterFacts) -> list[NodeFinding]:
    """Return all that is wrong: on each node first, then with the cluster as a whole."""
    answering = [node for node in cluster.nodes if node.answers]
    found = []
    names: dict[str, None] = {}
    for node in cluster.nodes:
        found += [_on(node, finding) for finding in _alone(node)]
    for node in answering:
        names.update(dict.fromkeys(node.versions))
    for name in names:
        found += _versions(name, answering)
    found += slow(answering)
    for finding in _together(cluster, answering):
        found.append(NodeFinding("", "cluster", finding))
    return found


def bad_nodes(found: Sequence[NodeFinding]) -> list[str]:
    """Return the ids of the nodes that something is wrong with."""
    return sorted({each.node_id for each in found if each.node_id})


def label_selector(found: Sequence[NodeFinding]) -> dict[str, str]:
    """Return Ray's label selector for all nodes but the bad ones."""
    bad = bad_nodes(found)
    return {"ray.io/node-id": f"!in({','.join(bad)})"} if bad else {}


def unshared(seen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes that do not see the storage of more than half of them.

    `seen`: whose markers each could read.
    """
    return [
        node_id
        for node_id, markers in seen.items()
        if 2 * len(markers) <= len(seen) > 1
    ]


def slow(nodes: Sequence[NodeFacts]) -> list[NodeFinding]:
    """Find nodes far behind the others' median: products of one device, and links."""
    groups: dict[tuple[Kind, str], list[tuple[NodeFacts, Rate]]] = {}
    for node in nodes:
        for rate in node.rates:
            device = node.device if rate.kind == "matmul" else ""
            groups.setdefault((rate.kind, device), []).append((node, rate))
    found = []
    for (kind, _), group in groups.items():
        for node, rate in group:
            others = [other.value for _, other in group if other is not rate]
            if others and rate.value < _LEAST[kind] * statistics.median(others):
                rule = f"must not fall so far behind the {statistics.median(others):,.3g} of the others"
                value = f"{rate.value:,.3g} {rate.unit}"
                found.append(_on(node, error(rate.what, value, rule, _SLOW_FIX[kind])))
    return found


def better(before: Sequence[Rate], now: Sequence[Rate]) -> tuple[Rate, ...]:
    """Keep the higher one of each figure.

    What slows a measurement for a moment says nothing of the node.
    """
    best = {rate.what: rate for rate in before}
    for rate in now:
        if rate.what not in best or rate.value > best[rate.what].value:
            best[rate.what] = rate
    return tuple(best.values())


def _on(node: NodeFacts, finding: Finding) -> NodeFinding:
    return NodeFinding(node.node_id, node.host, finding)


def _alone(node: NodeFacts) -> Iterator[Finding]:
    """Find what is wrong with one node by itself."""
    if node.lost is not None:
        fix = "look at the host and its cable; Ray takes it back when `ray start` runs there again"
        yield error("node", node.lost, "must be alive", fix)
    if node.silent_in is not None:
        fix = "look at the host and its cable, and at `ray status`"
        yield error("node", f"silent in {node.silent_in}", "must answer", fix)
    if node.failure is not None:
        yield error(
            "node",
            node.failure,
            "must be able to run the check",
            "install there what the other nodes have",
        )
    if (
        node.clock_offset_s is not None
        and abs(node.clock_offset_s) > CLOCK_S + node.clock_error_s
    ):
        ahead = f"{abs(node.clock_offset_s):.1f} s {'ahead' if node.clock_offset_s > 0 else 'behind'}"
        yield error(
            "clock",
            ahead,
            f"must be within {CLOCK_S:g} s of the others",
            "start NTP there",
        )
    if node.storage is not None:
        fix = "mount the same directory on every node, or use a URI such as s3://bucket/path"
        yield error("storage", node.storage, "must be one place for all nodes", fix)
    if node.wrong_sum:
        yield error(
            "all-reduce",
            "a wrong sum",
            "must be right to the last bit",
            "replace the node",
        )
    if node.gpus is not None and len(node.gpus) < node.num_gpus:
        rule = f"must be the {node.num_gpus} that Ray gives out"
        yield error(
            "GPUs",
            len(node.gpus),
            rule,
            "restart the host, or take it out of the cluster",
        )
    for gpu in node.gpus or ():
        yield from _gpu(gpu)


def _gpu(gpu: GpuHealth) -> Iterator[Finding]:
    field = f"GPU {gpu.index}"
    if gpu.failure:
        yield error(
            field,
            gpu.failure,
            "must answer NVML",
            "restart the host; if it stays so, replace the GPU",
        )
    if gpu.uncorrected_errors or gpu.rows_failed:
        value = f"{gpu.uncorrected_errors} uncorrected memory errors"
        yield error(
            field,
            value,
            "must have none, and no rows to remap",
            "reset it; if they return, replace it",
        )
    if gpu.slowed_by:
        value = f"slowed by {', '.join(gpu.slowed_by)}"
        yield error(
            field, value, "must run at its own clocks", "look at cooling and power"
        )


def _versions(name: str, nodes: Sequence[NodeFacts]) -> Iterator[NodeFinding]:
    """Find nodes that differ from the most; of equally many, from the first."""
    [(right, _)] = Counter(node.versions.get(name) for node in nodes).most_common(1)
    for node in nodes:
        version = node.versions.get(name)
        if version != right:
            rule = f"must be {right or 'absent'} as on the other nodes"
            yield _on(
                node,
                error(name, version or "absent", rule, "install the same everywhere"),
            )


def _together(
    cluster: ClusterFacts, answering: Sequence[NodeFacts]
) -> Iterator[Finding]:
    if cluster.all_reduce is not None and cluster.all_reduce.failure is not None:
        fix = "look at the nodes' names in /etc/hosts, the firewall between them and NCCL_DEBUG=INFO"
        yield error(
            "all-reduce", cluster.all_reduce.failure, "must end with a sum", fix
        )
    workers = sum(node.trains for node in answering)
    if cluster.workers_wanted is not None and workers < cluster.workers_wanted:
        rule = f"must be at least {cluster.workers_wanted}"
        yield error(
            "worker nodes", workers, rule, "wait for more, or look at `ray status`"
        )
