"""The verdict on each node of a cluster: every planted fault is named, and clean
clusters raise no alarm.
"""

import json
import random
from dataclasses import replace

import pytest

from cluster.health.check import Checkup, lost_nodes
from cluster.health.report import print_report
from cluster.health.verdicts import (
    AllReduce,
    ClusterFacts,
    GpuHealth,
    NodeFacts,
    Rate,
    bad_nodes,
    judge,
    slow,
    unshared,
)

VERSIONS = {
    "python": "3.11.7",
    "torch": "2.15.0",
    "ray": "2.60.0",
    "paceline": "0123456789ab",
}


def cluster(num_nodes, seed=0, num_gpus=0, **facts):
    """A head that does not train, and nodes whose figures scatter as those of sound
    ones do.
    """
    chance = random.Random(seed)
    head = NodeFacts(
        "id-head",
        "head",
        "10.0.0.1",
        trains=False,
        versions=VERSIONS,
        clock_offset_s=0.0,
    )
    nodes = [node(index, chance, num_gpus) for index in range(num_nodes)]
    return ClusterFacts((head, *nodes), all_reduce=AllReduce(num_nodes, 900.0), **facts)


def node(index, chance, num_gpus):
    devices = [f"cuda:{gpu}" for gpu in range(num_gpus)] or ["one core"]
    products = [
        Rate("matmul", f"matmul of {name}", 600 * chance.gauss(1, 0.03), "GFLOP/s")
        for name in devices
    ]
    return NodeFacts(
        f"id-{index}",
        f"h{index}",
        f"10.0.0.{index + 10}",
        trains=True,
        versions=VERSIONS,
        clock_offset_s=chance.gauss(0, 0.02),
        clock_error_s=0.01,
        device="H200" if num_gpus else "EPYC",
        num_gpus=num_gpus,
        gpus=tuple(GpuHealth(gpu) for gpu in range(num_gpus)) or None,
        rates=(
            *products,
            Rate("network", "network", 1100 * chance.gauss(1, 0.1), "MB/s"),
        ),
    )


def planted(facts, host, **changes):
    nodes = tuple(
        replace(each, **changes) if each.host == host else each for each in facts.nodes
    )
    return replace(facts, nodes=nodes)


def slowed(facts, host, what, share):
    [own] = [each for each in facts.nodes if each.host == host]
    rates = tuple(
        replace(rate, value=rate.value * share) if rate.what == what else rate
        for rate in own.rates
    )
    return planted(facts, host, rates=rates)


def named(facts):
    return {(each.host, each.finding.field) for each in judge(facts)}


@pytest.mark.parametrize("num_gpus", [0, 8])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 40])
def test_a_clean_cluster_raises_no_alarm(num_nodes, num_gpus):
    for seed in range(20):
        assert [str(each) for each in judge(cluster(num_nodes, seed, num_gpus))] == []


@pytest.mark.parametrize("num_nodes", [2, 3, 8])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"versions": VERSIONS | {"torch": "2.14.1"}}, "torch"),
        ({"versions": VERSIONS | {"paceline": "ba9876543210"}}, "paceline"),
        ({"clock_offset_s": 2.5}, "clock"),
        ({"clock_offset_s": -90.0}, "clock"),
        ({"storage": "/nfs: cannot be written"}, "storage"),
        (
            {
                "silent_in": "its start",
                "versions": {},
                "rates": (),
                "clock_offset_s": None,
            },
            "node",
        ),
        (
            {
                "lost": "missed too many heartbeats",
                "versions": {},
                "rates": (),
                "clock_offset_s": None,
            },
            "node",
        ),
        ({"failure": "ModuleNotFoundError: No module named 'cluster'"}, "node"),
        ({"wrong_sum": True}, "all-reduce"),
        ({"num_gpus": 2, "gpus": (GpuHealth(0),)}, "GPUs"),
        ({"gpus": (GpuHealth(0, uncorrected_errors=3),)}, "GPU 0"),
        ({"gpus": (GpuHealth(0, rows_failed=True),)}, "GPU 0"),
        ({"gpus": (GpuHealth(0, slowed_by=("heat",)),)}, "GPU 0"),
        ({"gpus": (GpuHealth(0, failure="GPU is lost"),)}, "GPU 0"),
    ],
)
def test_a_fault_is_named_with_its_node_and_nothing_else_is(changes, field, num_nodes):
    facts = planted(cluster(num_nodes), "h1", **changes)
    assert named(facts) == {("h1", field)}
    assert bad_nodes(judge(facts)) == ["id-1"]


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 40])
@pytest.mark.parametrize(
    ("what", "share"), [("matmul of cuda:3", 0.55), ("network", 0.2)]
)
def test_a_node_that_falls_behind_is_named(what, share, num_nodes):
    for seed in range(20):
        facts = slowed(cluster(num_nodes, seed, num_gpus=8), "h1", what, share)
        assert named(facts) == {("h1", what)}


