"""The verdict on each node of a cluster: every planted fault is named, and clean clusters raise no alarm."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from cluster.health.actors import Nodes
from cluster.health.facts import ClusterFacts, Collective, GpuHealth, Kind, LostNode, NodeFacts, Rate

from cluster.health.check import Checkup
from cluster.health.report import lines, print_report
from cluster.health.verdicts import judge, label_selector, least, slow, unshared, verdicts

VERSIONS = {"python": "3.11.7", "torch": "2.15.0", "ray": "2.60.0", "nccl": "2.29.3", "paceline": "0123456789ab"}


def cluster(num_nodes: int, seed: int = 0, num_gpus: int = 0, **facts: Any) -> ClusterFacts:
    """A head that does not train, and nodes whose figures scatter as those of sound ones do."""
    chance = random.Random(seed)
    head = NodeFacts("id-head", "head", "10.0.0.1", trains=False, versions=VERSIONS, clock_offset_s=0.0)
    return ClusterFacts(
        (head, *(node(index, chance, num_gpus) for index in range(num_nodes))),
        collectives=(Collective("between nodes", num_nodes, 900.0),),
        reference=VERSIONS,
        **facts,
    )


def node(index: int, chance: random.Random, num_gpus: int) -> NodeFacts:
    devices = [f"cuda:{gpu}" for gpu in range(num_gpus)] or ["one core"]
    rates = [Rate("matmul", f"matmul of {name}", 600 * chance.gauss(1, 0.03), "GFLOP/s") for name in devices]
    rates += [
        Rate("network", "network", 1100 * chance.gauss(1, 0.1), "MB/s"),
        Rate("local disk", "writing to local disk", 400 * chance.gauss(1, 0.12), "MB/s"),
        Rate("storage", "writing to storage", 200 * chance.gauss(1, 0.12), "MB/s"),
    ]
    return NodeFacts(
        f"id-{index}",
        f"h{index}",
        f"10.0.0.{index + 10}",
        trains=True,
        versions=VERSIONS,
        clock_offset_s=chance.gauss(0, 0.02),
        clock_error_s=0.01,
        own_address=f"10.0.0.{index + 10}",
        device="H200" if num_gpus else "EPYC",
        num_gpus=num_gpus,
        gpus=tuple(GpuHealth(gpu, "H200") for gpu in range(num_gpus)) or None,
        rates=tuple(rates),
    )


def planted(facts: ClusterFacts, host: str, **changes: Any) -> ClusterFacts:
    nodes = tuple(replace(each, **changes) if each.host == host else each for each in facts.nodes)
    return replace(facts, nodes=nodes)


def slowed(facts: ClusterFacts, host: str, kind: str, share: float) -> ClusterFacts:
    [own] = [each for each in facts.nodes if each.host == host]
    rates = tuple(replace(rate, value=rate.value * share) if rate.kind == kind else rate for rate in own.rates)
    return planted(facts, host, rates=rates)


def named(facts: ClusterFacts, level: str = "error") -> set[tuple[str, str]]:
    return {(each.host, each.finding.field) for each in judge(facts) if each.finding.level == level}


@pytest.mark.parametrize("num_gpus", [0, 1, 8])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("seed", range(20))
def test_a_clean_cluster_raises_no_alarm(num_nodes: int, num_gpus: int, seed: int) -> None:
    facts = cluster(num_nodes, seed, num_gpus)
    assert [str(each) for each in judge(facts)] == []
    assert set(verdicts(facts, []).values()) == {"ok"}


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 40])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"versions": VERSIONS | {"torch": "2.14.1"}}, "torch"),
        ({"versions": VERSIONS | {"nccl": None}}, "nccl"),
        ({"versions": VERSIONS | {"paceline": "ba9876543210"}}, "paceline"),
        ({"clock_offset_s": 2.5}, "clock"),
        ({"clock_offset_s": -90.0}, "clock"),
        ({"storage": "/nfs: a file that h0 wrote cannot be read"}, "storage"),
        ({"silent_in": "its start"}, "node"),
        ({"failure": "ModuleNotFoundError: No module named 'cluster'"}, "node"),
        ({"num_gpus": 2, "gpus": (GpuHealth(0, "H200"),)}, "GPUs"),
        ({"gpus": (GpuHealth(0, "H200", uncorrected_errors=3),)}, "GPU 0"),
        ({"gpus": (GpuHealth(0, "H200", rows_failed=True),)}, "GPU 0"),
        ({"gpus": (GpuHealth(0, "H200", slowed_by=("heat",)),)}, "GPU 0"),
        ({"gpus": (GpuHealth(0, "GPU 0", failure="GPU is lost"),)}, "GPU 0"),
    ],
)
def test_a_fault_is_named_with_its_node_and_nothing_else_is(
    changes: dict[str, Any], field: str, num_nodes: int, seed: int
) -> None:
    facts = planted(cluster(num_nodes, seed), "h1", **changes)
    assert named(facts) == {("h1", field)}
    assert verdicts(facts, judge(facts)) == {each.node_id: "bad" if each.host == "h1" else "ok" for each in facts.nodes}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_nodes", [2, 3, 8, 40])
@pytest.mark.parametrize(("kind", "share", "level"), [
    ("matmul", 0.5, "error"), ("network", 0.2, "error"), ("storage", 0.1, "warning"), ("local disk", 0.1, "warning"),
])  # fmt: skip
def test_a_node_that_falls_behind_is_named(kind: str, share: float, level: str, num_nodes: int, seed: int) -> None:
    facts = slowed(cluster(num_nodes, seed), "h1", kind, share)
    assert {host for host, _ in named(facts, level)} == {"h1"}
    assert named(facts, "warning" if level == "error" else "error") == set()


def test_one_slow_gpu_of_eight_is_named() -> None:
    facts = cluster(2, num_gpus=8)
    [own] = [each for each in facts.nodes if each.host == "h1"]
    slow_one = tuple(
        replace(rate, value=rate.value * 0.6) if rate.what == "matmul of cuda:3" else rate for rate in own.rates
    )
    assert named(planted(facts, "h1", rates=slow_one)) == {("h1", "matmul of cuda:3")}


def test_other_models_are_not_compared() -> None:
    facts = slowed(cluster(3), "h1", "matmul", 0.3)
    assert named(planted(facts, "h1", device="an older one")) == set()


def test_half_of_the_nodes_is_no_majority_and_the_starter_decides() -> None:
    facts = planted(cluster(1), "h0", versions=VERSIONS | {"torch": "2.14.1"})
    assert named(facts) == {("h0", "torch")}
    assert named(replace(facts, reference=VERSIONS | {"torch": "2.14.1"})) == {("head", "torch")}


def test_a_name_on_the_loopback_is_a_warning() -> None:
    facts = planted(cluster(2), "h1", own_address="127.0.1.1")
    assert (named(facts), named(facts, "warning")) == (set(), {("h1", "own name")})
    assert verdicts(facts, judge(facts))["id-1"] == "doubtful"


def test_lost_and_missing_nodes_and_failed_sums() -> None:
    lost = replace(cluster(2), lost=(LostNode("id-9", "h9", "10.0.0.19", "missed too many heartbeats"),))
    assert named(lost) == {("h9", "node")}
    assert verdicts(lost, judge(lost))["id-9"] == "bad"
    assert named(replace(cluster(2), workers_wanted=3)) == {("cluster", "worker nodes")}
    assert named(replace(cluster(2), workers_wanted=2)) == set()
    failed = replace(cluster(2), collectives=(Collective("between nodes", 2, failure="timed out"),))
    assert named(failed) == {("cluster", "all-reduce between nodes")}
    wrong = replace(cluster(2), collectives=(Collective("between nodes", 2, 900.0, wrong_on=("id-1",)),))
    assert named(wrong) == {("h1", "all-reduce between nodes")}


def test_a_silent_node_says_nothing_of_the_others() -> None:
    facts = planted(cluster(3), "h2", silent_in="its start", versions={}, rates=(), clock_offset_s=None)
    assert named(facts) == {("h2", "node")}


@pytest.mark.parametrize(
    ("seen", "apart"),
    [
        ({"a": {"a", "b", "c"}, "b": {"a", "b", "c"}, "c": {"a", "b", "c"}}, {}),
        ({"a": {"a", "b"}, "b": {"a", "b"}, "c": {"c"}}, {"c": "a"}),
        ({"a": {"a"}, "b": {"b", "c"}, "c": {"b", "c"}}, {"a": "b"}),
        ({"a": {"a"}, "b": {"b"}}, {"a": "b", "b": "a"}),
        ({"a": {"a"}}, {}),
        ({}, {}),
    ],
)
def test_storage_is_what_more_than_half_of_the_nodes_share(seen: dict[str, set[str]], apart: dict[str, str]) -> None:
    assert unshared(seen) == apart


def test_the_limit_has_a_floor_and_widens_with_the_spread() -> None:
    assert least([100.0], "matmul") == 0
    assert least([100.0, 80.0], "matmul") == pytest.approx(65)
    assert least([100.0, 100.0, 100.0], "matmul") == pytest.approx(80)
    assert least([94.0, 97.0, 100.0, 103.0, 106.0], "matmul") == pytest.approx(100 - 6 * 1.4826 * 3)
    assert least([20.0, 60.0, 100.0, 140.0, 180.0], "matmul") == pytest.approx(65)


def test_bad_nodes_are_left_out_by_a_label_selector(capsys: pytest.CaptureFixture[str]) -> None:
    facts = planted(cluster(3), "h1", clock_offset_s=5.0)
    assert print_report(facts, judge(facts), "/nfs", 1.0, as_json=False, exclude_bad=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"ray.io/node-id": "!in(id-1)"}
    assert "h1: `clock` is" in captured.err
    assert print_report(facts, judge(facts), "/nfs", 1.0, as_json=False, exclude_bad=False) == 1
    too_few = replace(facts, workers_wanted=3)
    assert print_report(too_few, judge(too_few), "/nfs", 1.0, as_json=False, exclude_bad=True) == 1
    assert label_selector({"id-1": "ok", "id-2": "doubtful"}) == {}


def test_the_table_has_a_row_and_a_verdict_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    facts = planted(cluster(2), "h1", storage="/nfs: a file that h0 wrote cannot be read")
    printed = lines(facts, judge(facts), "/nfs", 12.3)
    assert [line.split()[0] for line in printed[:4]] == ["node", "head", "h0", "h1"]
    assert printed[3].endswith("not shared  bad")
    assert printed[-1] == "2 of 3 nodes in order, in 12.3 s"
    assert print_report(facts, judge(facts), "/nfs", 1.0, as_json=True, exclude_bad=False) == 1
    tree = json.loads(capsys.readouterr().out)
    assert [each["verdict"] for each in tree["nodes"]] == ["ok", "ok", "bad"]
    assert [(each["host"], each["field"]) for each in tree["findings"]] == [("h1", "storage")]


# GFLOP/s of one core in the seven samples of a measurement, recorded beside seven other busy processes on two cores: of
# a process that runs all the time, and of one that is stopped for most of every 100 ms. One of its samples was lucky.
SOUND = [
    [27.4, 39.5, 12.0, 18.1, 47.6, 63.0, 86.6],
    [42.1, 46.7, 69.3, 92.2, 63.0, 56.7, 54.1],
    [62.0, 54.2, 83.1, 62.3, 63.5, 46.2, 35.5],
    [66.9, 55.7, 54.0, 62.6, 60.1, 61.7, 56.1],
    [34.2, 47.3, 49.0, 42.3, 44.5, 45.4, 40.2],
    [47.2, 38.6, 31.0, 41.6, 53.2, 48.0, 50.5],
]
SLOWED = [
    [8.7, 13.8, 8.4, 15.9, 10.3, 46.6, 10.6],
    [15.3, 9.4, 9.6, 15.2, 9.7, 15.7, 9.8],
    [14.7, 9.3, 16.4, 15.4, 9.7, 14.3, 15.5],
    [13.9, 11.3, 8.9, 10.5, 15.4, 21.4, 20.1],
    [16.3, 16.1, 11.1, 10.0, 10.0, 12.6, 12.6],
    [17.5, 12.3, 17.0, 13.6, 11.3, 13.6, 13.6],
]


class Replayed(Checkup):
    """A checkup whose nodes answer with what is prepared, a figure for each measurement; asked again, with the last."""

    def __init__(self, prepared: dict[str, Sequence[float]], kind: Kind = "matmul") -> None:
        facts = {name: NodeFacts(name, name, name, trains=True, device="EPYC") for name in prepared}
        super().__init__(Nodes(facts))
        self.prepared, self.kind = {name: list(values) for name, values in prepared.items()}, kind
        self.asked: list[set[str]] = []

    def _measure(self, kind: Kind, nodes: Sequence[str], uri: str | None) -> dict[str, list[Rate]]:
        if kind != self.kind:
            return {}
        self.asked.append(set(nodes))
        figures = {name: self.prepared[name] for name in nodes}
        return {n: [Rate(kind, kind, f.pop(0) if len(f) > 1 else f[0], "GFLOP/s")] for n, f in figures.items()}

    def slow(self) -> set[str]:
        """Who is named."""
        self._rates("/nfs")
        return {each.host for each in slow(list(self.nodes.facts.values()))}


def medians(samples: list[list[float]], seed: int) -> list[float]:
    """A measurement's rate is its median sample; four measurements in any order."""
    return [statistics.median(each) for each in random.Random(seed).sample(samples, 4)]


