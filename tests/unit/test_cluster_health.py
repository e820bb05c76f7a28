"""The verdict on each node of a cluster: every planted fault is named, and clean clusters raise no alarm."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.health.facts import ClusterFacts, Collective, GpuHealth, LostNode, NodeFacts, Rate
from cluster.health.report import lines, print_report
from cluster.health.verdicts import judge, label_selector, least, unshared, verdicts

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
