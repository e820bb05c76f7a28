"""The log window: the figures of the steps between two lines of a run's log."""

import logging
from dataclasses import asdict
from typing import Any

from trainers.loop.attempt import Attempt
from trainers.loop.monitor import Monitor

logger = logging.getLogger(__name__)

_OBSERVED = ("mfu", "peak_bytes", "energy_j")


def end_window(attempt: Attempt, monitor: Monitor) -> None:
    """Log the mean loss of the steps since the last window, and tell the terminal and the launcher."""
    parts, clock = attempt.parts, attempt.clock
    steps = attempt.step - attempt.logged_step
    if steps == 0:
        return
    clock.end_span()
    loss = parts.step.take_loss() / steps
    losses = {"train_loss": loss, **parts.step.phase_losses}
    attempt.metrics |= losses
    attempt.logged_step = attempt.step
    parts.step.check_lr()
    lr = float(parts.optimizer.param_groups[0]["lr"])
    record: dict[str, Any] = {**attempt.position(), "lr": lr, **losses, **monitor.window()}
    if attempt.config.changes_batch:
        record["global_batch_size"] = parts.sampler.batches.size(attempt.step - 1)
    noise = parts.step.noise
    if noise is not None and (noise_scale := noise.take()) is not None:
        attempt.metrics["noise_scale"] = record["noise_scale"] = noise_scale
    ranks = monitor.compare(attempt.elapsed_s)
    throughput = clock.throughput()
    if throughput is not None:
        figures = {"loss": loss, "progress": attempt.progress, **asdict(throughput)}
        attempt.context.observe(figures | {name: record[name] for name in _OBSERVED if name in record})
    record |= {"ranks": ranks} if ranks else {}
    attempt.tell("train", record)
    if attempt.log is not None:
        attempt.log.add(record)
        attempt.log.show(attempt.step)
    if attempt.log is not None and not attempt.context.draws_line:
        done = f"step {attempt.step}/{parts.total_steps}"
        if attempt.epochs is not None:
            done += f"  epoch {attempt.epochs:.2f}"
        speed = f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""
        logger.info("%s  loss %.4f  %s", done, loss, speed)
