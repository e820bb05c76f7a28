"""Figures of a run: step times and throughput after warm-up, and the log that is kept with the run."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trainers.device import synchronize
from trainers.errors import Status
from trainers.storage import Storage

WARMUP_STEPS = 5
"""Steps at the start of a run that no throughput counts: allocation, autotuning, compilation, first-touch."""


@dataclass(frozen=True)
class Throughput:
    """Training speed after warm-up, evaluation and checkpoints left out."""

    samples_per_s: float
    """Global samples over training time."""
    step_time_s: float
    """Mean time of a step."""
    step_time_ci95_s: float
    """Half width of the 95 % confidence interval of that mean (normal approximation)."""
    data_wait_share: float
    """Share of the time that rank 0 waited for batches."""
    steps: int
    """Steps measured."""


class StepClock:
    """Times every step: by the host's clock on a CPU, by the spans between synchronisations elsewhere.

    A span is the time from `start_span` to `end_span`, both of which wait for the device; the steps in it share it
    evenly. On a CPU every step is its own span, at no cost.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.train_time_s = 0.0
        self.running = False
        self._times: list[float] = []
        self._samples: list[int] = []
        self._wait_s = 0.0
        self._measured_wait_s = 0.0
        self._open: list[int] = []
        self._began = 0.0

    def start_span(self) -> None:
        """Begin to measure; waits for the device."""
        synchronize(self.device)
        self._open.clear()
        self.running = True
        self._began = time.perf_counter()

    def step(self, samples: int) -> None:
        """A step of `samples` global samples was issued."""
        self._open.append(samples)
        if self.device.type == "cpu":
            self.end_span()
            self.start_span()

    def end_span(self) -> None:
        """The steps since `start_span` are done; waits for the device. What follows is not training time."""
        self.running = False
        if not self._open:
            return
        synchronize(self.device)
        elapsed = time.perf_counter() - self._began
        self.train_time_s += elapsed
        self._times += [elapsed / len(self._open)] * len(self._open)
        self._samples += self._open
        if len(self._times) > WARMUP_STEPS:
            self._measured_wait_s += self._wait_s
        self._wait_s = 0.0
        self._open.clear()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the time until each of them is there counts as waiting for data."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._wait_s += time.perf_counter() - began
            yield batch

    def throughput(self) -> Throughput | None:
        """Figures over the steps after warm-up (over all of them when there are no more); None before any."""
        skip = WARMUP_STEPS if len(self._times) > WARMUP_STEPS else 0
        times, samples = self._times[skip:], self._samples[skip:]
        total_s = sum(times)
        if not times or total_s <= 0:
            return None
        spread = statistics.stdev(times) / math.sqrt(len(times)) if len(times) > 1 else 0.0
        return Throughput(
            samples_per_s=sum(samples) / total_s,
            step_time_s=total_s / len(times),
            step_time_ci95_s=1.96 * spread,
            data_wait_share=min(1.0, self._measured_wait_s / total_s) if skip else 0.0,
            steps=len(times),
        )


class RunLog:
    """The run's records: parts `log/<step>.jsonl` that each end at a flush, so object stores need no append."""

    def __init__(self, run: Storage) -> None:
        self._storage = run.child("log")
        self._open: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any]) -> None:
        """Remember one record."""
        self._open.append(record)

    def flush(self, step: int) -> None:
        """Write what was remembered, as the part that ends at `step`."""
        if self._open:
            name = f"{step:012d}.jsonl"
            before = self._storage.read(name) if self._storage.exists(name) else b""
            text = "".join(json.dumps(record) + "\n" for record in self._open)
            self._storage.write(name, before + text.encode())
            self._open.clear()

    def cut(self, step: int) -> None:
        """Drop the parts that end after `step`: the run resumes there and will write them again."""
        for name in self._storage.names():
            if name.endswith(".jsonl") and int(name.removesuffix(".jsonl")) > step:
                self._storage.delete(name)


def read_log(run: Storage) -> list[dict[str, Any]]:
    """All records of a run, in order."""
    storage = run.child("log")
    parts = [storage.read(name) for name in storage.names() if name.endswith(".jsonl")]
    return [json.loads(line) for part in parts for line in part.decode().splitlines()]


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `result.json` beside its checkpoints."""

    status: Status
    steps: int
    epochs: float
    """Epochs done, with the part of the last one."""
    world_size: int
    global_batch_size: int
    microbatch_size: int
    accumulation: int
    """Microbatches of one step on the busiest rank."""
    train_time_s: float
    """Time in training steps; evaluation, checkpoints and start left out."""
    wall_time_s: float
    """Time of this launch from the loop's start to its end."""
    peak_memory_bytes: int
    """Largest over ranks: allocated on a GPU, resident on a CPU."""
    throughput: Throughput | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each: train_loss, val_loss, val_accuracy, ..."""
    checkpoint: str | None = None
    """Where the newest checkpoint is."""
    message: str = ""

    def to_json(self) -> str:
        """As `result.json` has it."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: bytes) -> RunResult:
        """Read `result.json`."""
        tree = json.loads(text)
        speed = tree.pop("throughput")
        return RunResult(throughput=Throughput(**speed) if speed else None, **tree)
