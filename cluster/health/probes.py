"""Measure a node, alone and with others; every function runs on the node it is about."""

import contextlib
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from cluster.health.verdicts import AllReduce, GpuHealth, Rate
from trainers.devices.peers import code_digest
from trainers.errors import StorageError, first_line
from trainers.storage import Storage
from trainers.versions import package_versions

_POWER_CAP = 0x4  # one of NVML's reasons for lower clocks, which may be intended
_SAMPLE_S = 0.15
"""Long against a scheduler's time slice, so that one sample is no lucky moment."""
_SHORT_SAMPLE_S = 0.02
"""Below that, launches and clocks would show."""
_SAMPLES = 7
_BUDGET_S = 1.5
"""Of one device and format."""
_TRIES = 3
# how late a file of another node may appear: NFS caches a directory for a few seconds
_SEEN_WITHIN_S = 5.0


def versions() -> dict[str, str | None]:
    """Return what must be equal on all nodes; torch brings NCCL."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": None,
        "ray": None,
    }
    found |= package_versions("torch", "ray")
    found["paceline"] = code_digest(("cluster", "trainers", "tune"))
    return found


def nccl_version() -> str | None:
    """Return the version that torch brings; None of a build without NCCL."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def processor() -> str:
    """Return the model of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return models[0] if models else platform.machine()


def device_name() -> str:
    """Return the model of what the products run on: the GPUs, else the CPU."""
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
        if nvml is None:
            return None
        return tuple(_health(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def _health(nvml: Any, index: int) -> GpuHealth:
    """Examine one GPU; what its driver does not support counts as healthy."""
    from trainers.devices.nvml import SLOWED

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return GpuHealth(index, failure=str(error))

    def ask(question: str, *of: int, otherwise: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError):
            return getattr(nvml, f"nvmlDeviceGet{question}")(handle, *of)
        return otherwise

    errors = ask(
        "TotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
        otherwise=0,
    )
    _, _, pending, failed = ask("RemappedRows", otherwise=(0, 0, 0, 0))
    slowed = ask("CurrentClocksThrottleReasons", otherwise=0) & ~_POWER_CAP
    reasons = tuple(words for bit, words in SLOWED.items() if slowed & bit)
    return GpuHealth(index, int(errors), bool(pending or failed), reasons)


def matmul_rates() -> tuple[Rate, ...]:
    """Measure every GPU that torch sees here, or one core where there is none.

    Takes a second or two for each.
    """
    import torch

    threads = torch.get_num_threads()
    rates = []
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    torch.set_num_threads(1)  # the other cores may be at work
    try:
        gpus = [torch.device("cuda", index) for index in range(num_gpus)]
        for device in gpus or [torch.device("cpu")]:
            n, precision = (8192, "fp16") if num_gpus else (768, "fp32")
            if num_gpus and torch.cuda.get_device_capability(device) >= (8, 0):
                precision = "bf16"
            # The median: what disturbs the device for a moment changes it as little as
            # a lucky moment does.
            median_s = statistics.median(matmul_times(precision, device, n, _SAMPLE_S))
            what = f"matmul of {device if num_gpus else 'one core'}"
            rates.append(Rate("matmul", what, 2 * n**3 / median_s / 1e9, "GFLOP/s"))
            torch.cuda.empty_cache()  # nothing without a GPU
    finally:
        torch.set_num_threads(threads)
    return tuple(rates)


def matmul_times(
    precision: str, device: Any, n: int, sample_s: float = _SHORT_SAMPLE_S
) -> list[float]:
    """Return the seconds of an n x n by n x n product in each of 3 to 7 samples.

    A CPU multiplies with torch's threads.
    """
    import torch

    from trainers.devices.device import synchronize
    from trainers.model.precision import TABLE, apply_matmul

    spec = TABLE[precision]
    apply_matmul(spec)
    left, right = torch.randn(2, n, n, device=device).to(spec.autocast or torch.float32)
    out = torch.empty_like(left)
    return measure(
        lambda: torch.mm(left, right, out=out),
        lambda: synchronize(device),
        sample_s=sample_s,
    )


def measure(
    run: Callable[[], object],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
    sample_s: float = _SHORT_SAMPLE_S,
) -> list[float]:
    """Return the seconds of `run`, which `wait` waits for, in each of 3 to 7 samples.

    A few runs before them warm up.

    A sample has as many runs as take `sample_s` where nothing disturbs them, and so
    takes longer where something does.
    """

    def sample(runs: int) -> float:
        wait()
        began = clock()
        for _ in range(runs):
            run()
        wait()
        return (clock() - began) / runs

    sample(1)
    once_s = max(min(sample(1) for _ in range(_TRIES)), 1e-7)
    runs = max(1, round(sample_s / once_s))
    num_samples = max(3, int(_BUDGET_S / (runs * once_s)))
    return [sample(runs) for _ in range(min(_SAMPLES, num_samples))]


def free_port(address: str) -> int:
    """Return a port that is free there now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def all_reduce(
    rank: int, world_size: int, address: str, port: int, timeout_s: float
) -> AllReduce:
    """Sum over one device of each node; every rank must call it.

    NCCL between GPUs, gloo where a node has none, or its own are in use. Integers in
    float32 have only one right sum.
    """
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, world_size, is_master=rank == 0, timeout=timeout
        )
        store.set(f"gpu-{rank}", str(torch.cuda.is_available()))
        gpu = all(store.get(f"gpu-{other}") == b"True" for other in range(world_size))
        backend = "nccl" if gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        try:
            device = torch.device("cuda", 0) if gpu else torch.device("cpu")
            return _summed(rank, world_size, device)
        finally:
            dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        return AllReduce(world_size, failure=first_line(error))


def _summed(rank: int, world_size: int, device: Any) -> AllReduce:
    """Return the best sum of three, after one that connects."""
    import torch
    import torch.distributed as dist

    from trainers.devices.device import synchronize

    pattern = (
        torch.arange(
            2**26 if device.type == "cuda" else 2**21,
            device=device,
            dtype=torch.float32,
        )
        % 251
    )
    right = pattern * (world_size * (world_size + 1) // 2)
    best = 0.0
    is_right = True
    for _ in range(4):
        tensor = pattern * (rank + 1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        took_s = time.perf_counter() - began
        is_right = is_right and torch.equal(tensor, right)
        # Bus bandwidth, as NCCL's own tests define it.
        best = max(
            best, tensor.nbytes / took_s * 2 * (world_size - 1) / world_size / 1e6
        )
    return AllReduce(world_size, best, is_right=is_right)


def write_marker(uri: str, name: str) -> str | None:
    """Write a file that says who wrote it; return what went wrong, or None."""
    try:
        Storage(uri).write(name, name.encode())
    except (StorageError, OSError) as error:
        return f"{uri}: cannot be written ({first_line(error)})"
    return None


def seen_markers(uri: str, names: list[str]) -> list[str]:
    """Return those that this node can read, once it sees all or has waited for them."""
    storage = Storage(uri)
    deadline = time.monotonic() + _SEEN_WITHIN_S
    seen: list[str] = []
    while True:
        with contextlib.suppress(StorageError, OSError):
            there = set(storage.names()) - set(seen)
            seen += [
                name
                for name in names
                if name in there and storage.read(name) == name.encode()
            ]
        if len(seen) == len(names) or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


def delete_markers(uri: str) -> None:
    """Delete all of them, with their directory."""
    with contextlib.suppress(StorageError, OSError):
        Storage(uri).delete("")
