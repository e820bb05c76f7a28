"""What rank 0 says of a run while it goes on."""

from __future__ import annotations

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
    """The batch arithmetic, the data and the learning rate."""
    workers = f"{context.world_size} worker{'s' if context.world_size > 1 else ''}"
    logger.info(
        "global batch %d = microbatch %d x accumulation %d x %s (%s, %s, %s)",
        config.batch_size,
        parts.microbatch_size,
        parts.accumulation,
        workers,
        context.launcher,
        parts.device,
        parts.spec.name,
    )
    logger.info(
        "%d training samples, %d steps an epoch, %d steps in all; learning rate %g",
        parts.sampler.length,
        parts.sampler.steps_per_epoch,
        parts.total_steps,
        scaled_lr(config),
    )


def say_window(record: Mapping[str, Any], total_steps: int, throughput: Throughput | None) -> None:
    """The mean loss of some steps, as the log has it."""
    speed = f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""
    logger.info(
        "step %d/%d  epoch %.2f  loss %.4f  %s",
        record["step"],
        total_steps,
        record["epoch"],
        record["train_loss"],
        speed,
    )


def say_evaluation(step: int, figures: Mapping[str, float], took_s: float) -> None:
    """The figures of an evaluation."""
    shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
    logger.info("evaluated at step %d in %.2f s: %s", step, took_s, shown)
