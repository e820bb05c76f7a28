"""Measure the claims of the guides to training on a GPU: theirs and ours.

Run as: python -m benchmarks.guides [ROUNDS] [--only resnet50,bert-large,...] [--seconds
                                    1.5] [--minutes 2.75] [--small] [--keep]

    matmul       a GPU multiplies 5000 x 5000 matrices 88 times faster than a CPU
    resnet50     mixed precision turns an hour of ResNet-50 into 40 minutes, with 30 to
    50 % less memory bert-large   and three days of BERT-Large into one and a half, with
    40 to 60 % less cpu          a GPU trains about ten times faster than a CPU:
    ResNet-9 on CIFAR-10-shaped images loading      worker processes and pinned memory
    win 20 to 40 % over a plain DataLoader: the same ResNet-9, with
                 torchvision's transforms; then the product's loop on resident data
                 against the same plain DataLoader
    cpu-bert     the tenfold again: BERT-base, fine-tuned

Mixed precision is the product's loop in fp32 and in bf16, all else equal (channels
last, fused optimizer). Runs of one claim are taken in turn; `ours` is the median over n
rounds of the ratio within a round, with the smallest and the largest, and the A/A floor
is from bf16 measured twice. A CPU has all its cores. Claims are measured in this order,
and `--minutes` drops the last of them. `--small` (the default without CUDA) are
miniatures, with the CPU in the GPU's
place: they show that the script works and nothing of speed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import ladder
from benchmarks.guides_loop import plain_rate, plain_training
from benchmarks.input import KINDS, Kind
from benchmarks.measure import aa_floor, save
from benchmarks.runs import (
    Budget,
    Measured,
    Runs,
    Work,
    arguments,
    device_and_size,
    example,
    matmul_times,
    quiet_and_cold,
    release,
)

_CPU = torch.device("cpu")
_BATCH = 512
_TENFOLD = "about 10 x"


@dataclass(frozen=True)
class Setting:
    """How a claim is measured."""

    device: torch.device
    """The GPU, or what stands for it."""
    small: bool
    rounds: int
    seconds: float
    """Of each run, after its warm-up."""

    def pick(self, full: Any, miniature: Any) -> Any:
        """What this setting measures."""
        return miniature if self.small else full


@dataclass(frozen=True)
class Line:
    """One line of the table: a ratio, or a share (of memory that is saved)."""

    claim: str
    theirs: str
    ratios: list[float]
    """Ours, one a round."""
    floor: float | None = None
    share: bool = False

    @property
    def ours(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    def write(self, value: float) -> str:
        """As `theirs` is written."""
        return f"{value:.0%}" if self.share else f"{value:.2f} x"

    def tree(self) -> dict[str, Any]:
        """Plain data."""
        spread = {
            "ours": self.ours,
            "n": len(self.ratios),
            "min": min(self.ratios),
            "max": max(self.ratios),
        }
        return vars(self) | spread


def in_turn(
    peers: dict[str, Callable[[], Measured]], rounds: int
) -> dict[str, list[Measured]]:
    """Every peer once a round; each run has a warm-up of its own."""
    found: dict[str, list[Measured]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, run in peers.items():
            found[name].append(run())
    return found


def speeds(runs: list[Measured]) -> list[float]:
    """Samples/s of each."""
    return [run.samples_per_s for run in runs]


def over(values: list[float], base: list[float]) -> list[float]:
    """Ratios, round by round."""
    return [value / below for value, below in zip(values, base, strict=True)]


def mixed_precision(
    setting: Setting, name: str, faster: str, smaller: str
) -> list[Line]:
    """fp32 against bf16, time and memory; TF32 too where there is one."""
    runs = Runs(setting.pick(ladder.WORKS, ladder.SMALL)[name], setting.device)
    precisions = {"fp32": "fp32", "bf16": "bf16", "bf16 again": "bf16"}
    if setting.device.type == "cuda":
        precisions["tf32"] = "tf32"
    found = in_turn(
        {
            peer: lambda at=at: runs.run({"precision": at}, setting.seconds)
            for peer, at in precisions.items()
        },  # type: ignore[misc]
        setting.rounds,
    )
    rate = {peer: speeds(measured) for peer, measured in found.items()}
    peak = {
        peer: [float(run.result.peak_memory_bytes) for run in measured]
        for peer, measured in found.items()
    }
    floor = aa_floor(over(rate["bf16 again"], rate["bf16"]))
    saved = [1 - ratio for ratio in over(peak["bf16"], peak["fp32"])]
    lines = [
        Line(
            f"{name}: mixed precision over fp32",
            faster,
            over(rate["bf16"], rate["fp32"]),
            floor,
        ),
        Line(f"{name}: memory that it saves", smaller, saved, share=True),
    ]
    if "tf32" in rate:
        theirs = "2.63 x (A100)" if name == "resnet50" else "-"
        lines.append(
            Line(
                f"{name}: mixed precision over TF32",
                theirs,
                over(rate["bf16"], rate["tf32"]),
                floor,
            )
        )
    return lines


def resnet50(setting: Setting) -> list[Line]:
    """An hour into 40 minutes."""
    return mixed_precision(setting, "resnet50", "60 -> 40 min: 1.50 x", "30 to 50%")


def bert_large(setting: Setting) -> list[Line]:
    """Three days into one and a half."""
    return mixed_precision(setting, "bert-large", "3 -> 1.5 days: 2.00 x", "40 to 60%")


def loading(setting: Setting) -> list[Line]:
    """The guides' advice for loaders, and the product without one."""
    device = setting.device
    torch.set_num_threads(1)
    cifar = KINDS["cifar"]
    kind = setting.pick(
        Kind(cifar.shape, cifar.samples, _BATCH, _BATCH), Kind(cifar.shape, 96, 16, 16)
    )
    workers = setting.pick(min(8, os.cpu_count() or 1), 1)
    miniature = example("cifar10", kind.batch, synthetic=True, samples=96, width=4)
    runs = Runs(
        setting.pick(example("cifar10", kind.batch, synthetic=True), miniature), device
    )
    precision = "bf16" if device.type == "cuda" else "fp32"
    loaders = {
        count: plain_training(kind, runs.task, count, device) for count in (0, workers)
    }
    rate: dict[str, list[float]] = {"plain": [], "workers": [], "again": [], "ours": []}
    try:
        for _ in range(setting.rounds):
            rate["plain"].append(plain_rate(loaders[0], 3, setting.seconds, device))
            rate["workers"].append(
                plain_rate(loaders[workers], 3 * workers, setting.seconds, device)
            )
            rate["again"].append(plain_rate(loaders[0], 3, setting.seconds, device))
            rate["ours"].append(
                runs.run({"precision": precision}, setting.seconds).samples_per_s
            )
    finally:
        for steps in loaders.values():
            steps.close()
        release()
    floor = aa_floor(over(rate["again"], rate["plain"]))
    theirs = "1.20 to 1.40 x"
    plain = rate["plain"]
    return [
        Line(
            f"loading: {workers} workers, pinned, over a plain DataLoader",
            theirs,
            over(rate["workers"], plain),
            floor,
        ),
        Line(
            "loading: Paceline's resident data over a plain DataLoader",
            theirs,
            over(rate["ours"], plain),
            floor,
        ),
    ]


