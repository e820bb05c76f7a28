"""Every batch size and precision trained to the end, three seeds each: what a search for the best is judged by.

Run as: nice -n 5 python -m benchmarks.ground_truth [digits | rows] [--seeds N]
Writes benchmarks/results/ground-truth-WORK.json, the table that benchmarks/answer.py replays: for each run its
evaluations (samples seen, validation metric, training time) and its gradient noise scale. Seeds are the outer loop, so
that a slow hour of the machine falls on all configurations alike; the order within a seed is shuffled. Samples and
metrics are the same on every machine but for rounding. Times are processor times of one thread: the machine does
other work meanwhile (`cpu_share`, processor over wall time of a run, says how much).
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import trainers.measure.clock
from benchmarks.measure import KEPT
from examples.digits.task import Digits
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.devices.device import environment
from trainers.errors import DivergedError
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.task import Task

PRECISIONS = ("fp32", "bf16")
EVALUATIONS = 60
"""Of each run, evenly spread over its samples."""


class NoisyRows(Task):
    """12,000 rows of 40 floats whose label, a small network's verdict, is wrong for every fifth; a wide MLP."""

    def model(self) -> nn.Module:
        """Logits [B, 5] of rows [B, 40]."""
        return nn.Sequential(nn.Linear(40, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))

    def dataset(self, split: str) -> TensorDataset:
        """Rows and labels; those of the validation split are all right."""
        generator = torch.Generator().manual_seed(7)
        teacher = [torch.randn(40, 8, generator=generator) / 40**0.5, torch.randn(8, 5, generator=generator)]
        rows = torch.randn(14_000, 40, generator=generator)
        labels = (torch.tanh(2 * rows @ teacher[0]) @ teacher[1]).argmax(1)
        wrong = torch.rand(12_000, generator=generator) < 0.2
        labels[:12_000][wrong] = torch.randint(5, (int(wrong.sum()),), generator=generator)
        chosen = slice(12_000, None) if split == "val" else slice(12_000)
        return TensorDataset(rows[chosen], labels[chosen])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        """Accuracy, one value a sample."""
        return {"accuracy": outputs.argmax(1) == batch[1]}


WORK: dict[str, dict[str, Any]] = {
    "digits": {
        "task": Digits,
        "sizes": [12, 24, 40, 64, 100, 160, 256, 400],
        "train": {
            "epochs": 15,
            "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.01},
            "lr_schedule": {"name": "cosine", "warmup": 0.05},
            "lr_scaling": {"rule": "sqrt", "base_batch_size": 64},
        },
        "target": {"val_accuracy": 0.97},
    },
    "rows": {
        "task": NoisyRows,
        "sizes": [24, 48, 96, 200, 400, 800, 1600, 3200],
        "train": {
            "epochs": 6,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0005},
            "lr_schedule": {"name": "cosine", "warmup": 0.1},
            "lr_scaling": {"rule": "linear", "base_batch_size": 64},
        },
        "target": {"val_accuracy": 0.775},
    },
}


class _Curve(LocalContext):
    """Keeps the evaluations."""

    def __init__(self) -> None:
        super().__init__(None, "local")
        self.rows: list[dict[str, float]] = []

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        self.rows.append(dict(metrics))


@contextlib.contextmanager
def processor_time() -> Iterator[None]:
    """Runs inside of this are timed by the processor time of the process, not by the wall clock."""
    with mock.patch.object(trainers.measure.clock, "time", mock.Mock(perf_counter=time.process_time, time=time.time)):
        yield


def train(work: str, size: int, precision: str, seed: int) -> dict[str, Any]:
    """One run of the table."""
    plan = WORK[work]
    task = plan["task"]()
    samples = len(task.dataset("train")) * plan["train"]["epochs"]
    tree = {
        "task": f"benchmarks.ground_truth:{plan['task'].__name__}",
        **plan["train"],
        "global_batch_size": size,
        "precision": precision,
        "seed": seed,
        "noise_scale": True,
        "evaluate": {"every_steps": max(1, round(samples / EVALUATIONS / size))},
        "launcher": "local",
        "device": "cpu",
    }
    context = _Curve()
    wall, processor = time.perf_counter(), time.process_time()
    run = {"global_batch_size": size, "precision": precision, "seed": seed}
    try:
        with processor_time():
            result = fit(task, build(TrainConfig, tree, "ground truth"), context)
    except DivergedError:
        return {**run, "status": "diverged", "curve": []}
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert result.throughput is not None
    (metric,) = plan["target"]
    return {
        **run,
        "status": "done",
        "samples_per_s": round(result.throughput.samples_per_s, 1),
        "step_time_s": result.throughput.step_time_s,
        "step_time_ci95_s": result.throughput.step_time_ci95_s,
        "cpu_share": round(processor / wall, 3),
        "peak_memory_bytes": result.peak_memory_bytes,
        "noise_scale": result.noise_scale,
        "curve": [
            [row["step"] * size, round(row[metric], 5), round(row["train_time_s"], 5), round(row["train_loss"], 5)]
            for row in context.rows
        ],
    }


def main(work: str, seeds: int) -> Path:
    """Train everything and write the table."""
    torch.set_num_threads(1)
    plan = WORK[work]
    train(work, plan["sizes"][0], "fp32", 99)  # imports, allocators
    runs = []
    for seed in range(seeds):
        order = [(size, precision) for size in plan["sizes"] for precision in PRECISIONS]
        random.Random(seed).shuffle(order)
        for size, precision in order:
            runs.append(train(work, size, precision, seed))
            row = runs[-1]
            print(seed, size, precision, row["status"], row.get("samples_per_s"), flush=True)
    table = {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(torch.device("cpu")),
        "train": plan["train"],
        "target": plan["target"],
        "sizes": plan["sizes"],
        "precisions": list(PRECISIONS),
        "columns": ["samples", *plan["target"], "train_time_s", "train_loss"],
        "note": "times are processor times of one thread; the machine did other work meanwhile",
        "runs": runs,
    }
    path = KEPT / f"ground-truth-{work}.json"
    text = json.dumps(table, indent=1)
    path.write_text(_rows_on_one_line(text) + "\n")
    return path


def _rows_on_one_line(text: str) -> str:
    """JSON whose innermost lists of numbers take a line each."""
    return re.sub(r"\[\s+([-\d.e, \n]+?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)


if __name__ == "__main__":
    chosen = [arg for arg in sys.argv[1:] if arg in WORK] or list(WORK)
    count = int(sys.argv[sys.argv.index("--seeds") + 1]) if "--seeds" in sys.argv else 3
    for name in chosen:
        print(f"kept in {main(name, count)}")
