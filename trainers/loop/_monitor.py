"""What a run measures and reports: windows of its log, evaluations, its result.

Nothing here waits for the device within a step; figures are read when a window
is logged.
"""

import logging
import math
import socket
import time
from dataclasses import asdict
from typing import Any

from torch.nn.parallel import DataParallel

from trainers.devices.device import GpuReadings, device_name, memory_figures
from trainers.errors import Status, counted, in_digits
from trainers.loop._attempt import Attempt
from trainers.measure.clock import WARMUP_STEPS, StepClock, Totals
from trainers.measure.figures import RankFigures, findings
from trainers.measure.profiler import Inspection
from trainers.measure.result import RunResult
from trainers.model.optimizer import averaged
from trainers.model.sharding import is_sharded
from trainers.model.strategy import share_tensors
from trainers.step.evaluation import evaluate
from trainers.step.flops import device_peak, utilisation
from trainers.step.train_step import WEIGHTLESS, Losses, Replica

logger = logging.getLogger(__name__)

COMPARE_EVERY_S = 10.0
"""Seconds between two gathers of all ranks' figures during training."""
_MEMORY_EVERY_S = 1.0  # a reading takes 0.1 ms, and a window may be one step
_OBSERVED = ("mfu", "peak_bytes")


class Monitor:
    """Measures speed, memory, GPU and MFU per window and run, and compares ranks."""

    def __init__(self, parts: Replica, clock: StepClock) -> None:
        self.device = parts.device
        self.group = parts.group
        self.clock = clock
        self.flops_per_sample = parts.flops_per_sample
        called = parts.step.forward.model
        self.peak = device_peak(self.device, parts.spec.name)
        if isinstance(called, DataParallel) and self.peak is not None:
            self.peak *= len(called.device_ids)
        if (
            self.peak is None
            and self.device.type == "cuda"
            and self.group.rank == 0
        ):
            logger.info(
                "the peak FLOP/s of %s in %s is not known: MFU is left out",
                device_name(self.device),
                parts.spec.name,
            )
        self._gpu = GpuReadings(self.device)
        self._warm: Totals | None = None
        self._window = self._compared = Totals()
        self._compared_s = 0.0
        self._memory_s = float("-inf")
        self._latest: dict[str, Any] | None = None
        self._said: set[str] = set()

    def window(self) -> dict[str, float]:
        """Return the ending window's figures, from the steps that the clock has settled.

        The figures are the global speed, the step time, this rank's share of
        time spent waiting for data, MFU if it is known and, at most once a
        second, memory.
        """
        now = self.clock.totals()
        spent = now - self._window
        self._window = now
        if self._warm is None and now.steps >= WARMUP_STEPS:
            self._warm = now
        self._gpu.sample()
        found: dict[str, float] = {}
        if time.monotonic() - self._memory_s >= _MEMORY_EVERY_S:
            self._memory_s = time.monotonic()
            found |= memory_figures(self.device)
            del found["total_bytes"]
        if spent.time_s > 0:
            found["samples_per_s"] = spent.samples / spent.time_s
            found["step_time_s"] = spent.time_s / spent.steps
            found["data_wait_share"] = min(1.0, spent.wait_s / spent.time_s)
            mfu = self.mfu(found["samples_per_s"])
            if mfu is not None:
                found["mfu"] = mfu
        return found

    def mfu(self, samples_per_s: float) -> float | None:
        """Return MFU at this speed; None if FLOPs or peak are unknown."""
        return utilisation(
            self.flops_per_sample,
            samples_per_s,
            self.group.world_size,
            self.peak,
        )

    def compare(self, elapsed_s: float) -> list[RankFigures] | None:
        """Return each rank's figures since the last comparison, or None.

        Returns None if there is only one rank, or if the last comparison was
        less than ten seconds ago.

        `elapsed_s` must be equal on all ranks, and every rank must call this
        method equally often, because it may be a collective. Rank 0 logs each
        finding once, as a warning.
        """
        if (
            self.group.world_size == 1
            or elapsed_s - self._compared_s < COMPARE_EVERY_S
        ):
            return None
        self._compared_s = elapsed_s
        now = self.clock.totals()
        spent = now - self._compared
        self._compared = now
        return self._gather(spent)

    def finish(self) -> list[RankFigures]:
        """Return each rank's figures over this whole launch.

        Warm-up is left out if any steps follow it.

        Every rank must call it.
        """
        spent = self.clock.totals()
        if self._warm is not None and spent.steps > self._warm.steps:
            spent -= self._warm
        return self._gather(spent)

    def close(self) -> None:
        """Release NVML."""
        self._gpu.close()

    def _gather(self, spent: Totals) -> list[RankFigures]:
        memory = memory_figures(self.device)
        self._latest = self._gpu.take() or self._latest
        time_s = max(spent.time_s, 1e-9)
        steps = max(spent.steps, 1)
        row: RankFigures = {
            "rank": self.group.rank,
            "host": socket.gethostname(),
            "device": str(self.device),
            "steps": spent.steps,
            "train_time_s": spent.time_s,
            "samples_per_s": spent.own_samples / time_s,
            "step_time_s": spent.time_s / steps,
            "data_wait_share": min(1.0, spent.wait_s / time_s),
            "idle_share": spent.idle_steps / steps,
            "allocated_bytes": memory.get("allocated_bytes", 0),
            "reserved_bytes": memory.get("reserved_bytes", 0),
            "peak_bytes": memory["peak_bytes"],
            "total_bytes": memory["total_bytes"],
            "gpu": self._latest,
        }
        rows = self.group.gather(row)
        found = findings(rows) if self.group.rank == 0 else ()
        for key, words in found:
            if key not in self._said:
                self._said.add(key)
                logger.warning("ranks: %s", words)
        return rows


