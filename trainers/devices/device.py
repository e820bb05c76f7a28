"""Choose a worker's device, set its backend flags, and read its memory and environment.

Reads /proc/self/status and resets the peak through /proc/self/clear_refs (Linux,
proc(5)).
"""

import contextlib
import os
import platform
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainers.errors import ConfigError
from trainers.versions import package_versions

_SPARE_SHARE = 0.03
"""Of the memory that a process may use: for cuBLAS's and NCCL's buffers, and for
fragments.
"""
_KEPT_BYTES = 2**25 - 2**16


def resolve_device(name: str, index: int = 0) -> torch.device:
    """Return the device: auto is cuda, then mps, then cpu.

    Raises ConfigError where a forced device is not there.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        if index >= torch.cuda.device_count():
            rule = (
                f"must be at most the {torch.cuda.device_count()} GPUs of this machine"
            )
            raise ConfigError(
                "scaling.num_workers", index + 1, rule, "lower it, or set `device: cpu`"
            )
        return torch.device("cuda", index)
    if name in ("auto", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    if name in ("auto", "cpu"):
        return torch.device("cpu")
    rule = f"is not there (torch {torch.__version__} sees no {name} device)"
    raise ConfigError("device", name, rule, "set `device: auto`, or fix the driver")


def device_name(device: torch.device) -> str:
    """Return the GPU's own name, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def with_gpu_memory(figures: dict[str, float]) -> dict[str, float]:
    """Return a worker's figures and, on a GPU, what its tensors take of it."""
    return (
        {**figures, "gpu_memory_bytes": torch.cuda.memory_allocated()}
        if torch.cuda.is_available()
        else figures
    )


def set_flags(device: torch.device, threads: int, deterministic: bool) -> None:
    """Process-wide settings that a run depends on, each set whatever it was before."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(torch.float32)
    torch.backends.cudnn.enabled = True
    torch.backends.cudnn.benchmark = False  # but for training's own steps
    torch.backends.cudnn.deterministic = deterministic
    # What half-precision products sum in: torch's own choice. fp32 products follow the
    # precision (apply_matmul).
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    if device.type == "cpu":
        # glibc gives freed memory back, to fetch it page by page in the next step,
        # until it has seen a block of 32 MiB.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch on every device that is there.

    Preparing a device that is not there takes torch longer.
    """
    seed_host(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the host and one device, for what is seeded anew at each batch.

    It takes a tenth of the time of `seed_all`.
    """
    seed_host(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, numpy and torch on the CPU: a loader's process has nothing else."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Begin to copy a tensor's numbers; return a function that waits for them.

    The numbers are those of this moment.

    Only on CUDA do they come beside the device's work: elsewhere they are waited for at
    once.
    """
    if tensor.device.type != "cuda":
        numbers: list[float] = tensor.tolist()
        return lambda: numbers
    copied = tensor.to(
        "cpu", non_blocking=True
    )  # torch takes page-locked memory for it
    done = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return read


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak for `peak_memory_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu" and sys.platform == "linux":
        with contextlib.suppress(
            OSError
        ):  # without CONFIG_PROC_PAGE_MONITOR the peak is the process's whole life
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak_memory`.

    On a GPU it is what torch allocated, on a CPU the process's resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    status = Path("/proc/self/status")
    peak = (
        re.search(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE)
        if status.exists()
        else None
    )
    return 1024 * (
        int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def memory_figures(device: torch.device) -> dict[str, int]:
    """Return `NAME_bytes` now allocated and reserved, at the peak and in total.

    Only a GPU has reserved ones, those of torch's allocator.

    On a CPU the resident memory of the process counts as allocated. Does not wait for
    the device.
    """
    figures = {
        "peak_bytes": peak_memory_bytes(device),
        "total_bytes": total_memory_bytes(device),
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return {"allocated_bytes": allocated, "reserved_bytes": reserved, **figures}
    if device.type == "mps":
        return {"allocated_bytes": int(torch.mps.current_allocated_memory()), **figures}
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # The kernel writes its high-water mark down now and then only: it may lag
        # behind.
        figures |= {
            "allocated_bytes": resident,
            "peak_bytes": max(resident, figures["peak_bytes"]),
        }
    return figures


def total_memory_bytes(device: torch.device) -> int:
    """Return all memory of the device; of the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def take_spare(device: torch.device) -> Tensor | None:
    """Take a little of a GPU's memory, to see whether the rest is enough.

    Libraries and fragments take some later.
    """
    if device.type != "cuda":
        return None
    spare = int(_SPARE_SHARE * _allowed_bytes(device))
    return torch.empty(spare, dtype=torch.uint8, device=device)


def _allowed_bytes(device: torch.device) -> float:
    share = torch.cuda.get_per_process_memory_fraction(device)
    return total_memory_bytes(device) * share


def free_gpu_bytes(device: torch.device) -> float:
    """Return the bytes of a GPU that this process may still allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return min(free + unused, _allowed_bytes(device) - allocated)


def grow_segments() -> None:
    """Let torch's CUDA allocator grow its segments, where shapes change.

    Else what runs of other sizes have left free would not fit together.

    Where the environment says how to allocate, that holds.
    """
    if (
        torch.cuda.is_available()
        and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def environment(device: torch.device) -> dict[str, str]:
    """Collect what a figure depends on: versions, hardware, git commit.

    Saved with every run.
    """
    report = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    report |= package_versions("paceline", "torch", "ray", "pyarrow", "numpy")
    report["device"] = str(device)
    if device.type == "cuda":
        report |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or "none",
        }
    # no git here, or no repository
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.check_output(
            ["git", "rev-parse", "HEAD"],  # noqa: S607
            timeout=5,
            stderr=subprocess.DEVNULL,
        )
        report["git_commit"] = commit.decode().strip()
    return report
