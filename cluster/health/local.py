"""Show what this machine has, and how fast it multiplies matrices.

Environment read: CUDA_VISIBLE_DEVICES, which hides GPUs from torch.
"""

import dataclasses
import gc
import json
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Literal

import torch

from cluster.health.probes import matmul_times, nccl_version, opened_nvml, processor
from cluster.health.report import table_lines
from trainers.devices.device import total_memory_bytes
from trainers.errors import first_line
from trainers.model.precision import able_precisions

_CPU_SIZE = 1024
_GPU_SIZE = 8192  # a GPU's own rate needs larger matrices
_NOISY = 0.2


@dataclasses.dataclass(frozen=True)
class Driver:
    """What NVML says of this machine."""

    version: str
    cuda: tuple[int, int]
    """The newest CUDA that the driver can run."""
    num_gpus: int


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
class ProductRate:
    """An n x n by n x n product."""

    device: str
    precision: str
    n: int
    median_s: float
    gflop_per_s: float
    spread: float
    """(slowest - fastest) / median of the samples."""


@dataclasses.dataclass(frozen=True)
class Remark:
    """A sentence on what was found; an error where torch cannot use what is there."""

    level: Literal["ok", "note", "warning", "error"]
    text: str


@dataclasses.dataclass(frozen=True)
class LocalReport:
    """All of it; `--json` prints it as it is."""

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    rates: tuple[ProductRate, ...]
    verdicts: tuple[Remark, ...]


def check_local(as_json: bool) -> int:
    """Print the report; return 1 when torch sees no GPU though the driver has one."""
    report = look()
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    return int(any(verdict.level == "error" for verdict in report.verdicts))


