"""Train one worker's run: the same `fit` in a test, under torchrun, Ray, and in a lane.

build     device, seed, data, model, optimizer; the microbatch that fits (build.py)
train     from the newest complete checkpoint on (training.py)
again     both, with a smaller microbatch, where training runs out of memory
"""

import contextlib
import copy
import gc
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainers.config import TrainConfig
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.errors import ConfigError, TooLargeError
from trainers.loop.attempt import Attempt
from trainers.loop.build import build_replica
from trainers.loop.training import Training
from trainers.loop.watchdog import Watchdog, watched
from trainers.measure.profiler import inspect_run, memory_watched
from trainers.measure.result import RunResult
from trainers.step.ceiling import next_smaller
from trainers.task import Task

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 6e5  # the store's ends at 24 days
_DOUBLE_BACKWARD = "does not currently support double backward"  # aot_autograd's words


def fit(task: Task, config: TrainConfig, context: RunContext) -> RunResult:
    """Train the run that `config` describes on this worker.

    Every rank must call it; the result is rank-equal.

    A single worker that runs out of memory in mid-training goes on from its newest
    checkpoint with a smaller microbatch; of several workers the launcher starts the
    group again. Raises ConfigError (a value that only the device or the data could
    refute), DivergedError, PreemptedError, TooLargeError, StorageError,
    CheckpointError, torch.OutOfMemoryError, and whatever the task raises.
    """
    config = config.with_global_batch()
    begun: list[dict[str, Any]] = []
    while True:
        try:
            with (
                watched(config.failure, context) as watchdog,
                memory_watched(config, context),
            ):
                _outlast(config.failure, context)
                return _attempt(task, config, context, watchdog, begun)
        except TooLargeError as error:
            if context.world_size > 1:
                raise TooLargeError(
                    *error.args
                ) from None  # without the frames that hold what did not fit
            logger.warning("%s; going on with a smaller one", error)
            context.microbatch_ceiling = next_smaller(error.microbatch_size)
        for state in begun:
            task.load_state_dict(state)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _outlast(failure: FailureConfig, context: RunContext) -> None:
    """Let collectives wait longer than any budget of the watchdog.

    It knows what hangs, and gloo and NCCL do not.
    """
    if context.world_size > 1:
        budget_s = 2 * max(failure.hang_timeout_s, failure.of_phases_s, 900.0)
        # torch 2.11 has no public one
        set_timeout = (
            getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        )
        set_timeout(timedelta(seconds=min(budget_s, _LONGEST_WAIT_S)))


def _attempt(
    task: Task,
    config: TrainConfig,
    context: RunContext,
    watchdog: Watchdog,
    begun: list[dict[str, Any]],
) -> RunResult:
    """Build and train once.

    `begun` gets the task's state before the first step of the first attempt, once
    model() has made what is in it.
    """
    with _torch_limits_explained(config), contextlib.ExitStack() as stack:
        inspection = inspect_run(config, context)
        if inspection is not None:
            stack.callback(inspection.close)
        parts = build_replica(task, config, context)
        stack.callback(parts.close)
        if not begun:
            begun.append(copy.deepcopy(task.state_dict()))
        for feed in parts.feeds:
            feed.beat = watchdog.beat
        return Training(
            Attempt(task, config, context, parts, watchdog), inspection, stack
        ).run()


@contextlib.contextmanager
def _torch_limits_explained(config: TrainConfig) -> Iterator[None]:
    """Raise ConfigError, which names the setting, for a known limit of torch's.

    Limits that forward alone can meet, and whose sentence needs the batch, are
    explained by ForwardPass.
    """
    try:
        yield
    except RuntimeError as error:
        if config.compile != "off" and _DOUBLE_BACKWARD in str(
            error
        ):  # else the task compiles something itself
            rule = (
                "cannot train a loss that has a gradient in it, such as a gradient penalty: torch does not "
                "differentiate the backward pass of a compiled model"
            )
            raise ConfigError(
                "compile", config.compile, rule, "set `compile: off`"
            ) from error
        raise
