"""Examine nodes, judge the results, and show them.

The functions that examine a node run on that node. They import torch only when
called, because a sweep imports this file before Ray is up.
"""

import contextlib
import dataclasses
import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster import Finding, error
from trainers.devices.peers import code_digest
from trainers.errors import StorageError, counted, first_line
from trainers.storage import Storage
from trainers.versions import package_versions

# How much later another node's file may appear, s: NFS caches directories for
# a few seconds.
_SEEN_WITHIN_S = 5.0


@dataclass
class Node:
    """What is known about a node."""

    node_id: str
    host: str
    address: str
    answers: bool = True
    """Whether the node has answered every call so far."""
    versions: Mapping[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    """Number of GPUs, as Ray counts them."""
    device: str = ""
    """Product name of the node's first GPU or, if the node has no GPU, of its CPU."""


@dataclass(frozen=True)
class NodeFinding(Finding):
    """A finding about a node."""

    node_id: str
    host: str

    def __str__(self) -> str:
        return f"{self.host}: {super().__str__()}"


def on(node: Node, found: Iterable[Finding]) -> list[NodeFinding]:
    """Return findings, marked as findings about this node."""
    place: dict[str, Any] = {"node_id": node.node_id, "host": node.host}
    return [NodeFinding(**vars(each), **place) for each in found]


def unshared(seen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes that could read the markers of at most half of all nodes.

    `seen` lists, for each node, the nodes whose markers it could read.
    """
    found = []
    for node_id, markers in seen.items():
        if 2 * len(markers) <= len(seen) > 1:
            found.append(node_id)
    return found


def different(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find versions other than the most common one (in a tie, the first to occur)."""
    found: list[NodeFinding] = []
    for name in dict.fromkeys(
        name for node in nodes for name in node.versions
    ):
        own = [node.versions.get(name, "absent") for node in nodes]
        [(right, _)] = Counter(own).most_common(1)
        rule = f"must be {right} as on the other nodes"
        for node, version in zip(nodes, own, strict=True):
            if version != right:
                wrong = error(
                    name,
                    version,
                    rule,
                    "install the same version on all nodes",
                )
                found += on(node, [wrong])
    return found


def print_report(
    nodes: Sequence[Node], found: Sequence[NodeFinding], as_json: bool
) -> int:
    """Print what was found; return the exit code."""
    bad = {each.node_id for each in found}
    verdicts = ["bad" if node.node_id in bad else "ok" for node in nodes]
    if as_json:
        rows = [
            dataclasses.asdict(node) | {"verdict": verdict}
            for node, verdict in zip(nodes, verdicts, strict=True)
        ]
        findings = [dataclasses.asdict(each) for each in found]
        print(json.dumps({"nodes": rows, "findings": findings}, indent=2))
    else:
        table = Table(
            "node",
            "address",
            "device",
            "GPUs",
            "verdict",
            box=None,
            pad_edge=False,
        )
        for node, verdict in zip(nodes, verdicts, strict=True):
            table.add_row(
                node.host,
                node.address or "-",
                node.device or "-",
                str(node.num_gpus),
                verdict,
            )
        Console(width=1000, markup=False, emoji=False, highlight=False).print(
            table
        )
        print(
            *(" ".join(pair) for pair in nodes[0].versions.items()), sep=", "
        )
        for each in found:
            print(f"{each.level}: {each}")
        print(f"{len(nodes) - len(bad)} of {len(nodes)} nodes in order")
    return int(bool(found))


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes; NCCL comes with torch."""
    code = code_digest(("cluster", "trainers", "tune"))
    return package_versions("torch", "ray") | {"paceline": code}


def device_name() -> str:
    """Return the product name of this machine's first GPU, or of its CPU."""
    from trainers.devices.device import opened_nvml

    # A lost GPU has no name.
    with (
        opened_nvml() as nvml,
        contextlib.suppress(Exception),
    ):
        if nvml is not None:
            return str(
                nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
            )
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_findings(least: int) -> list[Finding]:
    """Return what NVML finds wrong with this node's GPUs; at least `least` must exist.

    There are no findings if NVML does not answer. If a driver does not support
    one of the queries, the GPU counts as healthy in that respect.
    """
    from trainers.devices.device import opened_nvml

    with opened_nvml() as nvml:
        if nvml is None:
            return []
        count = nvml.nvmlDeviceGetCount()
        found = []
        if count < least:
            found.append(
                error(
                    "GPUs",
                    count,
                    f"must be at least the {least} that Ray gives out",
                    "restart the host, or take it out of the cluster",
                )
            )
        for index in range(count):
            found += _against(nvml, index)
        return found


def _against(nvml: Any, index: int) -> list[Finding]:
    from trainers.devices.device import slowed_by

    field = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as failure:
        return [
            error(
                field,
                str(failure),
                "must answer NVML",
                "restart the host; if that does not help, replace the GPU",
            )
        ]
    errors = 0
    is_worn = False
    with contextlib.suppress(nvml.NVMLError):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
    with contextlib.suppress(nvml.NVMLError):
        _, _, *remaps = nvml.nvmlDeviceGetRemappedRows(handle)
        is_worn = any(
            remaps
        )  # a remap is pending until a reset, or has failed
    found = []
    faults = []
    if errors:
        faults.append(counted(errors, "uncorrected memory error"))
    if is_worn:
        faults.append("memory rows that are to be remapped, or could not be")
    if faults:
        found.append(
            error(
                field,
                " and ".join(faults),
                "must have sound memory",
                "reset the GPU; if the faults return, replace the GPU",
            )
        )
    reasons = slowed_by(nvml, handle) - {
        "power cap"
    }  # a power cap may be intended
    if reasons:
        found.append(
            error(
                field,
                f"slowed by {', '.join(sorted(reasons))}",
                "must run at its full clocks",
                "check the cooling and the power supply",
            )
        )
    return found


def check_local(as_json: bool) -> int:
    """Examine this machine without Ray; print its versions, device and findings.

    Returns 1 if there are findings.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    node = Node(
        "", platform.node(), "", versions=versions(), num_gpus=num_gpus
    )
    node.device = device_name()
    return print_report([node], on(node, gpu_findings(0)), as_json)


def write_marker(uri: str, name: str) -> str | None:
    """Write a marker file that contains its own name; return the error, or None."""
    try:
        Storage(uri).write(name, name.encode())
    except (StorageError, OSError) as failure:
        return f"{uri}: cannot be written ({first_line(failure)})"
    return None


def seen_markers(uri: str, names: list[str]) -> list[str]:
    """Return the markers that this node can read; wait a few seconds for the others."""
    storage = Storage(uri)
    deadline = time.monotonic() + _SEEN_WITHIN_S
    seen: list[str] = []
    while True:
        with contextlib.suppress(StorageError, OSError):
            there = set(storage.names()) - set(seen)
            for name in names:
                if name in there and storage.read(name) == name.encode():
                    seen.append(name)
        if len(seen) == len(names) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


def delete_markers(uri: str) -> None:
    """Delete all markers, with their directory."""
    with contextlib.suppress(StorageError, OSError):
        Storage(uri).delete("")
