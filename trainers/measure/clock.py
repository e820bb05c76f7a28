"""Figures of a run: step times and throughput after warm-up, and the log that is kept with the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from trainers.devices.device import synchronize
from trainers.errors import Status
from trainers.measure.ranks import RankFigures
from trainers.measure.sinks import encode_events, events_name
from trainers.measure.step_times import STRETCHES, StepTimes
from trainers.storage import Storage

WARMUP_STEPS = 5
"""Steps at the start of a run that no throughput counts: allocation, autotuning, compilation, first-touch."""
SETTLED = 0.02
"""Of the mean step time: the half width of its interval from which on it counts as measured."""


@dataclass(frozen=True)
class Throughput:
    """Training speed after warm-up, evaluation and checkpoints left out."""

    samples_per_s: float
    """Global samples over training time."""
    step_time_s: float
    """Mean time of a step."""
    step_time_ci95_s: float
    """Half width of the 95 % confidence interval of that mean: from the means of up to 30 stretches of steps, because
    neighbouring steps are slow or fast together."""
    data_wait_share: float
    """Share of the time that rank 0 waited for batches."""
    steps: int
    """Steps measured."""
    step_time_stdev_s: float = 0.0
    """Spread of single steps (on a GPU, of the means of steps that nobody waited between)."""
    settled: bool = False
    """Whether that interval is within 2 % of the mean: more steps would say little more."""


@dataclass(frozen=True)
class Totals:
    """What a clock has counted since this launch began; two of them subtract to what lies between."""

    steps: int = 0
    samples: int = 0
    """Of all ranks."""
    own_samples: int = 0
    """Of this rank."""
    idle_steps: int = 0
    """Steps in which this rank had no sample."""
    time_s: float = 0.0
    wait_s: float = 0.0
    """Until batches were there."""

    def __sub__(self, earlier: Totals) -> Totals:
        return Totals(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


class StepClock:
    """Times every step: by the host's clock on a CPU, by the spans between synchronisations elsewhere.

    A span is the time from `start_span` to `end_span`, both of which wait for the device; the steps in it share it
    evenly. On a CPU every step is its own span, at no cost.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.train_time_s = 0.0
        self.running = False
        self.counting = True
        """Whether steps count into the throughput: not those that a profiler slows."""
        self.first_step_s: float | None = None
        """Time of this launch's first step, which compiles, tunes and allocates."""
        self._times = StepTimes()
        self._wait_s = 0.0
        self._measured_wait_s = 0.0
        self._counted_s = self._counted_wait_s = 0.0
        self._counted_steps = self._counted_samples = self._own_samples = self._idle_steps = 0
        self._open: list[int] = []
        self._began = 0.0

    def start_span(self) -> None:
        """Begin to measure; waits for the device."""
        synchronize(self.device)
        self._open.clear()
        self.running = True
        self._began = time.perf_counter()

    def step(self, samples: int, own_samples: int | None = None) -> None:
        """A step of `samples` global samples was issued, `own_samples` (all, when not given) of them on this rank."""
        self._open.append(samples)
        if self.counting:
            own = samples if own_samples is None else own_samples
            self._own_samples += own
            self._idle_steps += own == 0
        if self.device.type == "cpu" or self.first_step_s is None:
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
        if self.first_step_s is None:
            self.first_step_s = elapsed
        if self.counting:
            self._times.add(elapsed, self._open)
            self._counted_steps += len(self._open)
            self._counted_samples += sum(self._open)
            self._counted_s += elapsed
            self._counted_wait_s += self._wait_s
            if len(self._times) > WARMUP_STEPS:
                self._measured_wait_s += self._wait_s
        self._wait_s = 0.0
        self._open.clear()

    def leave_out(self) -> None:
        """The last step compiled a graph again: it and those that share its span do not count into the throughput."""
        spoilt = len(self._open) or 1
        if self._open:
            self.end_span()
            self.start_span()
        if self.counting:
            self._times.cut(max(WARMUP_STEPS, len(self._times) - spoilt))

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

    def totals(self) -> Totals:
        """All that was counted until the last `end_span`."""
        return Totals(
            self._counted_steps,
            self._counted_samples,
            self._own_samples,
            self._idle_steps,
            self._counted_s,
            self._counted_wait_s,
        )

    def throughput(self) -> Throughput | None:
        """Figures over the steps after warm-up (over all of them when there are no more); None before any."""
        times = self._times
        skip = WARMUP_STEPS if len(times) > WARMUP_STEPS else 0
        steps, total_s = len(times) - skip, times.total_s(skip)
        if not steps or total_s <= 0:
            return None
        mean_s, half_s = total_s / steps, times.half_width_s(skip)
        return Throughput(
            samples_per_s=times.samples(skip) / total_s,
            step_time_s=mean_s,
            step_time_ci95_s=half_s,
            data_wait_share=min(1.0, self._measured_wait_s / total_s) if skip else 0.0,
            steps=steps,
            step_time_stdev_s=times.stdev_s(skip),
            settled=steps >= STRETCHES and half_s <= SETTLED * mean_s,
        )


