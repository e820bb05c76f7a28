"""The verdict on each node of a cluster: every planted fault is named, and clean
clusters raise no alarm.
"""

import json
import random
import sys
import types
from dataclasses import replace

import pytest

from cluster.finding import error
from cluster.health.check import Checkup, lost_nodes
from cluster.health.probes import (
    Node,
    different,
    gpu_findings,
    label_selector,
    on,
    print_report,
    slow,
    unshared,
)

VERSIONS = {
    "python": "3.11.7",
    "torch": "2.15.0",
    "ray": "2.60.0",
    "paceline": "0123456789ab",
}


def cluster(num_nodes, seed=0, num_gpus=0):
    """A head that does not train, and nodes whose figures scatter as those of sound
    ones do.
    """
    chance = random.Random(seed)
    nodes = [node(index, chance, num_gpus) for index in range(num_nodes)]
    return [Node("id-head", "head", "10.0.0.1", versions=VERSIONS), *nodes]


def node(index, chance, num_gpus):
    devices = [f"cuda:{gpu}" for gpu in range(num_gpus)] or ["one core"]
    products = {f"matmul of {name}": 600 * chance.gauss(1, 0.03) for name in devices}
    return Node(
        f"id-{index}",
        f"h{index}",
        f"10.0.0.{index + 10}",
        trains=True,
        versions=VERSIONS,
        device="H200" if num_gpus else "EPYC",
        num_gpus=num_gpus,
        rates=products | {"network": 1100 * chance.gauss(1, 0.1)},
    )


def named(found):
    return {(each.host, each.field) for each in found}


@pytest.mark.parametrize("num_gpus", [0, 8])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 40])
def test_a_clean_cluster_raises_no_alarm(num_nodes, num_gpus):
    for seed in range(20):
        nodes = cluster(num_nodes, seed, num_gpus)
        assert [*different(nodes), *slow(nodes)] == []


@pytest.mark.parametrize("num_nodes", [2, 3, 8])
@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.14.1"), ("paceline", "ba9876543210")]
)
def test_another_version_is_named_with_its_node(package, version, num_nodes):
    nodes = cluster(num_nodes)
    nodes[2] = replace(nodes[2], versions=VERSIONS | {package: version})
    assert named(different(nodes)) == {("h1", package)}


def test_a_package_that_is_not_there_is_a_version():
    nodes = cluster(3)
    nodes[1] = replace(nodes[1], versions={"python": "3.11.7"})
    assert named(different(nodes)) == {
        ("h0", name) for name in ("torch", "ray", "paceline")
    }


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 40])
@pytest.mark.parametrize(
    ("what", "share"), [("matmul of cuda:3", 0.55), ("network", 0.2)]
)
def test_a_node_that_falls_behind_is_named(what, share, num_nodes):
    for seed in range(20):
        nodes = cluster(num_nodes, seed, num_gpus=8)
        nodes[2].rates[what] *= share
        assert named(slow(nodes)) == {("h1", what)}


