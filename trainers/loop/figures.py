"""What a run tells of itself: the windows of its log, its evaluations, and its result."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from trainers.errors import Status, counted
from trainers.loop.attempt import Attempt
from trainers.loop.monitor import Monitor
from trainers.measure.profiler import Inspection
from trainers.measure.ranks import total_energy_j
from trainers.measure.result import RunResult
from trainers.model.optimizer import averaged
from trainers.model.sharding import is_sharded
from trainers.model.strategy import share_buffers, share_tensors
from trainers.step.evaluation import evaluate
from trainers.step.train_step import WEIGHTLESS, Losses

logger = logging.getLogger(__name__)

_OBSERVED = ("mfu", "peak_bytes", "energy_j")


def end_window(attempt: Attempt, monitor: Monitor) -> None:
    """Begin a new window of the log.

    What the steps since the last one were is logged once the device has done them
    (`Attempt.settle`).
    """
    parts = attempt.parts
    clock = attempt.clock
    if attempt.open_steps == 0:
        return
    clock.end_span()
    losses = parts.step.take_losses(attempt.open_steps)
    record: dict[str, Any] = {**attempt.position(), "lr": parts.step.wanted_lrs[0]}
    if attempt.config.changes_batch:
        record["global_batch_size"] = parts.sampler.batches.size(attempt.step - 1)
    attempt.logged_step = attempt.step
    attempt.later.append(
        (
            attempt.step,
            partial(_log_window, attempt, monitor, clock.spans, record, losses),
        )
    )


def _log_window(
    attempt: Attempt,
    monitor: Monitor,
    spans: int,
    record: dict[str, Any],
    read_losses: Callable[[], Losses],
) -> None:
    """Log the mean loss of a window's steps, and tell the terminal and the launcher."""
    parts = attempt.parts
    clock = attempt.clock
    clock.settle(spans)
    taken = read_losses()
    attempt.cut_window = (
        taken if record["step"] % attempt.config.log_every_steps else {}
    )
    _, weightless = taken[WEIGHTLESS]
    if weightless and not attempt.weightless and attempt.context.rank == 0:
        words = "weight() is 0 for all samples of %s up to step %d: nothing is learnt there, and train_loss leaves it out"
        logger.warning(words, counted(weightless, "step"), record["step"])
    attempt.weightless += weightless
    losses = _means(taken)
    loss = losses["train_loss"]
    attempt.metrics |= losses
    record |= {"train_time_s": clock.train_time_s, **losses, **monitor.window()}
    ranks = monitor.compare(attempt.elapsed_s)
    throughput = clock.throughput()
    if throughput is not None:
        figures = {"loss": loss, **asdict(throughput)}
        attempt.context.observe(
            figures | {name: record[name] for name in _OBSERVED if name in record}
        )
    record |= {"ranks": ranks} if ranks else {}
    attempt.tell("train", record)
    if attempt.log is not None:
        attempt.log.add(record)
        attempt.log.show(record["step"])
    if attempt.log is not None and not attempt.context.draws_line:
        done = f"step {record['step']}/{parts.total_steps}"
        if "epoch" in record:
            done += f"  epoch {record['epoch']:.2f}"
        speed = f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""
        logger.info("%s  loss %.4f  %s", done, loss, speed)


def take_first_losses(attempt: Attempt) -> None:
    """Put the mean losses so far among the figures, before the first window ends.

    Every rank must call it.
    """
    if attempt.logged_step == 0 < attempt.step:
        attempt.metrics |= _means(attempt.parts.step.open_losses(attempt.step)())


def _means(losses: Losses) -> dict[str, float]:
    _, weightless = losses[WEIGHTLESS]
    means = {}
    for name, (loss, steps) in losses.items():
        if name != WEIGHTLESS and steps:
            counted_steps = steps - weightless if name == "train_loss" else steps
            means[name] = loss / counted_steps if counted_steps > 0 else math.nan
    return means


def validate(attempt: Attempt) -> dict[str, float]:
    """Evaluate and report; return the figures, none without a validation split.

    Scheduler, task and early stopping are told of them.
    """
    began = time.perf_counter()
    take_first_losses(attempt)
    figures = _figures(attempt)
    if figures:
        attempt.check_names(figures)
    if attempt.parts.schedule is not None:
        attempt.parts.schedule.evaluated(attempt.step, figures)
    attempt.metrics |= figures
    attempt.evaluated_step = attempt.step
    if figures:
        attempt.pauses.evaluated(time.perf_counter() - began)
    if figures and attempt.log is not None:
        attempt.log.add({**attempt.position(), **figures})
    if figures:
        attempt.tell("evaluation", {**figures, "time_s": time.perf_counter() - began})
    if figures and attempt.context.rank == 0:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        logger.info(
            "evaluated at step %d in %.2f s: %s",
            attempt.step,
            time.perf_counter() - began,
            shown,
        )
    attempt.report(None)
    if figures:
        attempt.task.on_evaluate(dict(figures), attempt.step)
    attempt.stopping.take(attempt.step, figures)
    attempt.end_early()
    return figures


def _figures(attempt: Attempt) -> dict[str, float]:
    parts = attempt.parts
    config = attempt.config
    if parts.val_feed is None:
        return {}
    seeds = (config.seed, attempt.step)
    sharded = is_sharded(parts.model)
    in_phase = attempt.watchdog.phase("evaluation", steps=not attempt.compiles)
    with in_phase, averaged(parts.optimizer, parts.ema):
        share_buffers(parts.model, parts.group)
        share_tensors(
            [tensor for tensor in parts.beside.values() if not tensor.requires_grad],
            parts.group,
        )
        return evaluate(
            parts.model,
            attempt.task,
            parts.val_feed,
            config.evaluate.microbatch_size,
            parts.spec,
            parts.group,
            seeds=seeds,
            collective=parts.even and not sharded,
        )


def finish(
    status: Status, attempt: Attempt, monitor: Monitor, inspection: Inspection | None
) -> RunResult:
    """Return the result, the same on every rank; rank 0 writes it.

    Every rank must call it.
    """
    config = attempt.config
    context = attempt.context
    parts = attempt.parts
    clock = attempt.clock
    group = parts.group
    speed = clock.throughput()
    ranks = monitor.finish()
    attempt.watchdog.enter("closing")
    compiled = inspection.compiled() if inspection is not None else None
    mfu = monitor.mfu(speed.samples_per_s) if speed is not None else None
    phases = attempt.watchdog.spent_s
    of_rank_0 = group.first(
        (speed, clock.first_step_s, parts.flops_per_sample, mfu, compiled, phases)
    )
    throughput, first_step_s, flops_per_sample, mfu, compiled, phases = of_rank_0
    result = RunResult(
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
        throughput=throughput,
        metrics={
            name: value
            for name, value in attempt.metrics.items()
            if not math.isnan(value)
        },
        checkpoint=attempt.checkpoint,
        message=attempt.stopping.words or "",
        first_step_s=first_step_s,
        compile=compiled,
        cuda_graphs=parts.step.capture,
        flops_per_sample=flops_per_sample,
        mfu=mfu,
        ranks=ranks,
        samples=attempt.samples,
        earlier_time_s=attempt.earlier_time_s,
        energy_j=total_energy_j(ranks),
        pauses=attempt.pauses,
        phases_s=dict(phases),
        warnings=parts.warnings,
    )
    if attempt.log is not None and context.storage is not None:
        attempt.log.flush(attempt.step)
        context.storage.write("result.json", result.to_json().encode())
    group.barrier()
    return result