class RunLog:
    """The run's records: parts `log/<step>.jsonl` that each end at a flush, so object stores need no append.

    With `tensorboard` the same parts go to `tensorboard/` as events.
    """

    def __init__(self, run: Storage, tensorboard: bool = False) -> None:
        self._storage = run.child("log")
        self._events = run.child("tensorboard") if tensorboard else None
        self._open: list[tuple[float, dict[str, Any]]] = []

    def add(self, record: dict[str, Any]) -> None:
        """Remember one record."""
        self._open.append((time.time(), record))

    def flush(self, step: int) -> None:
        """Write what was remembered, as the part that ends at `step`."""
        self.part(step)()

    def part(self, step: int) -> Callable[[], None]:
        """Take what was remembered; the function writes it, on any thread, as the part that ends at `step`."""
        taken, self._open = self._open, []

        def write() -> None:
            if taken:
                text = "".join(json.dumps(record) + "\n" for _, record in taken)
                _extend(self._storage, f"{step:012d}.jsonl", text.encode())
                if self._events is not None:
                    _extend(self._events, events_name(step), encode_events(taken))

        return write

    def cut(self, step: int) -> None:
        """Drop the parts that end after `step`: the run resumes there and will write them again."""
        for name in self._storage.names():
            if name.endswith(".jsonl") and int(name.removesuffix(".jsonl")) > step:
                self._storage.delete(name)
        if self._events is not None:
            for name in self._events.names():
                if name > events_name(step):
                    self._events.delete(name)


def _extend(storage: Storage, name: str, data: bytes) -> None:
    before = storage.read(name) if storage.exists(name) else b""
    storage.write(name, before + data)


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
    first_step_s: float | None = None
    """Time of this launch's first step on rank 0, with the compilation of forward and backward."""
    compile: dict[str, int] | None = None
    """Of rank 0, with compile: graphs, graph_breaks (places), recompiles."""

    flops_per_sample: float | None = None
    """Of the forward and backward pass (trainers/step/flops.py)."""
    mfu: float | None = None
    """Model FLOPs utilisation of all workers, 0 to 1; None where the device's peak is not known."""
    ranks: list[RankFigures] = field(default_factory=list)
    """Every rank after warm-up, side by side (trainers/measure/ranks.py)."""
    noise_scale: dict[str, float | None] | None = None
    """With `noise_scale: true`, of this launch: `value` in samples, and `low` and `high` of 95 %; None is infinite."""

    def to_json(self) -> str:
        """As `result.json` has it."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: bytes) -> RunResult:
        """Read `result.json`."""
        tree = json.loads(text)
        speed = tree.pop("throughput")
        return RunResult(throughput=Throughput(**speed) if speed else None, **tree)
