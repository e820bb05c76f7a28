"""Measure what trials cost on a GPU besides their steps: starts, ends, a whole sweep.

Run as: python -m benchmarks.starts [--small]            a run in a forked process
        python -m benchmarks.starts --sweep [--small]    a sweep of twelve trials (Ray)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from benchmarks.measure import failed, verdict
from benchmarks.runs import (
    Work,
    arguments,
    device_and_size,
    example,
    quiet_and_cold,
)
from trainers.launch.local import LocalContext
from trainers.launch.user_code import load_task
from trainers.loop.fit import fit

_FORKS = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""If this is set, torch counts devices without CUDA, so that a fork can use CUDA."""
TRIALS = 12


class Looks(LocalContext):
    """Notes when the loop asks whether to stop, which it does every ten steps."""

    def __init__(self) -> None:
        super().__init__(None, "local")
        self.at: list[float] = []

    def should_stop(self, elapsed_s: float) -> bool:
        """Never stop."""
        self.at.append(time.perf_counter())
        return False


def _run(work: Work, changes: dict[str, Any]) -> dict[str, float]:
    """Train in a fresh fork; return times, s, and the share of the run in its phases."""
    began = time.perf_counter()
    os.environ.pop(_FORKS)  # otherwise each optimizer step would ask NVML
    torch.ones(8, 8, device=changes["device"]).sum().item()
    context_s = time.perf_counter() - began
    config = work.config(changes)
    task = load_task(config.task, config.task_args, str(work.file))
    looks = Looks()
    fit_began = time.perf_counter()
    result = fit(task, config, looks)
    ended = time.perf_counter()
    return {
        "context_s": context_s,
        "first_look_s": looks.at[0] - began,
        "first_step_s": result.first_step_s or 0.0,
        "end_s": ended - looks.at[-1],
        "phases": sum(result.phases_s.values()) / (ended - fit_began),
    }


def runs(work: Work, device: torch.device, steps: int, small: bool) -> None:
    """Time an eager run's start and end, and a compiled run's first step."""
    changes = {"device": device.type, "max_steps": steps}
    eager = _forked(work, {**changes, "compile": "off"})
    if eager is not None:
        first_s = eager["first_look_s"]
        name = "seconds from the fork to the tenth step"
        verdict(name, first_s, most=2, small=small)
        name = "seconds from the last step to the result"
        verdict(name, eager["end_s"], most=0.5, small=small)
        name = "phases over the run's time"
        verdict(name, eager["phases"], least=0.95, small=small)
    compiled = _forked(work, {**changes, "compile": "default"})
    if compiled is not None:
        first_s = compiled["first_step_s"]
        verdict(
            "seconds of a compiled first step", first_s, most=60, small=small
        )


def _forked(work: Work, changes: dict[str, Any]) -> dict[str, float] | None:
    """Call `_run` in a fork; if that fails, print the error and return None."""
    name = f"compile {changes['compile']}"
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(_run, (work, changes))
    except Exception as error:
        failed(name, error)
        return None
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def sweep(samples: int, epochs: int, small: bool) -> None:
    """Run a whole sweep, and measure its time outside of training."""
    tree = {
        "train": {
            "task": "examples.mnist.task:Mnist",
            "task_args": {"synthetic": True, "samples": samples},
            "epochs": epochs,
        },
        "space": {
            "global_batch_size": [64, 128, 256, 512],
            "optimizer.lr": [0.001, 0.002, 0.004],
        },
        "objective": {"metric": "val_loss", "mode": "min"},
        "finalists": 0,
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "sweep.yaml"
        file.write_text(json.dumps(tree))
        command = [sys.executable, "-m", "tune", str(file), "--name", "starts"]
        began = time.monotonic()
        subprocess.run([*command, "--storage_path", directory], check=True)
        took_s = time.monotonic() - began
        table = parquet.read_table(
            Path(directory) / "starts" / "results.parquet"
        )
    rows = table.to_pylist()
    training_s = sum(row["training_s"] or 0.0 for row in rows)
    done = sum(row["status"] == "done" for row in rows)
    verdict("trials done", done, least=TRIALS)
    beside_s = took_s - training_s
    verdict(
        "seconds of the sweep beside its training",
        beside_s,
        most=40,
        small=small,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    if not given.sweep and _FORKS not in os.environ:
        command = [sys.executable, "-m", "benchmarks.starts", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {_FORKS: "1"})  # noqa: S606
    device, small = device_and_size(given.small)
    samples = 640 if small else 60_000
    with quiet_and_cold():
        if given.sweep:
            sweep(samples, epochs=1 if small else 5, small=small)
            return
        work = example("mnist", 64, synthetic=True, samples=samples)
        runs(work, device, steps=20 if small else 400, small=small)


if __name__ == "__main__":
    main()