def end_window(attempt: Attempt, monitor: Monitor) -> None:
    """End a window of the log and begin the next one.

    The window's figures are logged once the device has finished the window's
    steps (`Attempt.settle`).
    """
    parts = attempt.parts
    clock = attempt.clock
    if attempt.open_steps == 0:
        return
    clock.end_span()
    losses = parts.step.take_losses(attempt.open_steps)
    record: dict[str, Any] = {
        **attempt.position(),
        "lr": parts.step.wanted_lrs[0],
    }
    if attempt.config.changes_batch:
        record["global_batch_size"] = parts.sampler.batches.size(
            attempt.step - 1
        )
    attempt.logged_step = attempt.step
    spans = clock.spans

    def log() -> None:
        clock.settle(spans)
        _log_window(attempt, monitor, record, losses())

    attempt.later.append((attempt.step, log))


def _log_window(
    attempt: Attempt, monitor: Monitor, record: dict[str, Any], taken: Losses
) -> None:
    """Log a window's mean losses, and report them to the terminal and the launcher."""
    clock = attempt.clock
    is_cut = record["step"] % attempt.config.log_every_steps
    attempt.cut_window = taken if is_cut else {}
    _, weightless = taken[WEIGHTLESS]
    if weightless and not attempt.weightless and attempt.context.rank == 0:
        logger.warning(
            "weight() is 0 for all samples of %s up to step %d: such steps train nothing, and train_loss leaves them out",
            counted(weightless, "step"),
            record["step"],
        )
    attempt.weightless += weightless
    losses = _means(taken)
    loss = losses["train_loss"]
    attempt.metrics |= losses
    record |= {
        "train_time_s": clock.train_time_s,
        **losses,
        **monitor.window(),
    }
    ranks = monitor.compare(attempt.elapsed_s)
    throughput = clock.throughput()
    if throughput is not None:
        seen = {name: record[name] for name in _OBSERVED if name in record}
        attempt.context.observe({"loss": loss, **asdict(throughput), **seen})
    if ranks:
        record["ranks"] = ranks
    attempt.tell("train", record)
    if attempt.log is None:
        return
    attempt.log.add(record)
    attempt.log.show(record["step"])
    if not attempt.context.draws_line:
        done = f"step {record['step']}/{attempt.parts.total_steps}"
        if "epoch" in record:
            done += f"  epoch {record['epoch']:.2f}"
        speed = (
            f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""
        )
        logger.info("%s  loss %s  %s", done, in_digits(loss), speed)


def take_first_losses(attempt: Attempt) -> None:
    """Before the first window ends, add the mean losses so far to the metrics.

    Every rank must call it.
    """
    if attempt.logged_step == 0 < attempt.step:
        attempt.metrics |= _means(
            attempt.parts.step.open_losses(attempt.step)()
        )


