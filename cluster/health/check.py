"""Examine a live cluster: an actor on every node measures, verdicts.py judges (Ray).

Environment read: RAY_ADDRESS, the cluster; PACELINE_STORAGE, the shared storage that is
proved.
"""

import math
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.health import probes
from cluster.health.report import print_report
from cluster.health.verdicts import (
    AllReduce,
    ClusterFacts,
    NodeFacts,
    Rate,
    better,
    judge,
    slow,
    unshared,
)
from trainers.errors import ClusterError, last_line
from trainers.on_ray.gpus import hide_unassigned_gpus
from trainers.on_ray.internals import available_resources_per_node
from trainers.storage import Storage

_START_S = 60.0
_PART_S = 20.0
_MEASURE_S = 45.0
_COLLECTIVE_S = 40.0
"""How long a node may take to start an actor, to answer, to measure, and to meet the
others.
"""
_PINGS = 5
_MEASUREMENTS = 4  # at most: as long as a node looks slow
_UNEXPECTED = 2  # of Ray's NodeDeathInfo: neither drained nor scaled down

Call = tuple[Any, ...]  # a function of cluster/health/probes.py, and its arguments


class Probe:
    """Runs probes on its node."""

    def __init__(self) -> None:
        # something else trains on them: products beside it are slow, and the node is
        # called bad
        hide_unassigned_gpus()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function."""
        return function(*args)


class Checkup:
    """One examination of the connected cluster.

    A node that fails to answer is left out of what follows.
    """

    def __init__(self) -> None:
        self.facts: dict[str, NodeFacts] = {}
        """By node id."""
        self.all_reduce: AllReduce | None = None
        self._actors: dict[str, Any] = {}

    def start(self) -> None:
        """Start an actor on every node that is alive.

        It holds the node's GPUs if nothing else does.
        """
        available = available_resources_per_node()
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            node_id = node["NodeID"]
            resources = node["Resources"]
            gpus = int(resources.get("GPU", 0))
            is_free = available.get(node_id, {}).get("GPU", 0) >= gpus
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            actor = ray.remote(Probe).options(
                num_cpus=0,
                num_gpus=gpus if is_free else 0,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            self._actors[node_id] = actor.remote()
            host = node["NodeManagerHostname"]
            address = node["NodeManagerAddress"]
            trains = resources.get("CPU", 0) + gpus > 0
            self.facts[node_id] = NodeFacts(
                node_id, host, address, trains, num_gpus=gpus
            )

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors.values():
            ray.kill(actor)

    def quick(self, uri: str | None) -> None:
        """Examine versions, clocks and storage."""
        self._learn("versions", "its start", _START_S, probes.versions)
        self._clocks()
        if uri is not None and len(self.facts) > 1:
            self._storage(uri)

    def full(self) -> None:
        """Examine the GPUs' health, and measure every rate."""
        self._learn("device", "importing torch", _START_S, probes.device_name)
        self._learn("gpus", "reading its GPUs", _PART_S, probes.gpu_health)
        for _ in range(_MEASUREMENTS):
            self._measure()
            nodes = [self.facts[node_id] for node_id in self.answering()]
            # A node that is slow stays slow in every measurement; one that something
            # disturbed for a moment does not.
            if not slow(nodes):
                break
            # Where a link is cut, each try takes its whole timeout.
            rates = [
                min(rate.value for rate in node.rates) for node in nodes if node.rates
            ]
            if 0 in rates:
                break
        training = self.answering(training=True)
        if len(training) > 1:
            self.all_reduce = self._meet([training])[0]

    def answering(self, training: bool = False) -> list[str]:
        """List the nodes that have answered everything so far, or those that train."""
        return [
            id_
            for id_, node in self.facts.items()
            if node.answers and (node.trains or not training)
        ]

    def ask(
        self, part: str, timeout_s: float, calls: Mapping[str, Call]
    ) -> dict[str, Any]:
        """Return results by node id, of all `calls` at once.

        Notes which node gave none in time, or failed.
        """
        references = {
            node_id: self._actors[node_id].call.remote(*call)
            for node_id, call in calls.items()
        }
        ready, _ = ray.wait(
            list(references.values()), num_returns=len(references), timeout=timeout_s
        )
        results = {}
        for node_id, reference in references.items():
            if reference not in ready:
                self._note(node_id, silent_in=part)
                continue
            try:
                results[node_id] = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                self._note(node_id, failure=f"{part}: {last_line(error)}")
            except ray.exceptions.RayError as error:
                words = last_line(error)
                # An actor whose class cannot be imported there has died of it.
                if "Error:" in words:
                    self._note(node_id, failure=words)
                else:  # its node is gone
                    self._note(node_id, silent_in=part)
        return results

    def _note(self, node_id: str, **facts: Any) -> None:
        self.facts[node_id] = replace(self.facts[node_id], **facts)

    def _learn(self, fact: str, part: str, timeout_s: float, *call: Any) -> None:
        """Ask all nodes that answer; note each answer as a field of its facts."""
        calls = dict.fromkeys(self.answering(), call)
        for node_id, answer in self.ask(part, timeout_s, calls).items():
            self._note(node_id, **{fact: answer})

    def _clocks(self) -> None:
        """Compare the clocks with this one, then with their median.

        Of several answers the quickest counts (Cristian 1989).
        """
        best_s = math.inf
        offsets = {}
        for _ in range(_PINGS):
            asked = time.time()
            answers = self.ask(
                "reading its clock",
                _PART_S,
                dict.fromkeys(self.answering(), (time.time,)),
            )
            half_s = (time.time() - asked) / 2
            if half_s < best_s:
                best_s = half_s
                offsets = {
                    node_id: answer - asked - half_s
                    for node_id, answer in answers.items()
                }
        usual = statistics.median(offsets.values()) if offsets else 0.0
        for node_id, offset in offsets.items():
            self._note(node_id, clock_offset_s=offset - usual, clock_error_s=best_s)

    def _storage(self, uri: str) -> None:
        """Have every node write a marker, then read those of all."""
        place = Storage(uri).child(f".check-{uuid.uuid4().hex[:8]}").uri
        calls: dict[str, Call] = {
            node_id: (probes.write_marker, place, node_id)
            for node_id in self.answering()
        }
        wrote = self.ask("writing to storage", _PART_S, calls)
        writers = [node_id for node_id, wrong in wrote.items() if wrong is None]
        calls = dict.fromkeys(writers, (probes.seen_markers, place, writers))
        seen = self.ask("reading from storage", _PART_S, calls)
        self.ask(
            "deleting from storage",
            _PART_S,
            dict.fromkeys(seen, (probes.delete_markers, place)),
        )
        for node_id, wrong in wrote.items():
            self._note(node_id, storage=wrong)
        for node_id in unshared(seen):
            self._note(
                node_id, storage=f"{uri}: files that other nodes wrote cannot be read"
            )

    def _measure(self) -> None:
        """Measure products of each node, and its better link to a neighbour."""
        training = self.answering(training=True)
        measured = self.ask(
            "multiplying", _MEASURE_S, dict.fromkeys(training, (probes.matmul_rates,))
        )
        best = dict.fromkeys(training, 0.0)
        for pairs in link_rounds(self.answering(training=True)):
            for pair, link in zip(pairs, self._meet(pairs), strict=True):
                for node_id in pair:
                    best[node_id] = max(best[node_id], link.mb_per_s or 0.0)
        for node_id in measured:
            rates = list(measured[node_id])
            if len(training) > 1:
                rates.append(Rate("network", "network", best[node_id], "MB/s"))
            self._note(node_id, rates=better(self.facts[node_id].rates, rates))

    def _meet(self, groups: Sequence[Sequence[str]]) -> list[AllReduce]:
        """Run all-reduce in all groups at once; return the slowest rank of each."""
        first = {
            group[0]: (probes.free_port, self.facts[group[0]].address)
            for group in groups
        }
        ports = self.ask("all-reduce", _PART_S, first)
        calls: dict[str, Call] = {}
        for group in groups:
            if group[0] not in ports:
                continue
            meeting = (
                len(group),
                self.facts[group[0]].address,
                ports[group[0]],
                _COLLECTIVE_S / 2,
            )
            calls |= {
                node_id: (probes.all_reduce, rank, *meeting)
                for rank, node_id in enumerate(group)
            }
        answers: dict[str, AllReduce] = self.ask("all-reduce", _COLLECTIVE_S, calls)
        for node_id, answer in answers.items():
            self._note(
                node_id, wrong_sum=self.facts[node_id].wrong_sum or not answer.is_right
            )
        slowest = []
        for group in groups:
            silent = AllReduce(len(group), failure="a node is silent")
            seen = [answers.get(node_id, silent) for node_id in group]
            slowest.append(min(seen, key=lambda answer: answer.mb_per_s or 0.0))
        return slowest