def look() -> LocalReport:
    """Read versions and devices, and measure each device. Takes seconds."""
    driver = read_driver()
    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    verdicts = [
        judge_gpus(
            driver, num_seen, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    ]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    devices = [
        _device(torch.device(name))
        for name in ("cpu", *(f"cuda:{index}" for index in range(num_seen)), *mps)
    ]
    rates: list[ProductRate] = []
    for device in devices:
        try:
            rates += _rates(device)
        except torch.OutOfMemoryError:
            verdicts.append(
                Remark(
                    "warning",
                    f"{device.device} has no memory left to be measured: what runs on it?",
                )
            )
        gc.collect()
    verdicts += judge_rates(rates)
    return LocalReport(_versions(driver), tuple(devices), tuple(rates), tuple(verdicts))


def read_driver() -> Driver | None:
    """Read the NVIDIA driver; None without one."""
    with opened_nvml() as nvml:
        if nvml is None:
            return None
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        version = str(nvml.nvmlSystemGetDriverVersion())
        num_gpus = int(nvml.nvmlDeviceGetCount())
        return Driver(version, (cuda // 1000, cuda % 1000 // 10), num_gpus)


def judge_gpus(
    driver: Driver | None, num_seen: int, built_for: str | None, visible: str | None
) -> Remark:
    """Say whether torch sees the GPUs that the driver has, and why not.

    `built_for` is torch's CUDA version, None of a CPU build; `visible` is
    CUDA_VISIBLE_DEVICES.
    """
    if driver is None or not driver.num_gpus:
        if num_seen:  # another vendor's, or a container without NVML
            return Remark(
                "note",
                f"torch sees {_gpus(num_seen)}; NVML, which would know the driver, does not answer",
            )
        return Remark(
            "note", "there is no NVIDIA GPU here: only what is below was measured"
        )
    num_gpus = driver.num_gpus
    newest = driver.cuda[0]
    if num_seen >= num_gpus:
        return Remark("ok", f"torch sees {_gpus(num_seen)}, as the driver does")
    if num_seen:
        why = f"CUDA_VISIBLE_DEVICES is {visible}"
        if visible is None:
            why = "look at `nvidia-smi` and the kernel's log"
        return Remark("warning", f"torch sees {num_seen} of {_gpus(num_gpus)}: {why}")
    if built_for is None:
        where = "https://pytorch.org/get-started/locally"
        why = f"torch {torch.__version__} is a CPU build; install one for CUDA {newest} from {where}"
    elif int(built_for.partition(".")[0]) > newest:
        stops = f"torch is built for CUDA {built_for} and the driver stops at {newest}.{driver.cuda[1]}"
        why = f"{stops}; update the driver, or install a torch for CUDA {newest}"
    elif visible is not None:
        why = f'CUDA_VISIBLE_DEVICES is "{visible}", which hides them; unset it'
    else:
        why = f"CUDA does not start ({_cuda_error()}); restart the machine, or reload the driver"
    return Remark(
        "error",
        f"the driver ({driver.version}) has {_gpus(num_gpus)}, torch sees none: {why}",
    )


def judge_rates(rates: Sequence[ProductRate]) -> list[Remark]:
    """Say what the rates mean: a GPU against the CPU, formats that gain nothing, noise."""
    verdicts = []
    on_cpu = {
        rate.n: rate
        for rate in rates
        if (rate.device, rate.precision) == ("cpu", "fp32")
    }
    for rate in rates:
        if rate.device != "cpu" and rate.precision == "fp32" and rate.n in on_cpu:
            times = on_cpu[rate.n].median_s / rate.median_s
            text = f"fp32, {rate.n} x {rate.n}: {rate.device} is {times:,.3g} times as fast as the CPU"
            verdicts.append(Remark("ok" if times > 1 else "warning", text))
    best: dict[tuple[str, str], float] = {}
    for rate in rates:
        key = rate.device, rate.precision
        best[key] = max(best.get(key, 0.0), rate.gflop_per_s)
    for (device, precision), gflop_per_s in best.items():
        times = gflop_per_s / best[device, "fp32"]
        gain = f"{precision} multiplies {times:.3g} times as fast as fp32 on {device}"
        if precision != "fp32" and times > 1.1:
            verdicts.append(Remark("ok", gain))
        elif precision != "fp32":
            verdicts.append(Remark("note", f"{gain}: no gain in it here"))
    noisy = [
        f"{rate.device} {rate.precision} {rate.spread:.0%}"
        for rate in rates
        if rate.spread > _NOISY
    ]
    if noisy:
        text = f"samples differ much ({', '.join(noisy)}): something else runs here, measure again"
        verdicts.append(Remark("warning", text))
    return verdicts


def _rates(shown: Device) -> list[ProductRate]:
    """Measure one device: fp32 at the CPU's size too, for the comparison."""
    device = torch.device(shown.device)
    on_cpu = device.type == "cpu"
    rates = []
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        # A CPU multiplies fp16 hundreds of times slower than fp32: nothing that one
        # waits for.
        if precision not in shown.precisions or (on_cpu and precision == "fp16"):
            continue
        sizes = {_CPU_SIZE} if on_cpu else {_GPU_SIZE}
        if precision == "fp32":
            sizes |= {_CPU_SIZE}
        for n in sorted(sizes):
            times = matmul_times(precision, device, n)
            median_s = statistics.median(times)
            spread = (max(times) - min(times)) / median_s
            rates.append(
                ProductRate(
                    shown.device,
                    precision,
                    n,
                    median_s,
                    2 * n**3 / median_s / 1e9,
                    spread,
                )
            )
    return rates


def _device(device: torch.device) -> Device:
    name = processor()
    capability = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    elif device.type == "cpu":
        name += f" ({torch.get_num_threads()} threads)"
    return Device(
        str(device),
        name,
        total_memory_bytes(device),
        capability,
        tuple(able_precisions(device)),
    )


def _versions(driver: Driver | None) -> dict[str, str | None]:
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "cuda_of_driver": ".".join(map(str, driver.cuda)) if driver else None,
        "driver": driver.version if driver else None,
        "cudnn": str(cudnn) if cudnn else None,
        "nccl": nccl_version() if torch.version.cuda else None,
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
    lines = [
        "  ".join(
            f"{name.replace('_', ' ')} {value or 'none'}"
            for name, value in report.versions.items()
        )
    ]
    for device in report.devices:
        capability = f", capability {device.capability}" if device.capability else ""
        memory = f"{device.memory_bytes / 2**30:,.0f} GiB"
        lines.append(
            f"{device.device}: {device.name}, {memory}{capability}; can do {', '.join(device.precisions)}"
        )
    rows = []
    for rate in report.rates:
        figures = (
            f"{rate.median_s * 1e3:.3f} ms",
            f"{rate.gflop_per_s:,.0f}",
            f"{rate.spread:.0%}",
        )
        rows.append((rate.device, rate.precision, str(rate.n), *figures))
    lines += table_lines(
        ("device", "format", "n x n by n x n", "median", "GFLOP/s", "spread"),
        rows,
        num_left=2,
    )
    return lines + [f"{verdict.level}: {verdict.text}" for verdict in report.verdicts]
