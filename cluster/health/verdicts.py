"""Pure: from what the nodes of a cluster measured, the verdict on each of them."""

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from cluster.finding import Finding, error, warning
from cluster.health.facts import ClusterFacts, Kind, NodeFacts, NodeFinding, Rate

Verdict = Literal["ok", "doubtful", "bad"]

CLOCK_S = 1.0  # NTP keeps a few milliseconds; certificates, tokens and object stores begin to refuse at minutes
_MADS = 6.0
_TO_SIGMA = 1.4826  # of a normal distribution's MAD
# How far below its peers a node may be before anything is said: products repeat well, shared links and disks do not.
_FLOORS: dict[Kind, float] = {"matmul": 0.2, "network": 0.5, "local disk": 0.6, "storage": 0.6}
_MOST: dict[Kind, float] = {"matmul": 0.35, "network": 0.7, "local disk": 0.75, "storage": 0.75}
"""Whatever the spread: of few nodes a slow one is most of it, and of two neither is the usual one."""
_SLOW_FIX: dict[Kind, str] = {
    "matmul": "look for another process, heat or a power limit there",
    "network": "look at its cable, port and MTU",
}


def judge(cluster: ClusterFacts) -> list[NodeFinding]:
    """Return every remark on every node, those on the cluster as a whole last."""
    answering = [node for node in cluster.nodes if node.silent_in is None and node.failure is None]
    found = [_on(node, each) for node in cluster.nodes for each in _alone(node, len(cluster.nodes))]
    for name in dict.fromkeys(name for node in answering for name in node.versions):
        found += _versions(name, answering, cluster.reference.get(name))
    found += slow(answering)
    for lost in cluster.lost:
        fix = "look at the host and its cable; Ray takes it back when `ray start` runs there again"
        found.append(NodeFinding(lost.node_id, lost.host, error("node", lost.reason, "must be alive", fix)))
    found += _collectives(cluster)
    workers = sum(node.trains for node in answering)
    if cluster.workers_wanted is not None and workers < cluster.workers_wanted:
        rule = f"must be at least {cluster.workers_wanted}"
        finding = error("worker nodes", workers, rule, "wait for more, or look at `ray status`")
        found.append(NodeFinding("", "cluster", finding))
    return found


def verdicts(cluster: ClusterFacts, found: Sequence[NodeFinding]) -> dict[str, Verdict]:
    """Return the verdict on each node, by its id: bad is what has an error, doubtful what has a warning."""
    result: dict[str, Verdict] = {node.node_id: "ok" for node in cluster.nodes}
    result |= {lost.node_id: "bad" for lost in cluster.lost}
    for each in found:
        if each.node_id and result.get(each.node_id) != "bad":
            result[each.node_id] = "bad" if each.finding.level == "error" else "doubtful"
    return result


def label_selector(verdict: Mapping[str, Verdict]) -> dict[str, str]:
    """Return Ray's label selector for all nodes but the bad ones."""
    bad = sorted(node_id for node_id, is_ in verdict.items() if is_ == "bad")
    return {"ray.io/node-id": f"!in({','.join(bad)})"} if bad else {}


def unshared(seen: Mapping[str, set[str]]) -> dict[str, str]:
    """Find the nodes that do not see the storage that more than half of them share, each with one whose file it misses.

    `seen`: whose markers each node could read.
    """
    views = Counter(frozenset(own) for own in seen.values())
    shared, num_nodes = max(views.items(), key=lambda item: (item[1], len(item[0])), default=(frozenset(), 0))
    if 2 * num_nodes <= len(seen):
        shared = frozenset()
    return {node_id: min(set(seen) - own) for node_id, own in seen.items() if own != shared and set(seen) - own}


def slow(nodes: Sequence[NodeFacts]) -> list[NodeFinding]:
    """Find nodes that fall behind their peers of the same device, by median and MAD (Leys et al. 2013), or of two by
    their ratio; a spread that is usual for the figure is never remarked on.
    """
    found = []
    for kind, group in _groups(nodes):
        values = [rate.value for _, rate in group]
        # A slow disk delays checkpoints; a slow processor or link every step of every rank.
        remark = error if kind in ("matmul", "network") else warning
        for node, rate in group:
            if rate.value < least(values, kind):
                value = f"{rate.value:,.3g} {rate.unit}"
                rule = f"must not fall so far behind the {_usual(values):,.3g} of the other nodes"
                fix = _SLOW_FIX.get(kind, "look for another process or a full disk there")
                found.append(_on(node, remark(rate.what, value, rule, fix)))
    return found


def doubtful(nodes: Sequence[NodeFacts], settled: Container[tuple[Kind, str]]) -> dict[Kind, set[str]]:
    """Return the nodes to measure again, by kind of rate: those more than halfway to being called slow, and the
    fastest of their peers, since a moment's disturbance of either would mislead. Those `settled` are no reason.
    """
    again: dict[Kind, set[str]] = {}
    for kind, group in _groups(nodes):
        values = [rate.value for _, rate in group]
        halfway = (_usual(values) + least(values, kind)) / 2
        # Where nothing arrives a link is cut, not slow, and each try lasts for its whole timeout.
        suspects = {node.node_id for node, rate in group if 0 < rate.value < halfway}
        if any((kind, node_id) not in settled for node_id in suspects):
            fastest, _ = max(group, key=lambda pair: pair[1].value)
            again[kind] = again.get(kind, set()) | suspects | {fastest.node_id}
    return again