def link_rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return a ring of pairs in rounds in which every node is in one pair at most."""
    first = list(zip(nodes[::2], nodes[1::2], strict=False))
    second = list(zip(nodes[1::2], nodes[2::2], strict=False))
    third = [(nodes[-1], nodes[0])] if len(nodes) > 2 else []
    return [pairs for pairs in (first, second, third) if pairs]


def lost_nodes(
    nodes: Sequence[Mapping[str, Any]], examined: Iterable[str]
) -> list[NodeFacts]:
    """Return the nodes that died unexpectedly and whose address has no living one.

    Not those among `examined`: that they are silent is said already.
    """
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    found = {}
    for node in nodes:
        address = node["NodeManagerAddress"]
        node_id = node["NodeID"]
        has_died = node["DeathReason"] == _UNEXPECTED and address not in alive
        if has_died and node_id not in examined:
            reason = (node["DeathReasonMessage"] or "dead").strip()
            host = node["NodeManagerHostname"]
            found[address] = NodeFacts(node_id, host, address, False, lost=reason)
    return list(found.values())


def wait_for_workers(num_workers: int, timeout_s: float) -> None:
    """Wait until `num_workers` nodes for workers are alive, or the time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        up = sum(each.get("CPU", 0) + each.get("GPU", 0) > 0 for each in resources)
        if up >= num_workers:
            return
        print(
            f"waiting for {num_workers} worker nodes, {up} are up",
            end="\r",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1)


