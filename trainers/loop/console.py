"""The lines that rank 0 logs while a run goes on."""

import logging
from collections.abc import Mapping
from typing import Any

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.measure.clock import Throughput
from trainers.model.optimizer import scaled_lr
from trainers.step.replica import Replica

logger = logging.getLogger(__name__)


def say_start(parts: Replica, config: TrainConfig, context: RunContext) -> None:
    """Log the batch arithmetic, the data and the learning rate."""
    workers = f"{context.world_size} worker{'s' if context.world_size > 1 else ''}"
    batch = f"global batch {config.batch_size} = microbatch {parts.microbatch_size} x accumulation {parts.accumulation}"
    logger.info("%s x %s (%s, %s, %s)", batch, workers, context.launcher, parts.device, parts.spec.name)
    steps = f"{parts.sampler.steps_per_epoch} steps an epoch, {parts.total_steps} steps in all"
    logger.info("%d training samples, %s; learning rate %g", parts.sampler.length, steps, scaled_lr(config))


def say_window(record: Mapping[str, Any], total_steps: int, throughput: Throughput | None) -> None:
    """Log the mean loss of the steps of a window."""
    speed = f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""
    step, epoch, loss = record["step"], record["epoch"], record["train_loss"]
    logger.info("step %d/%d  epoch %.2f  loss %.4f  %s", step, total_steps, epoch, loss, speed)


def say_evaluation(step: int, figures: Mapping[str, float], took_s: float) -> None:
    """Log the metrics of an evaluation."""
    shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
    logger.info("evaluated at step %d in %.2f s: %s", step, took_s, shown)
