"""What this machine has and how fast it is: versions, driver, devices, and the rates of a matrix product.

Environment read: CUDA_VISIBLE_DEVICES, which hides GPUs from torch.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from trainers.devices.device import synchronize, total_memory_bytes
from trainers.errors import first_line
from trainers.model.precision import TABLE, able_precisions, apply_matmul

_SIZES = (512, 1024, 2048, 4096, 8192)
_CPU_TARGET_S = 0.1
"""What one product may take on the CPU; a GPU's own rate needs larger matrices than that allows."""
_GPU_TARGET_S = 0.02
_SAMPLE_S = 0.02  # a sample shorter than this is repeated: launches and clocks would show
_SAMPLES = 7
_BUDGET_S = 1.5  # of one device and format
_NOISY = 0.2


@dataclasses.dataclass(frozen=True)
class Driver:
    """What NVML says of this machine."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that the driver can run."""
    gpus: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that torch sees."""

    device: str
    name: str
    memory_bytes: int
    capability: str | None
    """Of CUDA, such as 9.0."""
    precisions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rate:
    """An n x n by n x n product."""

    device: str
    precision: str
    n: int
    median_s: float
    gflop_per_s: float
    spread: float
    """(slowest - fastest) / median of the samples."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A sentence on what was found; an error where torch cannot use what is there."""

    level: Literal["ok", "note", "warning", "error"]
    text: str


@dataclasses.dataclass(frozen=True)
class LocalReport:
    """All of it; `--json` prints it as it is."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    rates: tuple[Rate, ...]
    verdicts: tuple[Verdict, ...]


def check_local(as_json: bool) -> int:
    """Print the report; 1 when torch sees no GPU though the driver has one."""
    report = look()
    print(json.dumps(dataclasses.asdict(report), indent=2) if as_json else "\n".join(_lines(report)))
    return int(any(verdict.level == "error" for verdict in report.verdicts))


def look() -> LocalReport:
    """Read versions and devices, and measure each device. Takes seconds."""
    driver = read_driver()
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    verdicts = judge_gpus(driver, num_seen, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices = [_device(torch.device("cpu"))]
    devices += [_device(torch.device("cuda", index)) for index in range(num_seen)]
    if torch.backends.mps.is_available():
        devices.append(_device(torch.device("mps")))
    rates: list[Rate] = []
    for device in devices:
        try:
            rates += _rates(device, rates)
        except torch.OutOfMemoryError:
            verdicts.append(Verdict("warning", f"{device.device} has no memory left to be measured: what runs on it?"))
        gc.collect()
    verdicts += judge_rates(rates)
    return LocalReport(_versions(driver), tuple(devices), tuple(rates), tuple(verdicts))


def read_driver() -> Driver | None:
    """The NVIDIA driver; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        names = (_name(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), tuple(names))
    finally:
        pynvml.nvmlShutdown()