def against_cpu(setting: Setting, name: str, work: Work) -> list[Line]:
    """Train the same on both: fp32 on all cores of the CPU; fp32 and bf16 on the GPU."""
    all_cores = {
        "precision": "fp32",
        "scaling.cpus_per_worker": setting.pick(os.cpu_count() or 1, 1),
    }
    slow = Runs(work, _CPU)
    fast = Runs(work, setting.device)
    found = in_turn(
        {
            "cpu": lambda: slow.run(all_cores, setting.seconds),
            "fp32": lambda: fast.run({"precision": "fp32"}, setting.seconds),
            "bf16": lambda: fast.run({"precision": "bf16"}, setting.seconds),
            "bf16 again": lambda: fast.run({"precision": "bf16"}, setting.seconds),
        },
        setting.rounds,
    )
    rate = {peer: speeds(measured) for peer, measured in found.items()}
    floor = aa_floor(over(rate["bf16 again"], rate["bf16"]))
    return [
        Line(
            f"{name}: GPU over CPU, both fp32",
            _TENFOLD,
            over(rate["fp32"], rate["cpu"]),
            floor,
        ),
        Line(
            f"{name}: GPU in bf16 over CPU in fp32",
            _TENFOLD,
            over(rate["bf16"], rate["cpu"]),
            floor,
        ),
    ]