def _means(losses: Losses) -> dict[str, float]:
    _, weightless = losses[WEIGHTLESS]
    means = {}
    for name, (loss, steps) in losses.items():
        if name != WEIGHTLESS and steps:
            counted_steps = (
                steps - weightless if name == "train_loss" else steps
            )
            means[name] = (
                loss / counted_steps if counted_steps > 0 else math.nan
            )
    return means


def validate(attempt: Attempt) -> dict[str, float]:
    """Evaluate and report; return the figures, or none without a validation split.

    Scheduler, task and early stopping receive the figures.
    """
    began = time.perf_counter()
    take_first_losses(attempt)
    figures = _figures(attempt)
    step = attempt.step
    if figures:
        attempt.check_names(figures)
    if attempt.parts.schedule is not None:
        attempt.parts.schedule.evaluated(step, figures)
    attempt.metrics |= figures
    attempt.evaluated_step = step
    if figures:
        time_s = time.perf_counter() - began
        attempt.pauses.evaluated(time_s)
        if attempt.log is not None:
            attempt.log.add({**attempt.position(), **figures})
        attempt.tell("evaluation", {**figures, "time_s": time_s})
        if attempt.context.rank == 0:
            shown = "  ".join(
                f"{name} {in_digits(value)}" for name, value in figures.items()
            )
            logger.info(
                "evaluated at step %d in %.2f s: %s", step, time_s, shown
            )
    attempt.report(None)
    if figures:
        attempt.task.on_evaluate(dict(figures), step)
    attempt.stopping.take(step, figures)
    attempt.end_early()
    return figures


def _figures(attempt: Attempt) -> dict[str, float]:
    parts = attempt.parts
    if parts.val_feed is None:
        return {}
    frozen = [
        tensor for tensor in parts.beside.values() if not tensor.requires_grad
    ]
    in_phase = attempt.watchdog.phase("evaluation", steps=not attempt.compiles)
    with in_phase, averaged(parts.optimizer, parts.ema):
        share_tensors([*parts.model.buffers(), *frozen], parts.group)
        return evaluate(
            parts.forward,
            parts.val_feed,
            attempt.config.evaluate.microbatch_size,
            parts.group,
            seeds=(attempt.config.seed, attempt.step),
            collective=parts.even and not is_sharded(parts.model),
        )


def finish(
    status: Status,
    attempt: Attempt,
    monitor: Monitor,
    inspection: Inspection | None,
) -> RunResult:
    """Return the run's result, the same on every rank; rank 0 also writes it.

    Every rank must call it.
    """
    config = attempt.config
    context = attempt.context
    parts = attempt.parts
    clock = attempt.clock
    speed = clock.throughput()
    ranks = monitor.finish()
    attempt.watchdog.enter("closing")
    of_rank_0: dict[str, Any] = {
        "throughput": speed,
        "first_step_s": clock.first_step_s,
        "flops_per_sample": parts.flops_per_sample,
        "mfu": monitor.mfu(speed.samples_per_s) if speed is not None else None,
        "compile": inspection.compiled() if inspection is not None else None,
        "phases_s": dict(attempt.watchdog.spent_s),
    }
    undefined = [
        name for name, value in attempt.metrics.items() if math.isnan(value)
    ]
    result = RunResult(
        **parts.group.first(of_rank_0),
        status=status,
        steps=attempt.step,
        epochs=attempt.epochs,
        world_size=context.world_size,
        global_batch_size=config.batch_size,
        microbatch_size=parts.microbatch_size,
        accumulation=parts.accumulation,
        train_time_s=clock.train_time_s,
        wall_time_s=time.monotonic() - attempt.began,
        peak_memory_bytes=max(row["peak_bytes"] for row in ranks),
        metrics={
            name: value
            for name, value in attempt.metrics.items()
            if name not in undefined
        },
        checkpoint=attempt.checkpoint,
        message=attempt.stopping.words or "",
        cuda_graphs=parts.step.capture,
        ranks=ranks,
        samples=attempt.samples,
        earlier_time_s=attempt.earlier_time_s,
        pauses=attempt.pauses,
        warnings=[
            *parts.warnings,
            *(f"{name} is not a number" for name in undefined),
        ],
    )
    if attempt.log is not None and context.storage is not None:
        attempt.log.flush(attempt.step)
        context.storage.write("result.json", result.to_json().encode())
    parts.group.barrier()
    return result