def examine(
    uri: str | None, quick: bool, workers_wanted: int | None = None
) -> ClusterFacts:
    """Measure the connected cluster.

    `uri` is the storage that all nodes must share; None: not proved.
    """
    checkup = Checkup()
    try:
        checkup.start()
        checkup.quick(uri)
        if not quick:
            checkup.full()
    finally:
        checkup.close()
    nodes = [*checkup.facts.values(), *lost_nodes(ray.nodes(), checkup.facts)]
    return ClusterFacts(tuple(nodes), workers_wanted, checkup.all_reduce)


def require_sound(uri: str | None) -> None:
    """Raise ClusterError for what the quick part finds, before a sweep."""
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return
    nodes = examine(uri, quick=True).nodes
    # A sweep starts on the living ones.
    found = judge(ClusterFacts(tuple(node for node in nodes if not node.lost)))
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
    """Run the command: print table and findings, JSON, or a selector of nodes in order.

    Returns 1 when there is an error; with `exclude_bad` when too few nodes are left.
    """
    from trainers.on_ray.connect import connect

    connect(show_workers=False)
    if num_workers is not None:
        wait_for_workers(num_workers, wait_s)
    # A relative default would be another directory on every node.
    uri = storage_path or os.environ.get("PACELINE_STORAGE")
    began = time.monotonic()
    facts = examine(uri, quick, num_workers)
    return print_report(
        facts, judge(facts), uri, time.monotonic() - began, as_json, exclude_bad
    )