def cpu(setting: Setting) -> list[Line]:
    """ResNet-9."""
    miniature = example("cifar10", 8, synthetic=True, samples=80, width=4)
    full = example("cifar10", 128, long_steps=True, synthetic=True)
    return against_cpu(setting, "ResNet-9", setting.pick(full, miniature))


def cpu_bert(setting: Setting) -> list[Line]:
    """BERT-base."""
    miniature = example(
        "bert", 4, synthetic=True, geometry="tiny", length=16, samples=80
    )
    full = example(
        "bert", 8, long_steps=True, synthetic=True, geometry="base", samples=640
    )
    return against_cpu(setting, "BERT-base", setting.pick(full, miniature))


def matmul(setting: Setting) -> list[Line]:
    """5000 x 5000: samples of a quiet device, the CPU's against the GPU's."""
    n = setting.pick(5000, 128)
    torch.set_num_threads(setting.pick(os.cpu_count() or 1, 1))
    cpu_s = matmul_times("fp32", _CPU, n)
    again = matmul_times("fp32", _CPU, n)
    floor = abs(statistics.median(again) / statistics.median(cpu_s) - 1)
    lines = []
    for precision in ("fp32", "tf32") if setting.device.type == "cuda" else ("fp32",):
        gpu_s = matmul_times(precision, setting.device, n)
        ratios = [slow / fast for slow, fast in zip(cpu_s, gpu_s, strict=False)]
        claim = f"matmul {n} x {n}: GPU in {precision} over CPU in fp32"
        lines.append(Line(claim, "1.847 s -> 0.021 s: 88 x (RTX 4090)", ratios, floor))
    return lines


CLAIMS: dict[str, tuple[Callable[[Setting], list[Line]], float]] = {
    "matmul": (matmul, 4.0),
    "resnet50": (resnet50, 18.0),
    "bert-large": (bert_large, 22.0),
    "cpu": (cpu, 14.0),
    "loading": (loading, 16.0),
    "cpu-bert": (cpu_bert, 20.0),
}
"""Each claim with the seconds that a round of it may take."""


def measure(
    only: list[str], setting: Setting, budget: Budget
) -> tuple[list[Line], dict[str, str]]:
    """Return the lines of the claims that there is time for.

    And, by claim, what went wrong with others.
    """
    lines = []
    failed = {}
    for name, (claim, round_s) in CLAIMS.items():
        if name not in only or not budget.affords(
            name, 0.0 if setting.small else round_s * setting.rounds
        ):
            continue
        try:
            lines += claim(setting)
        except Exception as error:
            failed[name] = (
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            )
        release()
        print(
            f"  {budget.spent_s():5.0f} s  {name}: {failed.get(name, 'done')}",
            flush=True,
        )
    return lines, failed


def show(lines: list[Line]) -> None:
    """The table."""
    print(
        f"\n  {'claim':62} {'theirs':>36} {'ours':>10}    n   spread              A/A floor"
    )
    for line in lines:
        spread = f"[{line.write(min(line.ratios))}, {line.write(max(line.ratios))}]"
        floor = "-" if line.floor is None else f"{line.floor:.1%}"
        ours = (
            f"{line.write(line.ours):>10}   {len(line.ratios):2d}   {spread:20}{floor}"
        )
        print(f"  {line.claim:62} {line.theirs:>36} {ours}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(CLAIMS)
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of each run, after its warm-up"
    )
    given = parser.parse_args()
    device, small = device_and_size(given.small)
    budget = Budget(given.minutes)
    with quiet_and_cold():
        lines, failed = measure(
            given.only, Setting(device, small, given.rounds, given.seconds), budget
        )
    show(lines)
    for name, words in failed.items():
        print(f"  {name} FAILED: {words}")
    budget.say()
    results = {
        "lines": [line.tree() for line in lines],
        "failed": failed,
        "dropped": budget.dropped,
    }
    print(
        f"\nkept in {save('guides-small' if small else 'guides', results, given.keep)}"
    )


if __name__ == "__main__":
    main()