def test_the_cluster_as_a_whole():
    assert named(replace(cluster(2), workers_wanted=2)) == set()
    assert named(replace(cluster(2), workers_wanted=3)) == {("cluster", "worker nodes")}
    failed = replace(cluster(2), all_reduce=AllReduce(2, failure="timed out"))
    assert named(failed) == {("cluster", "all-reduce")}


@pytest.mark.parametrize(
    ("seen", "apart"),
    [
        ({"a": "abc", "b": "abc", "c": "abc"}, []),
        ({"a": "ab", "b": "ab", "c": "c"}, ["c"]),
        ({"a": "a", "b": "bc", "c": "bc"}, ["a"]),
        ({"a": "a", "b": "b"}, ["a", "b"]),
        ({"a": "a"}, []),
        ({}, []),
    ],
)
def test_storage_is_what_more_than_half_of_the_nodes_share(seen, apart):
    assert unshared(seen) == apart


class Replayed(Checkup):
    """A checkup whose nodes answer with what is prepared, a figure for each
    measurement; asked again, with the last.
    """

    def __init__(self, prepared):
        super().__init__()
        self.facts = {
            name: NodeFacts(name, name, name, trains=True, device="EPYC")
            for name in prepared
        }
        self.prepared = prepared
        self.asked = 0

    def ask(self, part, timeout_s, calls):
        if part != "multiplying":
            return {}
        figures = {name: self.prepared[name] for name in calls}
        values = {
            name: every[min(self.asked, len(every) - 1)]
            for name, every in figures.items()
        }
        self.asked += 1
        return {
            name: (Rate("matmul", "matmul", value, "GFLOP/s"),)
            for name, value in values.items()
        }

    def _meet(self, groups):
        return [AllReduce(len(group), 1000.0) for group in groups]


@pytest.mark.parametrize(
    ("prepared", "named", "asked"),
    [
        ({"a": [60.0], "b": [58.0]}, set(), 1),
        ({"a": [60.0], "b": [10.0]}, {"b"}, 4),
        ({"a": [60.0], "b": [10.0, 12.0, 11.0, 59.0]}, set(), 4),
        ({"a": [60.0], "b": [60.0], "c": [10.0, 59.0]}, set(), 2),
        ({"a": [30.0, 60.0], "b": [12.0]}, {"b"}, 4),
    ],
    ids=["in order", "slow", "disturbed thrice", "disturbed once", "peer disturbed"],
)
def test_a_slow_node_is_slow_in_every_measurement(prepared, named, asked):
    checkup = Replayed(prepared)
    checkup.full()
    assert (
        {each.host for each in slow(list(checkup.facts.values()))},
        checkup.asked,
    ) == (named, asked)


def test_a_node_is_lost_that_died_by_itself_and_did_not_come_back():
    def row(name, address, alive, reason=2):
        names = {
            "NodeID": name,
            "NodeManagerAddress": address,
            "NodeManagerHostname": name,
        }
        return names | {"Alive": alive, "DeathReason": reason, "DeathReasonMessage": ""}

    rows = [
        row("up", "1", True),
        row("before", "1", False),
        row("drained", "2", False, 1),
        row("gone", "3", False),
    ]
    assert [lost.host for lost in lost_nodes(rows, {"up"})] == ["gone"]
    assert lost_nodes(rows, {"gone"}) == []


def test_the_report(capsys):
    facts = planted(cluster(3), "h1", storage="/nfs: cannot be written")
    found = judge(facts)

    def said(**options):
        code = print_report(
            facts,
            found,
            "/nfs",
            12.3,
            **{"as_json": False, "exclude_bad": False, **options},
        )
        return (code, *capsys.readouterr())

    code, out, err = said()
    assert (code, err) == (1, "")
    assert [line.split()[0] for line in out.splitlines()[:5]] == [
        "node",
        "head",
        "h0",
        "h1",
        "h2",
    ]
    assert "3 of 4 nodes in order, in 12.3 s" in out
    code, out, err = said(exclude_bad=True)
    assert (code, json.loads(out)) == (0, {"ray.io/node-id": "!in(id-1)"})
    assert "h1: `storage` is" in err
    tree = json.loads(said(as_json=True)[1])
    assert [each["verdict"] for each in tree["nodes"]] == ["ok", "ok", "bad", "ok"]
    assert [(each["host"], each["field"]) for each in tree["findings"]] == [
        ("h1", "storage")
    ]
    facts = replace(facts, workers_wanted=3)
    assert said(exclude_bad=True)[0] == 1, "two are left"
