"""Measure nodes, judge the measurements, and show the result.

Functions that measure run on the node itself. They import torch only when called,
because a sweep imports this file before its Ray is up.
"""

import contextlib
import dataclasses
import functools
import json
import os
import platform
import socket
import statistics
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.finding import Finding, error
from trainers.devices.peers import code_digest
from trainers.errors import StorageError, first_line
from trainers.storage import Storage
from trainers.versions import package_versions

NETWORK = "network"
_LEAST = {True: 0.3, False: 0.65}
"""Share of the others' median that a node must reach: True for a link, False for a
matrix product. Products are repeatable; links that are shared are less so.
"""
_SLOW_FIX = {
    True: "look at its cable, port and MTU",
    False: "look for another process, heat or a power limit there",
}
_COLUMNS = ("node", "address", "device", "matmul GFLOP/s", "network MB/s", "verdict")
_SAMPLES = 5
# How late another node's file may appear: NFS caches a directory for some seconds.
_SEEN_WITHIN_S = 5.0


@dataclass
class Node:
    """What is known about a node."""

    node_id: str
    host: str
    address: str
    trains: bool = False
    """Whether it has CPUs or GPUs for workers; a head often has none."""
    answers: bool = True
    """Whether it has answered everything so far."""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    """Model of its CPU or GPUs; matrix products are compared within one model."""
    num_gpus: int = 0
    """As Ray counts them."""
    rates: dict[str, float] = field(default_factory=dict)
    """GFLOP/s of each matrix product (`matmul of cuda:3`), MB/s of the network. The
    best measurement counts, since a momentary disturbance says nothing about the node.
    """

    def better(self, rates: Mapping[str, float]) -> None:
        """Update the rates; the higher value of each is kept."""
        for name, rate in rates.items():
            self.rates[name] = max(rate, self.rates.get(name, 0.0))


@dataclass(frozen=True)
class NodeFinding(Finding):
    """A finding about a node or, if `node_id` is empty, about the cluster."""

    node_id: str
    host: str

    def __str__(self) -> str:
        return f"{self.host}: {super().__str__()}"


def on(node: Node, found: Iterable[Finding]) -> list[NodeFinding]:
    """Return findings as findings about this node."""
    place: dict[str, Any] = {"node_id": node.node_id, "host": node.host}
    return [NodeFinding(**vars(each), **place) for each in found]


def label_selector(found: Sequence[NodeFinding]) -> dict[str, str]:
    """Return a Ray label selector for all nodes but those with findings."""
    bad = sorted({each.node_id for each in found} - {""})
    return {"ray.io/node-id": f"!in({','.join(bad)})"} if bad else {}


