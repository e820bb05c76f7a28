"""A worker's device and random state: choose, configure, seed and measure them.

Memory is read from torch, or from Linux's /proc (proc(5)); load, power and
temperature of a GPU from NVML.
"""

import contextlib
import gc
import logging
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.errors import MISSING, ConfigError

logger = logging.getLogger(__name__)

_EVERY_S = 1.0  # NVML itself averages over about this time
SLOWED = {
    0x4: "power cap",
    0x8: "hardware",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it
could be" (nvml.h).
"""
_SPARE_SHARE = 0.03
"""Share of the memory that a process may use, left for cuBLAS's and NCCL's
buffers and for fragmentation.
"""
_KEPT_BYTES = 2**25 - 2**16
HOST = torch.device("cpu")


def resolve_device(name: str, index: int = 0) -> torch.device:
    """Return the device; auto prefers cuda, then mps, then cpu.

    Raises ConfigError if the requested device does not exist.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        if index >= torch.cuda.device_count():
            raise ConfigError(
                "scaling.num_workers",
                MISSING,
                f"must be at most {torch.cuda.device_count()}, the number of GPUs of this machine",
                "lower it, or set `device: cpu`",
            )
        return torch.device("cuda", index)
    if name in ("auto", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    if name in ("auto", "cpu"):
        return torch.device("cpu")
    raise ConfigError(
        "device",
        name,
        f"is not available (torch {torch.__version__} sees no {name} device)",
        "set `device: auto`, or fix the driver",
    )


def device_name(device: torch.device) -> str:
    """Return a GPU's product name, or the type of another device."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else device.type
    )


def with_gpu_memory(figures: dict[str, float]) -> dict[str, float]:
    """Return the figures; on a GPU, add the memory that this process has allocated."""
    if not torch.cuda.is_available():
        return figures
    return {**figures, "gpu_memory_bytes": torch.cuda.memory_allocated()}


def set_flags(device: torch.device, threads: int, deterministic: bool) -> None:
    """Set the process-wide flags that a run depends on, whatever they were before."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    if torch.get_default_dtype() != torch.float32:
        logger.warning(
            "torch's default dtype is set back to float32; for float64, return a model and data in float64"
        )
    torch.set_default_dtype(torch.float32)
    torch.backends.cudnn.enabled = True
    torch.backends.cudnn.benchmark = False  # on only for training steps
    torch.backends.cudnn.deterministic = deterministic
    # Half-precision products are summed as torch does by default. fp32
    # products depend on the run's precision (apply_matmul).
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    if device.type == "cpu":
        # Until glibc has freed a block of 32 MiB, it returns freed memory to
        # the kernel, and gets it back page by page in the next step.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch on every available device.

    Without an accelerator only the host is seeded: torch takes longer to
    prepare the seeding of absent devices.
    """
    seed_host(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the host's and one device's generators, in a tenth of `seed_all`'s time."""
    seed_host(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, numpy and torch on the CPU, which is all a loader process uses."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def let_go(device: torch.device) -> None:
    """Release GPU memory that nothing uses any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Begin to copy a tensor's values; return a function that waits for them.

    The function returns the values that the tensor has now, even if the tensor
    changes later.

    Only on CUDA is the copy asynchronous; on other devices this call waits for
    it.
    """
    if tensor.device.type != "cuda":
        numbers: list[float] = tensor.tolist()
        return lambda: numbers
    # Torch uses page-locked memory for it.
    copied = tensor.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return read


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `peak_memory_bytes`; on a CPU by /proc/self/clear_refs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        # Without CONFIG_PROC_PAGE_MONITOR the peak covers the process's whole
        # life.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak_memory`.

    On a GPU it is the memory that torch allocated, on a CPU the process's
    resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                peak_kib = int(line.split()[1])
    return 1024 * peak_kib


def memory_figures(device: torch.device) -> dict[str, int]:
    """Return the allocated, reserved, peak and total memory as `NAME_bytes`.

    Only a GPU has reserved memory, that of torch's allocator.

    On a CPU the resident memory of the process counts as allocated. Does not
    wait for the device.
    """
    figures = {
        "peak_bytes": peak_memory_bytes(device),
        "total_bytes": total_memory_bytes(device),
    }
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            **figures,
        }
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        figures["allocated_bytes"] = resident
        # The kernel updates its high-water mark only now and then.
        figures["peak_bytes"] = max(resident, figures["peak_bytes"])
    return figures


def total_memory_bytes(device: torch.device) -> int:
    """Return all memory of the device; for a CPU, that of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def take_spare(device: torch.device) -> Tensor | None:
    """Allocate a little of a GPU's memory, to test whether the rest is enough.

    The tensor represents what libraries and fragmentation will take later.
    """
    if device.type != "cuda":
        return None
    spare = int(_SPARE_SHARE * _allowed_bytes(device))
    return torch.empty(spare, dtype=torch.uint8, device=device)


def _allowed_bytes(device: torch.device) -> float:
    share = torch.cuda.get_per_process_memory_fraction(device)
    return total_memory_bytes(device) * share


def free_gpu_bytes(device: torch.device) -> float:
    """Return how many bytes of a GPU this process may still allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated
    return min(free + unused, _allowed_bytes(device) - allocated)


def grow_segments() -> None:
    """Let torch's CUDA allocator expand its segments, for shapes that change.

    Otherwise the memory that batches of other sizes have freed would be too
    fragmented to use again.

    Settings of the allocator in the environment take precedence.
    """
    chosen = {
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    } & os.environ.keys()
    if torch.cuda.is_available() and not chosen:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators (CPU and `device`).

    They are plain data, which `weights_only=True` can load.
    """
    generator: Any = np.random.get_state()
    _, key, pos, has_gauss, gauss = generator
    kept = {
        "key": torch.from_numpy(key.astype(np.int64)),
        "pos": pos,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }
    state = {
        "python": random.getstate(),
        "numpy": kept,
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    saved = state["numpy"]
    if not 0 <= saved["pos"] <= 624:
        raise ValueError("numpy would read beyond its random state")
    key = saved["key"].numpy().astype(np.uint32)
    np.random.set_state(
        ("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"])


@contextlib.contextmanager
def drawn_alike(device: torch.device = HOST) -> Iterator[None]:
    """Make random numbers within the block the same in every process, call and run.

    They do not depend on the run's seed. Random state is restored afterwards.
    """
    before = get_rng_state(device)
    seed_device(0, device)
    try:
        yield
    finally:
        set_rng_state(before, device)


class GpuReadings:
    """Averages NVML's readings of a rank's GPU, at most one per second.

    A figure is missing, without an error, if there is no GPU or no NVML, or if
    the GPU does not support it (a MIG slice has no utilisation). A reading
    does not wait for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._samples: list[dict[str, float]] = []
        self._slowed: set[str] = set()
        self._last_s = float("-inf")
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = _handle(pynvml, device)
        except Exception as error:  # no package, no library, no permission, another vendor: a run works without NVML
            logger.debug("no readings of %s: %s", device, error)

    def sample(self) -> None:
        """Read the device, unless the last reading is less than a second old."""
        now = time.monotonic()
        if self._handle is None or now - self._last_s < _EVERY_S:
            return
        self._last_s = now
        reading, slowed = _read(self._nvml, self._handle)
        self._samples.append(reading)
        self._slowed |= slowed

    def take(self) -> dict[str, Any] | None:
        """Return the mean of each figure since the last call; None without any.

        Names: `utilisation` 0 to 1, `memory_used_bytes`, `memory_total_bytes`,
        `power_w`, `temperature_c`, and in `slowed_by` every reason for lowered
        clocks since the last call.
        """
        self.sample()
        if not self._samples:
            return None
        by_name: dict[str, list[float]] = {}
        for sample in self._samples:
            for name, value in sample.items():
                by_name.setdefault(name, []).append(value)
        found: dict[str, Any] = {}
        for name in sorted(by_name):
            found[name] = statistics.fmean(by_name[name])
        found["slowed_by"] = sorted(self._slowed)
        self._samples.clear()
        self._slowed.clear()
        return found

    def close(self) -> None:
        """Release NVML."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
        self._nvml = self._handle = None


@contextlib.contextmanager
def opened_nvml() -> Iterator[Any | None]:
    """Yield NVML, opened for the block; None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # as in GpuReadings
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a torch device by UUID, else by PCI address.

    CUDA_VISIBLE_DEVICES renumbers devices, but changes neither of these.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByPciBusId(
        f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
    )


def _read(nvml: Any, handle: Any) -> tuple[dict[str, float], set[str]]:
    figures: dict[str, Callable[[], float]] = {
        "utilisation": lambda: (
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        ),
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "memory_total_bytes": lambda: (
            nvml.nvmlDeviceGetMemoryInfo(handle).total
        ),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
            handle, nvml.NVML_TEMPERATURE_GPU
        ),
    }
    found: dict[str, float] = {}
    for name, read in figures.items():
        with contextlib.suppress(nvml.NVMLError):
            found[name] = read()
    return found, slowed_by(nvml, handle)


def slowed_by(nvml: Any, handle: Any) -> set[str]:
    """Return what lowers a GPU's clocks now; empty if the driver does not say."""
    for name in ("Event", "Throttle"):  # the older name, for older drivers
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            bits = getattr(nvml, f"nvmlDeviceGetCurrentClocks{name}Reasons")(
                handle
            )
            return {words for bit, words in SLOWED.items() if bits & bit}
    return set()