def test_products_of_other_devices_are_not_compared():
    nodes = [*cluster(2), *cluster(2, num_gpus=1)]
    nodes[1].rates["matmul of one core"] = 60.0
    nodes[2].rates["matmul of one core"] = 60.0
    assert slow(nodes) == []


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml(types.ModuleType):
    """Two GPUs; what is planted is of the second."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, errors=0, rows=(0, 0, 0, 0), slowed=0x4, is_lost=False):
        super().__init__("pynvml")
        self.planted = (errors, rows, slowed)
        self.is_lost = is_lost

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index and self.is_lost:
            raise NVMLError("GPU is lost")
        return self.planted if index else (0, (0, 0, 0, 0), 0x1)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        return handle[0]

    def nvmlDeviceGetRemappedRows(self, handle):
        if handle[1] is None:
            raise NVMLError("not supported")
        return handle[1]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return handle[2]


@pytest.mark.parametrize(
    ("planted", "least", "fields", "words"),
    [
        ({}, 2, [], ""),
        ({"rows": None}, 2, [], ""),
        ({"errors": 3}, 2, ["GPU 1"], "3 uncorrected"),
        ({"rows": (1, 0, 1, 0)}, 2, ["GPU 1"], "remap"),
        ({"rows": (1, 0, 0, 1)}, 2, ["GPU 1"], "remap"),
        ({"rows": (1, 1, 0, 0)}, 2, [], ""),
        ({"slowed": 0x20 | 0x4}, 2, ["GPU 1"], "slowed by heat"),
        ({"is_lost": True}, 2, ["GPU 1"], "GPU is lost"),
        ({}, 3, ["GPUs"], "that Ray gives out"),
    ],
)
def test_what_the_driver_says_against_a_gpu(planted, least, fields, words, monkeypatch):
    nvml = FakeNvml(**planted)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = gpu_findings(least)
    assert [each.field for each in found] == fields
    assert words in "".join(map(str, found))
    assert not nvml.is_open


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

    def __init__(self, prepared, link=(1000.0, "")):
        super().__init__()
        self.nodes = {
            name: Node(name, name, name, trains=True, device="EPYC")
            for name in prepared
        }
        self.prepared = prepared
        self.asked = 0
        self.link = link

    def ask(self, part, timeout_s, calls):
        if part == "meeting":
            return dict.fromkeys(calls, self.link)
        if part != "multiplying":
            return {}
        figures = {name: self.prepared[name] for name in calls}
        values = {
            name: every[min(self.asked, len(every) - 1)]
            for name, every in figures.items()
        }
        self.asked += 1
        return {name: {"matmul": value} for name, value in values.items()}


@pytest.mark.parametrize(
    ("prepared", "expected", "asked"),
    [
        ({"a": [60.0], "b": [58.0]}, set(), 1),
        ({"a": [60.0], "b": [10.0]}, {("b", "matmul")}, 4),
        ({"a": [60.0], "b": [10.0, 12.0, 11.0, 59.0]}, set(), 4),
        ({"a": [60.0], "b": [60.0], "c": [10.0, 59.0]}, set(), 2),
        ({"a": [30.0, 60.0], "b": [12.0]}, {("b", "matmul")}, 4),
    ],
    ids=["in order", "slow", "disturbed thrice", "disturbed once", "peer disturbed"],
)
def test_a_slow_node_is_slow_in_every_measurement(prepared, expected, asked):
    checkup = Replayed(prepared)
    checkup.full()
    assert (named(checkup.found), checkup.asked) == (expected, asked)


def test_a_link_that_is_cut_is_said_of_both_ends_and_tried_once():
    checkup = Replayed({"a": [60.0], "b": [60.0]}, link=(0.0, "timed out"))
    checkup.full()
    assert named(checkup.found) == {("a", "network"), ("b", "network")}
    assert {each.value for each in checkup.found} == {"timed out"}
    assert checkup.asked == 1


def test_a_node_is_lost_that_died_by_itself_and_did_not_come_back():
    def row(name, address, alive, reason=2):
        names = {
            "NodeID": name,
            "NodeManagerAddress": address,
            "NodeManagerHostname": name,
            "Resources": {},
        }
        return names | {"Alive": alive, "DeathReason": reason, "DeathReasonMessage": ""}

    rows = [
        row("up", "1", True),
        row("before", "1", False),
        row("drained", "2", False, 1),
        row("gone", "3", False),
    ]
    assert named(lost_nodes(rows, {"up"})) == {("gone", "node")}
    assert lost_nodes(rows, {"gone"}) == []


def test_the_report(capsys):
    nodes = cluster(3)
    wrong = error("storage", "/nfs: cannot be written", "must be one place", "mount it")
    found = on(nodes[2], [wrong])

    def said(**options):
        code = print_report(nodes, found, **options)
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
    assert "3 of 4 nodes in order" in out
    code, out, err = said(exclude_bad=True)
    assert (code, json.loads(out)) == (0, {"ray.io/node-id": "!in(id-1)"})
    assert "h1: `storage` is" in err
    tree = json.loads(said(as_json=True)[1])
    assert [each["verdict"] for each in tree["nodes"]] == ["ok", "ok", "bad", "ok"]
    assert named(found) == {(each["host"], each["field"]) for each in tree["findings"]}
    assert said(exclude_bad=True, wanted=3)[0] == 1, "two are left"
    assert label_selector(on(Node("", "cluster", ""), [wrong])) == {}
