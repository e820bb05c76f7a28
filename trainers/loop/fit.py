"""Train one worker's run: the same `fit` in a test, under torchrun, Ray, and in a lane.

build     device, seed, data, model, optimizer; the microbatch that fits (build.py)
train     from the newest complete checkpoint on (`Training`)
again     both, with a smaller microbatch, where training runs out of memory
"""

import contextlib
import copy
import gc
import itertools
import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.causes import classify
from trainers.config import TrainConfig
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.data.batch import Batch
from trainers.data.stream import Stream
from trainers.devices.device import device_name, environment, reset_peak_memory
from trainers.errors import ConfigError, PreemptedError, TooLargeError, counted, shorten
from trainers.loop.attempt import Attempt
from trainers.loop.build import build_replica
from trainers.loop.checkpointing import (
    AGREE_EVERY_STEPS,
    Agreement,
    Agreements,
    Checkpointing,
    check_replicas,
)
from trainers.loop.data import check_length
from trainers.loop.monitor import (
    Monitor,
    end_window,
    finish,
    take_first_losses,
    validate,
)
from trainers.loop.watchdog import Watchdog, watched
from trainers.measure.profiler import Inspection, inspect_run, memory_watched
from trainers.measure.result import RunResult
from trainers.model.optimizer import lr_factor, lr_scale, scaled_decay
from trainers.model.strategy import unused_parameters
from trainers.step.ceiling import OUT_OF_MEMORY, next_smaller, refuse_microbatch
from trainers.step.evaluation import batch_seed
from trainers.step.train_step import PhasedStep
from trainers.task import Task

logger = logging.getLogger(__name__)

_CHECK_EVERY = 100
"""Agreements between two looks at whether ranks still have the same parameters."""
_TUNED_STEPS = 300
"""From so many steps on cuDNN's search for the fastest algorithms, about a second, pays
for itself.
"""
_MADE_EARLY = "make it in the module's constructor, or by a lazy layer (nn.LazyLinear)"
_Plan = tuple[list[Tensor], list[int]]
"""A step's microbatches, and how many samples each of them counts."""
_LONGEST_WAIT_S = 6e5  # the store's ends at 24 days
_DOUBLE_BACKWARD = "does not currently support double backward"  # aot_autograd's words


