"""Run every benchmark in turn, each in a process of its own.

A script that fails holds up none of the others.

Run as: python -m benchmarks [--keep]                 a short form of each, on a CPU
        python -m benchmarks --full                   the long form, for hours; kept,
        and what is kept today is skipped python -m benchmarks --gpu [--minutes 8]
        [--keep]
The GPU's share one budget: each drops its least important parts where it would take
more, and says which.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import KEPT

REPOSITORY = Path(__file__).parents[1]
_START_S = 15.0  # of a GPU script: imports, the data, the first words of CUDA


@dataclass(frozen=True)
class Script:
    """A benchmark, and what it is given."""

    result: str
    """The name that its figures are kept under."""
    module: str
    arguments: tuple[str, ...]


SHORT = [
    Script("input", "input", ("--short",)),
    Script("checkpoint", "checkpoint", ("--short",)),
    Script("sharded", "sharded", ("3", "--mb", "100")),
    Script("loop", "loop", ("--short",)),
    Script("sweep", "sweep", ()),
]
FULL = [
    Script("input", "input", ("11",)),
    Script("checkpoint", "checkpoint", ("11", "--full")),
    Script("sharded", "sharded", ("11", "--full")),
    Script("loop", "loop", ("11",)),
    Script("sweep", "sweep", ("--full",)),
    Script("sweep-noop", "sweep", ("--noop", "1000")),
]
GPU = [
    (Script("resident", "resident", ()), 1.0),
    (Script("guides", "guides", ("2",)), 2.6),
    (Script("ladder", "ladder", ()), 4.0),
]
"""The ladder last: it has most that can be dropped.

The numbers are shares of the budget.
"""


def due(scripts: list[Script], today: str, kept: Path) -> list[Script]:
    """The scripts without a kept result of this day."""
    return [
        script
        for script in scripts
        if not any(kept.glob(f"{script.result}-{today}-*.json"))
    ]


def share(left_s: float, shares: list[float]) -> float:
    """Return the minutes for the next script of those left, without its start.

    A tenth of a minute at least.
    """
    return max(0.1, (left_s * shares[0] / sum(shares) - _START_S) / 60)


def run(script: Script, extra: list[str]) -> bool:
    """Whether it ended well."""
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{script.module}",
        *script.arguments,
        *extra,
    ]
    print(f"\n== {' '.join(command[1:])}", flush=True)
    began = time.monotonic()
    code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    print(
        f"== {script.result}: {'done' if code == 0 else f'FAILED with {code}'}, {time.monotonic() - began:.0f} s"
    )
    return code == 0


def run_all(scripts: list[Script], keep: bool) -> list[str]:
    """The names of those that failed."""
    return [
        script.result
        for script in scripts
        if not run(script, ["--keep"] if keep else [])
    ]


def run_gpu(minutes: float, keep: bool) -> list[str]:
    """The same for the GPU's, within so many minutes."""
    began = time.monotonic()
    failed = []
    for index, (script, _) in enumerate(GPU):
        left_s = minutes * 60 - (time.monotonic() - began)
        limit = [
            "--minutes",
            f"{share(left_s, [weight for _, weight in GPU[index:]]):.2f}",
        ]
        if not run(script, limit + (["--keep"] if keep else [])):
            failed.append(script.result)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--full", action="store_true", help="the long form of each, resumable"
    )
    kind.add_argument("--gpu", action="store_true", help="ladder, guides and resident")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of the GPU's in all"
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    given = parser.parse_args()
    began = time.monotonic()
    if given.gpu:
        failed = run_gpu(given.minutes, given.keep)
    else:
        scripts = due(FULL, time.strftime("%Y-%m-%d"), KEPT) if given.full else SHORT
        if skipped := [
            script.result for script in FULL if given.full and script not in scripts
        ]:
            print(f"kept today already, and skipped: {', '.join(skipped)}")
        failed = run_all(scripts, given.keep or given.full)
    print(
        f"\n{(time.monotonic() - began) / 60:.1f} minutes in all; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
