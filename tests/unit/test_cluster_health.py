"""The verdict on each node of a cluster: every planted fault is named, and
clean clusters raise no alarm.
"""

import json
import sys
import types
from dataclasses import replace

import pytest

from cluster import error
from cluster.health.probes import (
    Node,
    different,
    gpu_findings,
    on,
    print_report,
    unshared,
)

VERSIONS = {
    "python": "3.11.7",
    "torch": "2.15.0",
    "ray": "2.60.0",
    "paceline": "0123456789ab",
}


def cluster(num_nodes):
    """A head and as many nodes, alike."""
    head = Node("id-head", "head", "10.0.0.1", versions=VERSIONS)
    return [head, *map(node, range(num_nodes))]


def node(index):
    return Node(
        f"id-{index}", f"h{index}", f"10.0.0.{index + 10}", versions=VERSIONS
    )


def named(found):
    return {(each.host, each.field) for each in found}


def test_a_clean_cluster_raises_no_alarm():
    assert different(cluster(3)) == []


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
def test_what_the_driver_says_against_a_gpu(
    planted, least, fields, words, monkeypatch
):
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


def test_the_report(capsys):
    nodes = cluster(3)
    wrong = error(
        "storage", "/nfs: cannot be written", "must be one place", "mount it"
    )
    found = on(nodes[2], [wrong])

    assert print_report(nodes, found, as_json=False) == 1
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:5]] == [
        "node",
        "head",
        "h0",
        "h1",
        "h2",
    ]
    assert "3 of 4 nodes in order" in out
    assert "h1: `storage: " in out
    assert print_report(nodes, found, as_json=True) == 1
    tree = json.loads(capsys.readouterr().out)
    assert [each["verdict"] for each in tree["nodes"]] == [
        "ok",
        "ok",
        "bad",
        "ok",
    ]
    assert named(found) == {
        (each["host"], each["field"]) for each in tree["findings"]
    }