class Training:
    """Runs an attempt's steps, and between them whatever is due, in this order.

    Until the last step (of this launcher's part of the run), or until asked to stop:

    - set the learning rate, run one step (trainers/step/train_step.py), count it;
    - every ten steps, and before anything is kept, agree with all ranks on stop,
      divergence and checkpoint time (checkpointing.py);
    - every `log_every_steps`, whatever else is due, log those steps' mean loss;
    - when due, evaluate (monitor.py), checkpoint (checkpointing.py) and report.

    Then evaluate and checkpoint the end, and write `result.json` (monitor.py).
    """

    def __init__(
        self,
        attempt: Attempt,
        inspection: Inspection | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.attempt = attempt
        self.inspection = inspection
        task = attempt.task
        self.task_after_step = (
            None if type(task).after_step is Task.after_step else task.after_step
        )
        self.batch_size: int | None = None
        """Of the last step, where there is a schedule."""
        self.lr_scale = 1.0
        """What `lr_scaling` makes of that size, where there is a schedule."""
        self.tunes = False
        """Whether cuDNN searches for the fastest algorithms of full steps; an epoch's
        short one comes too seldom.
        """
        self.agreements = 0
        self.slow_start = (
            attempt.compiles
        )  # the first steps may take as long as a phase
        self.monitor = Monitor(attempt.parts, attempt.clock)
        stack.callback(self.monitor.close)
        self.checkpointing = Checkpointing(attempt)
        self.asked = Agreements(attempt, self.checkpointing)
        stack.callback(self.checkpointing.close)

    def run(self) -> RunResult:
        """Train from the newest checkpoint on."""
        attempt = self.attempt
        parts = self.attempt.parts
        watchdog = attempt.watchdog
        storage = attempt.context.storage
        reset_peak_memory(parts.device)
        watchdog.enter("resume")
        if (
            attempt.log is not None and storage is not None
        ):  # before others wait for rank 0 in a step
            storage.write(
                "environment.json",
                json.dumps(environment(parts.device), indent=2).encode(),
            )
        self.checkpointing.resume()
        is_long = attempt.end - attempt.step >= _TUNED_STEPS
        self.tunes = (
            is_long and parts.device.type == "cuda" and not attempt.config.deterministic
        )
        if isinstance(stream := parts.train_feed.dataset, Stream):
            stream.beat = watchdog.beat
            self.slow_start |= (
                attempt.step > 0
            )  # what was trained may have to be read again
        if attempt.context.rank == 0:
            self.say_start()
        watchdog.enter(
            "the first steps" if self.slow_start else "training",
            steps=not self.slow_start,
        )
        stopped = False
        while attempt.step < attempt.end and not stopped:
            stopped = self.epoch() and attempt.step < attempt.end
        if stopped:
            take_first_losses(attempt)  # the window goes on with the run
        else:
            end_window(attempt, self.monitor)
            attempt.settle(attempt.step)
        if not stopped and attempt.evaluated_step != attempt.step:
            self.evaluate()
        self.checkpointing.keep_end()
        watchdog.enter("the end")
        is_done = (
            attempt.step == parts.total_steps or attempt.stopping.words is not None
        )
        return finish(
            "done" if is_done else "stopped", attempt, self.monitor, self.inspection
        )

    def say_start(self) -> None:
        """Tell and log how the run trains: batch arithmetic, data, learning rate."""
        parts = self.attempt.parts
        config = self.attempt.config
        context = self.attempt.context
        told = {
            "uri": context.storage.uri if context.storage else None,
            "total_steps": self.attempt.end,
            "max_time_s": config.max_time_s,
            "global_batch_size": config.batch_size,
            "microbatch_size": parts.microbatch_size,
            "accumulation": parts.accumulation,
            "world_size": context.world_size,
            "launcher": context.launcher,
            "device": str(parts.device),
            "precision": parts.spec.name,
        }
        self.attempt.tell("start", told)
        workers = counted(context.world_size, "worker")
        sizes = f"microbatch {parts.microbatch_size} x accumulation {parts.accumulation} x {workers}"
        where = f"{context.launcher}, {parts.device}, {parts.spec.name}"
        batches = parts.sampler.batches
        largest = "largest " if config.changes_batch else ""
        logger.info(
            "%sglobal batch %d = %s (%s)", largest, config.batch_size, sizes, where
        )
        if batches.changes:
            logger.info("global batch: %s", batches.words(parts.total_steps))
            if (end := batches.samples(parts.total_steps)) <= (
                batches.sizes[-2][0] or 0
            ):
                words = (
                    "the last size of `batch_schedule` is never reached: the run has %s"
                )
                logger.warning(words, counted(end, "sample"))
        steps = f"{counted(parts.total_steps, 'step')} in all"
        if size := parts.sampler.known_length:
            of_epoch = f"{counted(batches.steps_in(0), 'step')} an epoch"
            of_epoch = f"{of_epoch} at first" if batches.changes else of_epoch
            steps = f"{counted(size, 'training sample')}, {of_epoch}, {steps}"
        first = config.optimizer.lr * lr_scale(config, batches.sizes[0][1])
        logger.info("%s; learning rate %g", steps, first)
        if parts.val_feed is None:
            logger.info("no validation split: nothing is evaluated")

    def epoch(self) -> bool:
        """Train the rest of the epoch; return whether the run was asked to stop in it."""
        clock = self.attempt.clock
        clock.end_span()  # the last steps of an epoch after which nothing was due
        for size, sizes in self.steps():
            if clock.first_step_s is None:
                self.look_at_first_step()
            clock.step(size, sum(sizes))
            if self.attempt.parts.step.strayed:
                clock.leave_out()
            if self.inspection is not None:
                self.inspection.step(clock)
            if self.after_step():
                return True
        return False

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Train the rest of the epoch, at most to the attempt's end.

        Yields after each step its samples, and those of this rank's microbatches.
        """
        attempt = self.attempt
        parts = self.attempt.parts
        sampler = parts.sampler
        check_length(parts.train_feed.dataset, sampler)
        number, first = sampler.batches.place(attempt.step)
        sampler.set_epoch(number)
        last = min(sampler.steps_per_epoch, first + attempt.end - attempt.step)
        batches, counted = step_batches(attempt, first, last)
        attempt.clock.start_span()
        for step, sizes in zip(range(first, last), counted, strict=True):
            parts.step.follow_frozen()
            self.set_rates()
            if parts.ema is not None:
                parts.ema.take_unfrozen()
            size = sampler.step_size(step)
            if self.tunes:
                torch.backends.cudnn.benchmark = size == sampler.batches.size(
                    attempt.step
                )
            try:
                parts.step(batches, sizes, size, idle=not any(sizes))
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    where = device_name(parts.device)
                    refuse_microbatch(
                        error,
                        parts.microbatch_size,
                        attempt.config,
                        attempt.context,
                        where,
                    )
                raise
            if self.tunes:
                torch.backends.cudnn.benchmark = False
            attempt.step += 1
            if self.task_after_step is not None:
                with torch.no_grad():
                    self.task_after_step(parts.model, attempt.step)
            if parts.schedule is not None:
                parts.schedule.stepped(attempt.step, attempt.ends_epoch)
            if parts.ema is not None:
                parts.ema.update()
            yield size, sizes

    def set_rates(self) -> None:
        """Set the next step's learning rates, and note where its batch size is another."""
        attempt = self.attempt
        parts = self.attempt.parts
        config = self.attempt.config
        batches = parts.sampler.batches
        if (
            config.batch_schedule is not None
            and (size := batches.size(attempt.step)) != self.batch_size
        ):
            if self.batch_size is not None:
                parts.step.resized()
            self.batch_size = size
            self.lr_scale = lr_scale(config, size)
            parts.step.set_options(config, size)
            if (
                parts.ema is not None
                and (decay := scaled_decay(config, size)) is not None
            ):
                parts.ema.set_decay(decay)
        if parts.schedule is not None:
            parts.step.follow(parts.schedule, attempt.step, self.lr_scale)
            return
        course = batches if config.counts_samples else None
        parts.step.set_lr(
            lr_factor(config.lr_schedule, attempt.step, parts.total_steps, course)
            * self.lr_scale
        )

    def look_at_first_step(self) -> None:
        """Warn of parameters without a gradient after the first step.

        Raises ConfigError for those that came in it.
        """
        parts = self.attempt.parts
        self._refuse_late()
        phased = isinstance(
            parts.step, PhasedStep
        )  # which says it itself, of each phase
        if (
            not phased
            and self.attempt.context.rank == 0
            and (names := unused_parameters(parts.model))
        ):
            logger.warning(
                "the loss of the first step does not depend on %s: it has not trained them",
                shorten(names),
            )

    def _refuse_late(self) -> None:
        parts = self.attempt.parts
        if late := parts.as_made.late_parameters(parts.model):
            rule = (
                "is made while it trains, when the optimizer has its parameters already"
            )
            raise ConfigError(
                "task",
                self.attempt.config.task,
                f"has a model whose `{late[0]}` {rule}",
                _MADE_EARLY,
            )

    def after_step(self) -> bool:
        """Do whatever is due after a step; return whether to stop."""
        attempt = self.attempt
        config = self.attempt.config
        evaluate_now = attempt.due(
            config.evaluate.every_steps, config.evaluate.every_epochs
        )
        checkpoint_now = self.checkpointing.due()
        agreed = Agreement()
        is_last = attempt.step == attempt.end
        at_once = evaluate_now or checkpoint_now or is_last
        if at_once or attempt.step % AGREE_EVERY_STEPS == 0:
            agreed = self.agree(at_once)
        if attempt.step % config.log_every_steps == 0 or is_last:
            end_window(attempt, self.monitor)
        waits = at_once or agreed.acts or self.asked.waits
        attempt.settle(attempt.step if waits else attempt.step - AGREE_EVERY_STEPS)
        improved = evaluate_now and self.evaluate()
        if (
            checkpoint_now or improved or agreed.checkpoint_due
        ) and attempt.step < attempt.end:
            take_first_losses(attempt)
            self.checkpointing.keep(at_once=agreed.preempted)
        if agreed.preempted and attempt.step < attempt.end:
            raise PreemptedError(
                f"a node is being taken away; step {attempt.step} is kept in {attempt.checkpoint}"
            )
        if not attempt.clock.running:
            attempt.clock.start_span()
        return agreed.stop or attempt.step >= attempt.end

    def agree(self, at_once: bool) -> Agreement:
        """Agree with all ranks on what comes next; the first time slow steps are over."""
        self.attempt.parts.step.check_lr()
        agreed = self.asked.next(at_once)
        self.attempt.later.append(
            (
                self.attempt.step,
                partial(self.attempt.clock.settle, self.attempt.clock.spans),
            )
        )
        if self.agreements % _CHECK_EVERY == 0 or self.attempt.step == self.attempt.end:
            self._refuse_late()
            check_replicas(self.attempt)
        self.agreements += 1
        if self.slow_start:
            self.slow_start = False
            self.attempt.watchdog.enter("training", steps=True)
        return agreed

    def evaluate(self) -> bool:
        """Evaluate; return whether this is the best so far, by `checkpoint.best`."""
        return self.checkpointing.improves(validate(self.attempt))


def step_batches(
    attempt: Attempt, first: int, last: int
) -> tuple[Iterator[Batch], Iterator[list[int]]]:
    """Return the microbatches of these steps, one after another, and each step's sizes.

    The attempt must be at the first of them.
    """
    config = attempt.config
    plans, ahead = itertools.tee(
        _plans(attempt, first, last)
    )  # the feed is ahead by what loaders prepare
    seeds = None
    if (
        config.data.num_workers > 0
    ):  # random state of loader processes is in no checkpoint
        ahead, again = itertools.tee(ahead)
        seeds = _loader_seeds(again, config.seed, attempt.context.rank, attempt.step)
    flat = (indices for microbatches, _ in ahead for indices in microbatches)
    batches = attempt.clock.timed(
        attempt.parts.train_feed.batches(flat, training=True, seeds=seeds)
    )
    return batches, (sizes for _, sizes in plans)


def _plans(attempt: Attempt, first: int, last: int) -> Iterator[_Plan]:
    parts = attempt.parts
    for step in range(first, last):
        yield parts.sampler.plan(step, parts.microbatch_size, parts.even)


def _loader_seeds(
    plans: Iterator[_Plan], seed: int, rank: int, start: int
) -> Iterator[int]:
    """Yield the seed of each microbatch from step `start` on, for loader processes."""
    for step, (microbatches, _) in enumerate(plans, start):
        for piece in range(len(microbatches)):
            yield batch_seed(seed, rank, step, piece)


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