@pytest.mark.parametrize("num_peers", [1, 2, 7])
def test_a_node_at_a_small_fraction_of_its_peers_is_named_every_time(num_peers: int) -> None:
    for seed in range(200):
        peers = {f"h{index}": medians(SOUND, 1000 * seed + index) for index in range(num_peers)}
        assert Replayed({**peers, "slow": medians(SLOWED, seed)}).slow() == {"slow"}, seed


@pytest.mark.parametrize("num_peers", [1, 2, 7])
@pytest.mark.parametrize("moments", [1, 2, 3])
def test_a_node_that_is_disturbed_for_a_moment_is_not_named(moments: int, num_peers: int) -> None:
    for seed in range(100):
        chance = random.Random(seed)
        peers = {f"h{index}": [chance.gauss(60, 2) for _ in range(4)] for index in range(num_peers)}
        sound = [chance.gauss(60, 2) for _ in range(4 - moments)]
        checkup = Replayed({**peers, "disturbed": [*medians(SLOWED, seed)[:moments], *sound]})
        assert checkup.slow() == set(), seed
        assert len(checkup.asked) >= 1 + moments


def test_a_peer_that_is_disturbed_hides_no_slow_node() -> None:
    """At 28 beside 60 a node is slow; while something takes a third of the peer, 28 of 41 alone would not be."""
    assert least([28.0, 41.0], "matmul") < 28
    assert Replayed({"peer": [41.0, 60.0], "slow": [28.0]}).slow() == {"slow"}


def test_only_a_doubtful_node_and_its_fastest_peer_are_measured_again() -> None:
    checkup = Replayed({"h0": [60.0], "h1": [61.0], "h2": [62.0], "h3": [30.0, 59.0]})
    assert checkup.slow() == set()
    assert checkup.asked == [{"h0", "h1", "h2", "h3"}, {"h2", "h3"}]
    in_order = Replayed({"h0": [60.0], "h1": [58.0]})
    assert in_order.slow() == set()
    assert in_order.asked == [{"h0", "h1"}]


@pytest.mark.parametrize("kind", ["network", "local disk", "storage"])
def test_links_and_disks_are_measured_again_as_well(kind: Kind) -> None:
    assert Replayed({"h0": [1000.0], "h1": [90.0, 900.0]}, kind).slow() == set()
    assert Replayed({"h0": [1000.0], "h1": [90.0, 95.0, 92.0, 91.0]}, kind).slow() == {"h1"}


def test_a_cut_link_is_not_waited_for_again() -> None:
    checkup = Replayed({"h0": [1000.0], "h1": [1000.0], "h2": [0.0, 900.0]}, "network")
    assert checkup.slow() == {"h2"}
    assert len(checkup.asked) == 1
