"""Run all benchmarks that need no GPU, one after another, each in its own process.

Run as: python -m benchmarks [--keep]      a short form of each
        python -m benchmarks --full        the long form, which takes hours: the results
                                           are kept, and a benchmark is skipped if it
                                           has a kept result of this day

A benchmark that fails does not stop the others. `python -m benchmarks.gpu` is for a GPU.
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


@dataclass(frozen=True)
class Script:
    """A benchmark, and its arguments."""

    result: str
    """The name under which its figures are kept."""
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


def due(scripts: list[Script], today: str, kept: Path) -> list[Script]:
    """Return the scripts without a kept result of this day."""
    return [
        script
        for script in scripts
        if not any(kept.glob(f"{script.result}-{today}-*.json"))
    ]


def run(script: Script, extra: list[str]) -> bool:
    """Run a script; return whether it ended well."""
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
    """Run scripts; return the names of those that failed."""
    return [
        script.result
        for script in scripts
        if not run(script, ["--keep"] if keep else [])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--full", action="store_true", help="the long form of each, resumable"
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    given = parser.parse_args()
    began = time.monotonic()
    scripts = (
        due(FULL, time.strftime("%Y-%m-%d"), KEPT) if given.full else SHORT
    )
    if skipped := [
        script.result
        for script in FULL
        if given.full and script not in scripts
    ]:
        print(f"kept today already, and skipped: {', '.join(skipped)}")
    failed = run_all(scripts, given.keep or given.full)
    print(
        f"\n{(time.monotonic() - began) / 60:.1f} minutes in all; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
