"""What one node measures of itself; every function runs on that node."""

import contextlib
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.health.facts import GpuHealth, Kind, Rate
from trainers.devices.peers import code_digest
from trainers.errors import StorageError, first_line
from trainers.storage import Storage
from trainers.versions import package_versions

_POWER_CAP = 0x4  # one of NVML's reasons for lower clocks, which may be intended
_SAMPLE_S = 0.15  # long against a scheduler's time slice, so that one sample is no lucky moment
_FILE_BYTES, _FILES = 32 * 2**20, 3
_BLOCK_BYTES = 2**20
_SEEN_WITHIN_S = 5.0  # how late a file of another node may appear: NFS caches a directory for a few seconds


def versions(with_nccl: bool) -> dict[str, str | None]:
    """Return what must be equal on all nodes. NCCL's costs an import of torch."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": None, "ray": None}
    found |= package_versions("torch", "ray")
    if with_nccl:
        found["nccl"] = nccl_version()
    found["paceline"] = code_digest(("cluster", "trainers", "tune"))
    return found


def nccl_version() -> str | None:
    """Return the version that torch brings; None of a build without NCCL."""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None


def own_address() -> str:
    """Return what this host's own name resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"nothing ({error})"


def processor() -> str:
    """Return the model of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def device_name() -> str:
    """Return the model of what the products run on: the GPUs, or the CPU where there is none."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else processor()


@contextlib.contextmanager
def opened_nvml() -> Iterator[Any | None]:
    """Yield NVML, open inside the context; None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpu_health() -> tuple[GpuHealth, ...] | None:
    """Examine all GPUs of the node by NVML; None where it does not answer."""
    with opened_nvml() as nvml:
        return tuple(_health(nvml, index) for index in range(nvml.nvmlDeviceGetCount())) if nvml else None


def _health(nvml: Any, index: int) -> GpuHealth:
    """One GPU; what its driver does not support counts as healthy."""
    from trainers.devices.nvml import SLOWED

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = str(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return GpuHealth(index, f"GPU {index}", failure=str(error))

    def ask(question: str, *of: int, otherwise: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):
            return getattr(nvml, f"nvmlDeviceGet{question}")(handle, *of)
        return otherwise

    errors = ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC, otherwise=0)
    _, _, pending, failure = ask("RemappedRows", otherwise=(0, 0, 0, 0))
    slowed = ask("CurrentClocksThrottleReasons", otherwise=0) & ~_POWER_CAP
    reasons = tuple(words for bit, words in SLOWED.items() if slowed & bit)
    others = len(ask("ComputeRunningProcesses", otherwise=()))
    return GpuHealth(index, name, int(errors), bool(pending or failure), reasons, others)


def matmul_rates() -> list[Rate]:
    """Measure every GPU that torch sees here, or one core where there is none. Takes a second or two for each."""
    import torch

    from cluster.health.matmul import matmul_times

    threads, rates = torch.get_num_threads(), []
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    torch.set_num_threads(1)  # the other cores may be at work
    try:
        for device in [torch.device("cuda", index) for index in range(num_gpus)] or [torch.device("cpu")]:
            n, precision = (8192, "fp16") if num_gpus else (768, "fp32")
            if num_gpus and torch.cuda.get_device_capability(device) >= (8, 0):
                precision = "bf16"
            # The median: what disturbs the device for a moment changes it as little as a lucky moment does.
            median_s = statistics.median(matmul_times(precision, device, n, _SAMPLE_S))
            what = f"matmul of {device if num_gpus else 'one core'}"
            rates.append(Rate("matmul", what, 2 * n**3 / median_s / 1e9, "GFLOP/s"))
            torch.cuda.empty_cache()  # nothing without a GPU
    finally:
        torch.set_num_threads(threads)
    return rates


def write_marker(uri: str, name: str) -> str | None:
    """Write a file that says who wrote it; return what went wrong, or None."""
    return _wrong(f"{uri}: cannot be written", lambda: Storage(uri).write(name, name.encode()))


def seen_markers(uri: str, names: list[str]) -> list[str]:
    """Return those that this node can read, once it sees all or has waited for them."""
    storage, deadline = Storage(uri), time.monotonic() + _SEEN_WITHIN_S
    seen: list[str] = []
    while True:
        with contextlib.suppress(StorageError, OSError):
            there = set(storage.names()) - set(seen)
            seen += [name for name in names if name in there and storage.read(name) == name.encode()]
        if len(seen) == len(names) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


def delete_marker(uri: str, name: str) -> str | None:
    """Delete another node's marker; return what went wrong, or None."""
    return _wrong(f"{uri}: a file of another node cannot be deleted", lambda: Storage(uri).delete(name))


def _wrong(what: str, act: Callable[[], object]) -> str | None:
    try:
        act()
    except (StorageError, OSError) as error:
        return f"{what} ({first_line(error)})"
    return None


def remaining_markers(uri: str) -> list[str]:
    """Return the markers that are still there though all were deleted elsewhere; the directory goes too."""
    storage, deadline = Storage(uri), time.monotonic() + _SEEN_WITHIN_S
    try:
        while (left := storage.names()) and time.monotonic() < deadline:
            time.sleep(0.1)
        storage.delete("")
    except (StorageError, OSError):
        return []
    return left


def disk_rates(kind: Kind, uri: str | None) -> list[Rate]:
    """Measure writing a file to `uri`, or to this node's own disk. The best of some counts: others write there too.

    Empty where it cannot be written, which the markers tell.
    """
    data = os.urandom(_BLOCK_BYTES) * (_FILE_BYTES // _BLOCK_BYTES)
    took_s = []
    with tempfile.TemporaryDirectory() as local, contextlib.suppress(StorageError, OSError):
        storage, name = Storage(uri or local), f"speed-{os.getpid()}-{time.time_ns()}"
        for _ in range(_FILES):
            began = time.perf_counter()
            storage.write(name, data)
            took_s.append(time.perf_counter() - began)
            storage.delete(name)
        return [Rate(kind, f"writing to {kind}", _FILE_BYTES / min(took_s) / 1e6, "MB/s")]
    return []