def better(before: Iterable[Rate], now: Iterable[Rate]) -> tuple[Rate, ...]:
    """Keep the higher one of each figure: what slows a measurement for a moment says nothing of the node."""
    best = {rate.what: rate for rate in before}
    for rate in now:
        best[rate.what] = max(rate, best.get(rate.what, rate), key=lambda each: each.value)
    return tuple(best.values())


def least(values: Sequence[float], kind: Kind) -> float:
    """Return what a figure must reach among its peers not to be called slow; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    if len(values) == 2:
        return (1 - _MOST[kind]) * max(values)
    median = statistics.median(values)
    spread = _MADS * _TO_SIGMA * statistics.median(abs(value - median) for value in values)
    return median - min(max(spread, _FLOORS[kind] * median), _MOST[kind] * median)


def _usual(values: Sequence[float]) -> float:
    return statistics.median(values) if len(values) > 2 else max(values)


def _groups(nodes: Sequence[NodeFacts]) -> list[tuple[Kind, list[tuple[NodeFacts, Rate]]]]:
    """The figures that are comparable: products of the same device, links and disks of all nodes."""
    groups: dict[tuple[Kind, str], list[tuple[NodeFacts, Rate]]] = {}
    for node in nodes:
        for rate in node.rates:
            groups.setdefault((rate.kind, node.device if rate.kind == "matmul" else ""), []).append((node, rate))
    return [(kind, group) for (kind, _), group in groups.items()]


def _on(node: NodeFacts, finding: Finding) -> NodeFinding:
    return NodeFinding(node.node_id, node.host, finding)


def _alone(node: NodeFacts, num_nodes: int) -> Iterator[Finding]:
    """What one node's facts say by themselves."""
    if node.silent_in is not None:
        fix = "look at the host and its cable, and at `ray status`"
        yield error("node", f"silent in {node.silent_in}", "must answer", fix)
    if node.failure is not None:
        yield error("node", node.failure, "must be able to run the check", "install there what the other nodes have")
    if node.clock_offset_s is not None and abs(node.clock_offset_s) > CLOCK_S + node.clock_error_s:
        ahead = f"{abs(node.clock_offset_s):.1f} s {'ahead' if node.clock_offset_s > 0 else 'behind'}"
        yield error("clock", ahead, f"must be within {CLOCK_S:g} s of the others", "start NTP there")
    if num_nodes > 1 and node.trains and node.own_address is not None and node.own_address.startswith("127."):
        rule = "should be an address that other nodes reach, or gloo listens where they do not"
        yield warning("own name", node.own_address, rule, f"write `{node.address} {node.host}` in /etc/hosts")
    if node.storage is not None:
        fix = "mount the same directory on every node, or use a URI such as s3://bucket/path"
        yield error("storage", node.storage, "must be one place for all nodes", fix)
    if node.gpus is not None and len(node.gpus) < node.num_gpus:
        rule = f"must be the {node.num_gpus} that Ray gives out"
        yield error("GPUs", len(node.gpus), rule, "restart the host, or take it out of the cluster")
    for gpu in node.gpus or ():
        field, slowed = f"GPU {gpu.index}", ", ".join(gpu.slowed_by)
        for wrong, value, rule, fix in (
            (gpu.failure, gpu.failure, "must answer NVML", "restart the host; if it stays so, replace the GPU"),
            (gpu.uncorrected_errors, f"{gpu.uncorrected_errors} uncorrected memory errors", "must have none",
             "reset it; if they return, replace it"),
            (gpu.rows_failed, "memory rows not remapped", "must be healthy", "reset it; if it stays so, replace it"),
            (slowed, f"slowed by {slowed}", "must run at its own clocks", "look at cooling and power"),
        ):  # fmt: skip
            if wrong:
                yield error(field, value, rule, fix)
        if gpu.other_processes:
            value = f"used by {gpu.other_processes} other processes"
            yield warning(field, value, "should be free", "see `nvidia-smi` there")


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
            yield _on(node, error(name, version or "absent", rule, "install the same everywhere"))


def _collectives(cluster: ClusterFacts) -> Iterator[NodeFinding]:
    hosts = {node.node_id: node.host for node in cluster.nodes}
    for each in cluster.collectives:
        field = f"all-reduce {each.between}"
        if each.failure is not None:
            fix = "look at the nodes' names in /etc/hosts, the firewall between them and NCCL_DEBUG=INFO"
            yield NodeFinding("", "cluster", error(field, each.failure, "must end with a sum", fix))
        for node_id in each.wrong_on:
            finding = error(field, "a wrong sum", "must be right to the last bit", "replace the node")
            yield NodeFinding(node_id, hosts.get(node_id, node_id), finding)
