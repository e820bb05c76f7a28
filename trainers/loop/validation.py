"""An evaluation amid training, and what follows from its figures."""

import logging
import time

from trainers.loop.attempt import Attempt
from trainers.model.optimizer import averaged
from trainers.model.sharding import is_sharded
from trainers.model.strategy import share_buffers
from trainers.step.evaluation import evaluate

logger = logging.getLogger(__name__)


def validate(attempt: Attempt) -> dict[str, float]:
    """Evaluate, where there is a validation split, and report; return the figures, none without that split.

    Scheduler, task and early stopping are told of them.
    """
    began = time.perf_counter()
    figures = _figures(attempt)
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
        logger.info("evaluated at step %d in %.2f s: %s", attempt.step, time.perf_counter() - began, shown)
    attempt.report(None)
    if figures:
        attempt.task.on_evaluate(dict(figures), attempt.step)
    attempt.stopping.take(attempt.step, figures)
    attempt.end_early()
    return figures


def _figures(attempt: Attempt) -> dict[str, float]:
    parts, config = attempt.parts, attempt.config
    if parts.val_feed is None:
        return {}
    seeds, sharded = (config.seed, attempt.step), is_sharded(parts.model)
    in_phase = attempt.watchdog.phase("evaluation", steps=not attempt.compiles)
    with in_phase, averaged(parts.optimizer, parts.ema):
        share_buffers(parts.model, parts.group)
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
