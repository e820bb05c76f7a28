"""What one node measures of itself and of its link to another; every function runs on that node."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.health.verdicts import GpuHealth, Rate
from trainers.devices.peers import code_digest
from trainers.errors import StorageError, first_line
from trainers.storage import Storage

if TYPE_CHECKING:
    import torch

_SLOWED = {0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of NVML's clock reasons that no setting asks for (nvml.h): a power cap may be meant so."""
_MATMUL_S = 1.0
_SAMPLE_S = 0.15  # long against a scheduler's time slice, so that one sample is no lucky moment
_FILE_BYTES, _FILES = 32 * 2**20, 3
_BLOCK_BYTES = 2**20
_SEEN_WITHIN_S = 5.0
"""How late a file of another node may appear: NFS caches a directory for a few seconds."""


def versions(with_nccl: bool) -> dict[str, str | None]:
    """What must be equal on all nodes. NCCL's costs an import of torch."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "ray"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if with_nccl:
        import torch

        available = torch.distributed.is_nccl_available()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if available else None
    found["paceline"] = code_digest(("cluster", "trainers", "tune"))
    return found


def own_address() -> str:
    """What this host's own name resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"nothing ({error})"


def processor() -> str:
    """Model of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def gpu_health() -> tuple[GpuHealth, ...] | None:
    """All GPUs of the node by NVML; None where it does not answer."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return tuple(_health(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, index: int) -> GpuHealth:
    """One GPU; what its driver does not support counts as healthy."""
    name, errors, failed, slowed, others = f"GPU {index}", 0, False, 0, 0
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = str(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuHealth(index, f"GPU {index}", failure=str(error))
    with contextlib.suppress(nvml.NVMLError):
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
    with contextlib.suppress(nvml.NVMLError):
        _, _, pending, failure = nvml.nvmlDeviceGetRemappedRows(handle)
        failed = bool(pending or failure)
    with contextlib.suppress(nvml.NVMLError):
        slowed = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    with contextlib.suppress(nvml.NVMLError):
        others = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    reasons = tuple(words for bit, words in _SLOWED.items() if slowed & bit)
    return GpuHealth(index, name, errors, failed, reasons, others)


def matmul_rates() -> tuple[str, list[Rate]]:
    """(model, rates): every GPU that torch sees here, or one core where there is none. Takes a second for each."""
    import torch

    if not torch.cuda.is_available():
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # the other cores may be at work
        try:
            return processor(), [_matmul(torch.device("cpu"), torch.float32, 768, "matmul of one core")]
        finally:
            torch.set_num_threads(before)
    rates = []
    for index in range(torch.cuda.device_count()):
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
        rates.append(_matmul(torch.device("cuda", index), dtype, 8192, f"matmul of cuda:{index}"))
        torch.cuda.empty_cache()
    return torch.cuda.get_device_name(0), rates


def _matmul(device: torch.device, dtype: torch.dtype, n: int, what: str) -> Rate:
    """The best of some samples of n x n products: what disturbs one of them says nothing of the device."""
    import torch

    from trainers.devices.device import synchronize

    left, right = torch.randn(2, n, n, device=device).to(dtype)
    out = torch.empty_like(left)

    def sample() -> float:
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < _SAMPLE_S:
            torch.mm(left, right, out=out)
            synchronize(device)
            products += 1
        return products / (time.perf_counter() - began)

    torch.mm(left, right, out=out)
    synchronize(device)
    best = max(sample() for _ in range(round(_MATMUL_S / _SAMPLE_S)))
    return Rate("matmul", what, 2 * n**3 * best / 1e9, "GFLOP/s")


def write_marker(uri: str, name: str) -> str | None:
    """A file that says who wrote it; what went wrong, or None."""
    try:
        Storage(uri).write(name, name.encode())
    except (StorageError, OSError) as error:
        return f"{uri}: cannot be written ({first_line(error)})"
    return None


def seen_markers(uri: str, names: list[str]) -> list[str]:
    """Those that this node can read, once it sees all or has waited for them."""
    storage, deadline = Storage(uri), time.monotonic() + _SEEN_WITHIN_S
    seen: list[str] = []
    while len(seen) < len(names):
        with contextlib.suppress(StorageError, OSError):
            there = set(storage.names())
            seen += [name for name in names if name in there and name not in seen and _is_whole(storage, name)]
        if time.monotonic() > deadline:
            break
        time.sleep(0 if len(seen) == len(names) else 0.1)
    return seen


def _is_whole(storage: Storage, name: str) -> bool:
    return storage.read(name) == name.encode()


def delete_marker(uri: str, name: str) -> str | None:
    """Delete another node's marker; what went wrong, or None."""
    try:
        Storage(uri).delete(name)
    except (StorageError, OSError) as error:
        return f"{uri}: a file of another node cannot be deleted ({first_line(error)})"
    return None


def remaining_markers(uri: str) -> list[str]:
    """Markers that are still there though all were deleted elsewhere; the directory goes too."""
    storage, deadline = Storage(uri), time.monotonic() + _SEEN_WITHIN_S
    try:
        while (left := storage.names()) and time.monotonic() < deadline:
            time.sleep(0.1)
        storage.delete("")
    except (StorageError, OSError):
        return []
    return left


def disk_rates(uri: str | None) -> list[Rate]:
    """Writing a file until it is on the disk: to the local one, and to storage. The best of some files: others write
    there too.
    """
    data = os.urandom(_BLOCK_BYTES) * (_FILE_BYTES // _BLOCK_BYTES)
    rates = []
    with tempfile.TemporaryDirectory() as local:
        places = {"local disk": local} | ({"storage": uri} if uri else {})
        for kind, place in places.items():
            storage, name = Storage(place), f"speed-{os.getpid()}-{time.time_ns()}"
            took_s = []
            try:
                for _ in range(_FILES):
                    began = time.perf_counter()
                    storage.write(name, data)
                    took_s.append(time.perf_counter() - began)
                    storage.delete(name)
            except (StorageError, OSError):
                continue  # the markers tell it
            rates.append(Rate(cast("Any", kind), f"writing to {kind}", _FILE_BYTES / min(took_s) / 1e6, "MB/s"))
    return rates