def _name(nvml: Any, index: int) -> str:
    try:
        return str(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError as error:  # one of several that has fallen off the bus or is another user's
        return f"GPU {index} ({error})"


def judge_gpus(driver: Driver | None, num_seen: int, built_for: str | None, visible: str | None) -> list[Verdict]:
    """Whether torch sees the GPUs that the driver has, and why not.

    `built_for` is torch's CUDA version, None of a CPU build; `visible` is CUDA_VISIBLE_DEVICES.
    """
    num_gpus = len(driver.gpus) if driver else 0
    if driver is None or num_gpus == 0:
        if num_seen:  # another vendor's, or a container without NVML
            return [
                Verdict("note", f"torch sees {_gpus(num_seen)}; NVML, which would know the driver, does not answer")
            ]
        return [Verdict("note", "there is no NVIDIA GPU here: only what is below was measured")]
    hidden = visible is not None
    if num_seen >= num_gpus:
        return [Verdict("ok", f"torch sees {_gpus(num_seen)}, as the driver does")]
    if num_seen:
        why = f"CUDA_VISIBLE_DEVICES is {visible}" if hidden else "look at `nvidia-smi` and the kernel's log"
        return [Verdict("warning", f"torch sees {num_seen} of {_gpus(num_gpus)}: {why}")]
    has = f"the driver ({driver.version}) has {_gpus(num_gpus)}, torch sees none"
    if built_for is None:
        why = (
            f"torch {torch.__version__} is a CPU build; install one for CUDA {driver.cuda[0]} from "
            "https://pytorch.org/get-started/locally"
        )
    elif int(built_for.partition(".")[0]) > driver.cuda[0]:
        why = (
            f"torch is built for CUDA {built_for} and the driver stops at {driver.cuda[0]}.{driver.cuda[1]}; update "
            f"the driver, or install a torch for CUDA {driver.cuda[0]}"
        )
    elif hidden:
        why = f'CUDA_VISIBLE_DEVICES is "{visible}", which hides them; unset it'
    else:
        why = f"CUDA does not start ({_cuda_error()}); restart the machine, or reload the driver"
    return [Verdict("error", f"{has}: {why}")]


def judge_rates(rates: Sequence[Rate]) -> list[Verdict]:
    """What the rates mean: a GPU against the CPU at one size, formats that gain nothing, noise."""
    verdicts = []
    on_cpu = {rate.n: rate for rate in rates if (rate.device, rate.precision) == ("cpu", "fp32")}
    for rate in rates:
        if rate.device != "cpu" and rate.precision == "fp32" and rate.n in on_cpu:
            times = on_cpu[rate.n].median_s / rate.median_s
            text = f"fp32, {rate.n} x {rate.n}: {rate.device} is {times:,.3g} times as fast as the CPU"
            verdicts.append(Verdict("ok" if times > 1 else "warning", text))
    best: dict[tuple[str, str], float] = {}
    for rate in rates:
        key = rate.device, rate.precision
        best[key] = max(best.get(key, 0.0), rate.gflop_per_s)
    for (device, precision), gflop_per_s in best.items():
        times = gflop_per_s / best[device, "fp32"]
        if precision != "fp32":
            gain = f"{precision} multiplies {times:.3g} times as fast as fp32 on {device}"
            verdicts.append(Verdict("ok", gain) if times > 1.1 else Verdict("note", f"{gain}: no gain in it here"))
    noisy = [rate for rate in rates if rate.spread > _NOISY]
    if noisy:
        shown = ", ".join(f"{rate.device} {rate.precision} {rate.spread:.0%}" for rate in noisy)
        verdicts.append(Verdict("warning", f"samples differ much ({shown}): something else runs here, measure again"))
    return verdicts


def size_for(target_s: float, probe_n: int, probe_s: float) -> int:
    """The largest size whose product should take at most `target_s`, from the time of one; work grows as n cubed."""
    fitting = [n for n in _SIZES if probe_s * (n / probe_n) ** 3 <= target_s]
    return max(fitting, default=_SIZES[0])


def measure(
    run: Callable[[], object], wait: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of `run`, which `wait` waits for, in each of some samples. Two runs before them warm up."""

    def sample(runs: int) -> float:
        wait()
        began = clock()
        for _ in range(runs):
            run()
        wait()
        return (clock() - began) / runs

    sample(1)
    once_s = sample(1)
    runs = max(1, round(_SAMPLE_S / max(once_s, 1e-7)))
    num_samples = min(_SAMPLES, max(3, int(_BUDGET_S / (runs * max(once_s, 1e-7)))))
    return [sample(runs) for _ in range(num_samples)]


def _rates(shown: Device, before: Sequence[Rate]) -> list[Rate]:
    """The rates of one device: fp32 at the CPU's size too, for the comparison."""
    device = torch.device(shown.device)
    on_cpu = device.type == "cpu"
    rates = []
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        # A CPU multiplies fp16 hundreds of times slower than fp32: nothing that one waits for.
        if precision not in shown.precisions or (on_cpu and precision == "fp16"):
            continue
        probe_s = min(_multiply(device, precision, _SIZES[0]))
        sizes = {size_for(_CPU_TARGET_S if on_cpu else _GPU_TARGET_S, _SIZES[0], probe_s)}
        if precision == "fp32":
            sizes |= {rate.n for rate in before if (rate.device, rate.precision) == ("cpu", "fp32")}
        for n in sorted(sizes):
            times = _multiply(device, precision, n)
            median_s = statistics.median(times)
            spread = (max(times) - min(times)) / median_s
            rates.append(Rate(shown.device, precision, n, median_s, 2 * n**3 / median_s / 1e9, spread))
    return rates


def _multiply(device: torch.device, precision: str, n: int) -> list[float]:
    spec = TABLE[precision]
    apply_matmul(spec)
    left, right = torch.randn(2, n, n, device=device).to(spec.autocast or torch.float32)
    out = torch.empty_like(left)
    return measure(lambda: torch.mm(left, right, out=out), lambda: synchronize(device))


def _device(device: torch.device) -> Device:
    name, capability = platform.machine(), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    elif Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    if device.type == "cpu":
        name += f" ({torch.get_num_threads()} threads)"
    return Device(str(device), name, total_memory_bytes(device), capability, tuple(able_precisions(device)))


def _versions(driver: Driver | None) -> dict[str, str | None]:
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "cuda_of_driver": ".".join(map(str, driver.cuda)) if driver else None,
        "driver": driver.version if driver else None,
        "cudnn": str(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "without a reason"


def _lines(report: LocalReport) -> list[str]:
    lines = ["  ".join(f"{name.replace('_', ' ')} {value or 'none'}" for name, value in report.versions.items())]
    for device in report.devices:
        capability = f", capability {device.capability}" if device.capability else ""
        memory = f"{device.memory_bytes / 2**30:,.0f} GiB"
        lines.append(f"{device.device}: {device.name}, {memory}{capability}; can do {', '.join(device.precisions)}")
    lines.append(f"{'device':9}{'format':9}{'n x n by n x n':>15}{'median':>12}{'GFLOP/s':>12}{'spread':>9}")
    lines += [
        f"{rate.device:9}{rate.precision:9}{rate.n:>15}{rate.median_s * 1e3:>9.3f} ms{rate.gflop_per_s:>12,.0f}"
        f"{rate.spread:>9.0%}"
        for rate in report.rates
    ]
    return lines + [f"{verdict.level}: {verdict.text}" for verdict in report.verdicts]
