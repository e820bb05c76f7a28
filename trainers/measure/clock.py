"""Step times of a run, and its throughput after warm-up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from trainers.devices.device import synchronize
from trainers.measure.figures import StepTimes, Throughput

WARMUP_STEPS = 5
"""Number of steps at a launch's start that throughput leaves out if more steps
follow: allocation, autotuning, compilation and first touches of memory slow
them.
"""


@dataclass
class Totals:
    """What a clock has counted since this launch began."""

    steps: int = 0
    samples: int = 0
    """Samples of all ranks."""
    own_samples: int = 0
    """Samples of this rank."""
    idle_steps: int = 0
    """Steps in which this rank had no samples."""
    time_s: float = 0.0
    wait_s: float = 0.0
    """Time spent waiting for batches."""

    def __sub__(self, earlier: Totals) -> Totals:
        between = Totals()
        for field in fields(self):
            then = getattr(earlier, field.name)
            setattr(between, field.name, getattr(self, field.name) - then)
        return between


class StepClock:
    """Times every step: by the host's clock on a CPU, by spans of steps elsewhere.

    A span is the time from `start_span` to `end_span`, shared evenly by the
    steps in it. On CUDA both ends are events: nothing waits for them before
    `settle`, and until then no figure includes the span. On a CPU every step
    is one span.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.train_time_s = 0.0
        self.running = False
        self.counting = True
        """Whether steps count towards the throughput; false while a profiler
        slows them.
        """
        self.first_step_s: float | None = None
        """Time of this launch's first step, which compiles, tunes and allocates."""
        self._times = StepTimes()
        self._counted = Totals()
        self._wait_s = self._measured_wait_s = 0.0
        self._open: list[int] = []
        self._began: Any = 0.0
        self._ended: deque[tuple[Any, Any, list[int], float, bool]] = deque()
        self.spans = 0
        """Number of spans that have ended."""

    def start_span(self) -> None:
        """Begin a span."""
        self._open = []
        self.running = True
        self._began = self._now()

    def _now(self) -> Any:
        """Return an event on CUDA; else synchronize and return the time in s."""
        if self.device.type == "cuda":
            return torch.cuda.current_stream(self.device).record_event(
                torch.cuda.Event(enable_timing=True)
            )
        synchronize(self.device)
        return time.perf_counter()

    def step(self, samples: int, own_samples: int | None = None) -> None:
        """Count an issued step of `samples` samples over all ranks.

        `own_samples` (default: all) are on this rank.
        """
        self._open.append(samples)
        if self.counting:
            own = samples if own_samples is None else own_samples
            self._counted.own_samples += own
            self._counted.idle_steps += own == 0
        if self.device.type == "cpu" or self.first_step_s is None:
            self.end_span()
            self.start_span()

    def end_span(self) -> None:
        """End the span of the steps issued since `start_span`.

        What follows is not training time. On CUDA this waits only for the
        first step.
        """
        self.running = False
        if not self._open:
            return
        self._ended.append(
            (self._began, self._now(), self._open, self._wait_s, self.counting)
        )
        self.spans += 1
        self._wait_s = 0.0
        self._open = []
        if self.device.type != "cuda" or self.first_step_s is None:
            self.settle(self.spans)

    def settle(self, spans: int) -> None:
        """Add the first `spans` spans to the figures; waits for the device."""
        while self._ended and self.spans - len(self._ended) < spans:
            began, ended, samples, wait_s, counting = self._ended.popleft()
            if self.device.type == "cuda":
                ended.synchronize()
                elapsed = began.elapsed_time(ended) / 1e3
            else:
                elapsed = ended - began
            self.train_time_s += elapsed
            if self.first_step_s is None:
                self.first_step_s = elapsed
            if counting:
                self._times.add(elapsed, samples, wait_s)
                self._counted.steps += len(samples)
                self._counted.samples += sum(samples)
                self._counted.time_s += elapsed
                self._counted.wait_s += wait_s
                if len(self._times) > WARMUP_STEPS:
                    self._measured_wait_s += wait_s

    def leave_out(self) -> None:
        """Exclude the last step from the throughput, with all steps of its span.

        Call it for a step that a recompilation or extra passes slowed.
        """
        spoilt = len(self._open) or 1
        if self._open:
            self.end_span()
            self.start_span()
        self.settle(self.spans)
        if self.counting:
            self._times.cut(max(WARMUP_STEPS, len(self._times) - spoilt))

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and count the time until each arrives as waiting."""
        began = time.perf_counter()
        for batch in batches:
            self._wait_s += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def totals(self) -> Totals:
        """Return what was counted up to the last settled span."""
        return replace(self._counted)

    def throughput(self) -> Throughput | None:
        """Return figures over the steps after warm-up; None before any step.

        If there are only warm-up steps, the figures cover these.
        """
        times = self._times
        skip = WARMUP_STEPS if len(times) > WARMUP_STEPS else 0
        steps = len(times) - skip
        total_s = times.total_s(skip)
        if not steps or total_s <= 0:
            return None
        disturbed_s = times.disturbed_s(skip)
        usual_s = total_s - disturbed_s
        return Throughput(
            samples_per_s=times.samples(skip) / usual_s,
            step_time_s=usual_s / steps,
            step_time_ci95_s=times.half_width_s(skip),
            data_wait_share=min(1.0, self._measured_wait_s / usual_s)
            if skip
            else 0.0,
            steps=steps,
            disturbed_s=disturbed_s,
        )