def unshared(seen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes that could read the markers of at most half of the nodes.

    `seen` lists, by node, the nodes whose markers it could read.
    """
    found = []
    for node_id, markers in seen.items():
        if 2 * len(markers) <= len(seen) > 1:
            found.append(node_id)
    return found


def different(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find versions other than the most common; in a tie, the first one counts."""
    found: list[NodeFinding] = []
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        own = [node.versions.get(name, "absent") for node in nodes]
        [(right, _)] = Counter(own).most_common(1)
        rule = f"must be {right} as on the other nodes"
        for node, version in zip(nodes, own, strict=True):
            if version != right:
                wrong = error(name, version, rule, "install the same everywhere")
                found += on(node, [wrong])
    return found


def slow(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find nodes far below the median of the others, by device model and for links."""
    groups: dict[str, list[tuple[Node, str]]] = {}
    for node in nodes:
        for name in node.rates:
            kind = name if name == NETWORK else node.device
            groups.setdefault(kind, []).append((node, name))
    found: list[NodeFinding] = []
    for group in groups.values():
        rates = [node.rates[name] for node, name in group]
        for index, (node, name) in enumerate(group):
            is_link = name == NETWORK
            others = rates[:index] + rates[index + 1 :]
            usual = statistics.median(others) if others else 0.0
            if rates[index] < _LEAST[is_link] * usual:
                rule = f"must not fall so far behind the {usual:,.3g} of the others"
                value = f"{rates[index]:,.3g} {_unit(name)}"
                found += on(node, [error(name, value, rule, _SLOW_FIX[is_link])])
    return found


def print_report(
    nodes: Sequence[Node],
    found: Sequence[NodeFinding],
    as_json: bool = False,
    exclude_bad: bool = False,
    wanted: int | None = None,
) -> int:
    """Print what was found, and return the exit code.

    With `exclude_bad`, only the selector goes to standard output, for use in
    `--scaling.label_selector`; the code is then 1 if fewer good nodes than `wanted` can
    train.
    """
    out = sys.stderr if exclude_bad else sys.stdout
    bad = {each.node_id for each in found}
    rows: list[dict[str, Any]] = []
    for node in nodes:
        verdict = "bad" if node.node_id in bad else "ok"
        rows.append(dataclasses.asdict(node) | {"verdict": verdict})
    tree = {
        "nodes": rows,
        "findings": [dataclasses.asdict(each) for each in found],
        "label_selector": label_selector(found),
    }
    if as_json:
        print(json.dumps(tree, indent=2), file=out)
    else:
        table = Table(*_COLUMNS, box=None, pad_edge=False)
        for node, row in zip(nodes, rows, strict=True):
            table.add_row(
                node.host,
                node.address or "-",
                node.device or "-",
                _lowest(node, is_link=False),
                _lowest(node, is_link=True),
                row["verdict"],
            )
        console = Console(
            file=out, width=1000, markup=False, emoji=False, highlight=False
        )
        console.print(table)
        pairs = [" ".join(pair) for pair in nodes[0].versions.items()]
        print(*pairs, sep=", ", file=out)
        for each in found:
            print(f"{each.level}: {each}", file=out)
        good = len(nodes) - len(bad - {""})
        print(f"{good} of {len(nodes)} nodes in order", file=out)
    if not exclude_bad:
        return int(bool(found))
    print(json.dumps(label_selector(found)))
    num_training = sum(node.trains and node.node_id not in bad for node in nodes)
    return int(num_training < (wanted or 1))


def _lowest(node: Node, is_link: bool) -> str:
    """Return the lowest rate as text: the other GPUs wait for the slowest one."""
    rates = []
    for name, rate in node.rates.items():
        if (name == NETWORK) == is_link:
            rates.append(rate)
    if not rates:
        return "-"
    return f"{min(rates):,.0f}"


def _unit(name: str) -> str:
    return "MB/s" if name == NETWORK else "GFLOP/s"


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes; NCCL comes with torch."""
    code = code_digest(("cluster", "trainers", "tune"))
    return package_versions("torch", "ray") | {"paceline": code}


def num_gpus() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_name() -> str:
    """Return the model of the device for matrix products: the GPU, else the CPU."""
    import torch

    if num_gpus():
        return torch.cuda.get_device_name(0)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_findings(least: int) -> list[Finding]:
    """Return what NVML finds wrong with this node's GPUs; at least `least` must exist.

    There are no findings if NVML does not answer; what a driver does not support counts
    as healthy.
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
                    f"must be the {least} that Ray gives out",
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
                "restart the host; if it stays so, replace the GPU",
            )
        ]
    errors = 0
    is_worn = False
    with contextlib.suppress(nvml.NVMLError):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    with contextlib.suppress(nvml.NVMLError):
        _, _, *remaps = nvml.nvmlDeviceGetRemappedRows(handle)
        is_worn = any(remaps)  # one waits for a reset, or could not be done
    found = []
    if errors or is_worn:
        found.append(
            error(
                field,
                f"{errors} uncorrected memory errors",
                "must have none, and no rows to remap",
                "reset it; if they return, replace it",
            )
        )
    reasons = slowed_by(nvml, handle) - {"power cap"}  # which may be intended
    if reasons:
        found.append(
            error(
                field,
                f"slowed by {', '.join(sorted(reasons))}",
                "must run at its own clocks",
                "look at cooling and power",
            )
        )
    return found


def unseen_gpus() -> list[Finding]:
    """Return a finding if torch sees fewer GPUs than the driver, with the reason."""
    import torch

    from trainers.devices.device import opened_nvml

    with opened_nvml() as nvml:
        if nvml is None:
            return []
        count = nvml.nvmlDeviceGetCount()
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    seen = num_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen >= count or (seen and visible is not None):
        return []
    newest = (version // 1000, version % 1000 // 10)
    return [unseen(seen, count, newest, torch.version.cuda, visible)]


def unseen(
    seen: int,
    count: int,
    newest: tuple[int, int],
    built_for: str | None,
    visible: str | None,
) -> Finding:
    """Return a finding on why torch sees only `seen` of the driver's `count` GPUs.

    `newest` is the newest CUDA version that the driver supports. `built_for` is the
    CUDA version of torch, None for a CPU build. `visible` is CUDA_VISIBLE_DEVICES.
    """
    why = "CUDA does not start on the others" if seen else "CUDA does not start"
    fix = "look at `nvidia-smi` and the kernel's log, or restart the machine"
    if built_for is None:
        why = "this torch is a CPU build"
        where = "https://pytorch.org/get-started/locally"
        fix = f"install one for CUDA {newest[0]} from {where}"
    elif int(built_for.partition(".")[0]) > newest[0]:
        why = f"torch is built for CUDA {built_for}, and the driver stops at {newest[0]}.{newest[1]}"
        fix = f"update the driver, or install a torch for CUDA {newest[0]}"
    elif visible is not None:
        why = f'CUDA_VISIBLE_DEVICES is "{visible}"'
        fix = "unset it"
    return error("GPUs of torch", seen, f"must be the driver's {count}: {why}", fix)


def matmul_rates() -> dict[str, float]:
    """Measure the GFLOP/s of each GPU that torch sees, or else of one CPU core."""
    import torch

    torch.set_num_threads(1)  # the other cores may be at work
    rates = {}
    devices = [f"cuda:{index}" for index in range(num_gpus())]
    for name in devices or ["one core"]:
        device = torch.device("cpu")
        n = 768
        dtype = torch.float32
        if devices:
            device = torch.device(name)
            n = 8192
            dtype = _half()
        left, right = torch.randn(2, n, n, device=device).to(dtype)
        product = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
        rates[f"matmul of {name}"] = 2 * n**3 / seconds_of(product, device) / 1e9
    return rates


def _half() -> Any:
    import torch

    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def seconds_of(run: Callable[[], object], device: Any) -> float:
    """Return the seconds that `run` takes: the median of samples of 0.2 s or more.

    Samples are long compared with a scheduler's time slice, so that none is just lucky.
    """
    from trainers.devices.device import synchronize

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    timer = timeit.Timer(run, timer=clock)
    runs, _ = timer.autorange()
    return statistics.median(timer.repeat(_SAMPLES, runs)) / runs


def check_local(as_json: bool) -> int:
    """Examine this machine without Ray; print its versions, device, speed and findings.

    Returns 1 if there are findings.
    """
    import torch

    node = Node("", platform.node(), "", trains=True, num_gpus=num_gpus())
    node.versions = versions()
    node.device = device_name()
    found = [*unseen_gpus(), *gpu_findings(0)]
    try:
        node.better(matmul_rates())
    except torch.OutOfMemoryError as failure:
        found.append(
            error(
                "memory",
                first_line(failure),
                "must have some left to be measured",
                "see what runs here",
            )
        )
    return print_report([node], on(node, found), as_json)


def free_port(address: str) -> int:
    """Return a port that is currently free at this address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def link(rank: int, address: str, port: int, timeout_s: float) -> tuple[float, str]:
    """Measure the MB/s of an all-reduce with another node; if it fails, also say why.

    The backend is NCCL, or gloo if one of the nodes has no free GPU. Both nodes must
    call this, with the address of the node with rank 0.
    """
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, 2, is_master=rank == 0, timeout=timeout
        )
        store.set(f"gpu-{rank}", str(torch.cuda.is_available()))
        has_gpus = all(store.get(f"gpu-{other}") == b"True" for other in range(2))
        backend = "nccl" if has_gpus else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=2, timeout=timeout
        )
        try:
            return _mb_per_s(torch.device("cuda:0" if has_gpus else "cpu")), ""
        finally:
            dist.destroy_process_group()
    except (RuntimeError, OSError) as failure:
        return 0.0, first_line(failure)


def _mb_per_s(device: Any) -> float:
    """Return the best of four all-reduces, the first of which includes connecting."""
    import torch
    import torch.distributed as dist

    from trainers.devices.device import synchronize

    count = 2**26 if device.type == "cuda" else 2**21
    tensor = torch.zeros(count, device=device)
    best = 0.0
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        best = max(best, tensor.nbytes / (time.perf_counter() - began) / 1e6)
    return best


def write_marker(uri: str, name: str) -> str | None:
    """Write a marker file that contains its name; return what went wrong, or None."""
    try:
        Storage(uri).write(name, name.encode())
    except (StorageError, OSError) as failure:
        return f"{uri}: cannot be written ({first_line(failure)})"
    return None


def seen_markers(uri: str, names: list[str]) -> list[str]:
    """Return the markers that this node can read; wait a while for missing ones."""
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
