"""Train a run on one worker; tests, lanes, torchrun and Ray all use the same `fit`.

1. Build (build.py): device, seed, data, model, optimizer, and the microbatch
   that fits.
2. Train (`Training`), from the newest complete checkpoint on.
3. If training runs out of memory, repeat 1 and 2 with a smaller microbatch.
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

from trainers.config import TrainConfig
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.data.batch import Batch
from trainers.data.stream import Stream
from trainers.devices.device import reset_peak_memory
from trainers.errors import (
    ConfigError,
    PreemptedError,
    Status,
    TooLargeError,
    counted,
    shorten,
)
from trainers.loop._attempt import Attempt
from trainers.loop._checkpointing import (
    AGREE_EVERY_STEPS,
    Agreement,
    Agreements,
    Checkpointing,
    check_replicas,
)
from trainers.loop._monitor import (
    Monitor,
    end_window,
    finish,
    take_first_losses,
    validate,
)
from trainers.loop.build import build_replica
from trainers.loop.data import check_length
from trainers.loop.watchdog import Watchdog, watched
from trainers.measure.profiler import Inspection, inspect_run, memory_watched
from trainers.measure.result import RunResult
from trainers.model.optimizer import lr_factor, lr_scale, scaled_decay
from trainers.model.strategy import unused_parameters
from trainers.step.ceiling import next_smaller
from trainers.step.evaluation import batch_seed
from trainers.step.train_step import PhasedStep
from trainers.task import Task, overrides
from trainers.versions import environment

logger = logging.getLogger(__name__)

_CHECK_EVERY = 100
"""Number of agreements after which the ranks' parameters are compared again."""
_TUNED_STEPS = 300
"""The fewest steps for which cuDNN's search for the fastest algorithms, which
takes about a second, pays off.
"""
_MADE_EARLY = (
    "make it in the module's constructor, or use a lazy layer (nn.LazyLinear)"
)
_Plan = tuple[list[Tensor], list[int]]
"""A step's microbatches, and the number of samples that count in each."""
_LONGEST_WAIT_S = 6e5  # torch's store allows at most 24 days


class Training:
    """Runs an attempt's steps, and between them whatever is due, in this order.

    Until the attempt's last step, or until asked to stop:

    - set the learning rate, run one step (trainers/step/train_step.py), count
      it;
    - every ten steps (slow ones: every step), and before anything is saved,
      agree with all ranks on stop, divergence and checkpoint time
      (_checkpointing.py);
    - every `log_every_steps`, whatever else is due, log the mean loss of the
      steps since the last such log;
    - when due, evaluate (_monitor.py), checkpoint and report.

    Then evaluate and checkpoint the last step, and write `result.json`.
    """

    def __init__(
        self,
        attempt: Attempt,
        inspection: Inspection | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.attempt = attempt
        self.parts = attempt.parts
        self.config = attempt.config
        self.inspection = inspection
        self.acts_after_step = overrides(attempt.task, "after_step")
        self.batch_size: int | None = None
        """Batch size of the last step, if there is a batch schedule."""
        self.lr_scale = 1.0
        """Factor of `lr_scaling` at the last step's batch size; 1 if the size is fixed."""
        self.tunes = False
        """Whether cuDNN searches for the fastest algorithms for full steps;
        for an epoch's rare short step the search does not pay off.
        """
        self.agreements = 0
        # The first steps may take as long as a phase.
        self.slow_start = attempt.compiles
        self.monitor = Monitor(attempt.parts, attempt.clock)
        stack.callback(self.monitor.close)
        self.checkpointing = Checkpointing(attempt)
        self.asked = Agreements(attempt, self.checkpointing)
        stack.callback(self.checkpointing.close)

    def run(self) -> RunResult:
        """Train from the newest checkpoint on; return the result."""
        attempt = self.attempt
        parts = self.parts
        watchdog = attempt.watchdog
        storage = attempt.context.storage
        reset_peak_memory(parts.device)
        watchdog.enter("resume")
        # Written now, while no other rank waits for rank 0 in a step.
        if attempt.log is not None and storage is not None:
            about = json.dumps(environment(parts.device), indent=2)
            storage.write("environment.json", about.encode())
        self.checkpointing.resume()
        is_long = attempt.end - attempt.step >= _TUNED_STEPS
        on_gpu = parts.device.type == "cuda"
        self.tunes = is_long and on_gpu and not self.config.deterministic
        stream = parts.train_feed.dataset
        if isinstance(stream, Stream):
            stream.beat = watchdog.beat
            # Samples already trained may have to be read again.
            self.slow_start |= attempt.step > 0
        if attempt.context.rank == 0:
            self.say_start()
        if self.slow_start:
            watchdog.enter("the first steps")
        else:
            watchdog.enter("training", steps=True)
        stopped = False
        while attempt.step < attempt.end and not stopped:
            stopped = self.epoch() and attempt.step < attempt.end
        if stopped:
            take_first_losses(attempt)  # a resumed run ends the window
        else:
            end_window(attempt, self.monitor)
            attempt.settle(attempt.step)
            if attempt.evaluated_step != attempt.step:
                self.evaluate()
        self.checkpointing.keep_end()
        watchdog.enter("the end")
        at_end = attempt.step >= parts.total_steps
        is_done = at_end or attempt.stopping.words is not None
        status: Status = "done" if is_done else "stopped"
        return finish(status, attempt, self.monitor, self.inspection)

    def say_start(self) -> None:
        """Log how the run trains: batch arithmetic, data, learning rate.

        Rank 0 also passes a record of the kind "start" to whoever has asked
        for records.
        """
        parts = self.parts
        config = self.config
        context = self.attempt.context
        precision = parts.spec.name
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
            "precision": precision,
        }
        self.attempt.tell("start", told)
        workers = counted(context.world_size, "worker")
        sizes = f"microbatch {parts.microbatch_size} x accumulation {parts.accumulation} x {workers}"
        where = f"{context.launcher}, {parts.device}, {precision}"
        batches = parts.sampler.batches
        largest = "largest " if batches.changes else ""
        logger.info(
            "%sglobal batch %d = %s (%s)",
            largest,
            config.batch_size,
            sizes,
            where,
        )
        if batches.changes:
            logger.info("global batch: %s", batches.words(parts.total_steps))
        steps = f"{counted(parts.total_steps, 'step')} in all"
        if parts.sampler.known_length:
            samples = counted(parts.sampler.known_length, "training sample")
            at_first = " at first" if batches.changes else ""
            of_epoch = (
                f"{counted(batches.steps_in(0), 'step')} an epoch{at_first}"
            )
            steps = f"{samples}, {of_epoch}, {steps}"
        first = config.optimizer.lr * lr_scale(
            config.lr_scaling, batches.sizes[0][1]
        )
        logger.info("%s; learning rate %g", steps, first)
        if parts.val_feed is None:
            logger.info("no validation split: nothing is evaluated")

    def epoch(self) -> bool:
        """Train the rest of the epoch; return whether to stop training."""
        clock = self.attempt.clock
        clock.end_span()  # open if nothing was due at the last epoch's end
        for size, sizes in self.steps():
            if clock.first_step_s is None:
                self.look_at_first_step()
            clock.step(size, sum(sizes))
            if self.parts.step.strayed:
                clock.leave_out()
            if self.inspection is not None:
                self.inspection.step(clock)
            if self.after_step():
                return True
        return False

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Train the rest of the epoch, at most to the attempt's end.

        After each step, yields the step's number of samples over all ranks,
        and the sizes of this rank's microbatches.
        """
        attempt = self.attempt
        parts = self.parts
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
                is_full = size == sampler.batches.size(attempt.step)
                torch.backends.cudnn.benchmark = is_full
            try:
                parts.step(batches, sizes, size, idle=not any(sizes))
            except (RuntimeError, MemoryError) as error:
                parts.ceiling.refuse(error, parts.microbatch_size)
                raise
            if self.tunes:
                torch.backends.cudnn.benchmark = False
            attempt.step += 1
            if self.acts_after_step:
                with torch.no_grad():
                    attempt.task.after_step(parts.model, attempt.step)
            if parts.schedule is not None:
                parts.schedule.stepped(attempt.step, attempt.ends_epoch)
            if parts.ema is not None:
                parts.ema.update()
            yield size, sizes

    def set_rates(self) -> None:
        """Set the next step's learning rates, and what depends on its batch size."""
        step = self.attempt.step
        parts = self.parts
        config = self.config
        batches = parts.sampler.batches
        if config.batch_schedule is not None:
            size = batches.size(step)
            if size != self.batch_size:
                self._resize(size)
        if parts.schedule is not None:
            parts.step.follow(parts.schedule, step, self.lr_scale)
            return
        course = batches if config.counts_samples else None
        factor = lr_factor(config.lr_schedule, step, parts.total_steps, course)
        parts.step.set_lr(factor * self.lr_scale)

    def _resize(self, size: int) -> None:
        """Set everything that depends on the batch size, from here on."""
        parts = self.parts
        scaling = self.config.lr_scaling
        if self.batch_size is not None:
            parts.step.resized()
        self.batch_size = size
        self.lr_scale = lr_scale(scaling, size)
        parts.step.set_options(scaling, size)
        decay = scaled_decay(self.config.ema.decay, scaling, size)
        if parts.ema is not None and decay is not None:
            parts.ema.set_decay(decay)

    def look_at_first_step(self) -> None:
        """Warn of parameters that have no gradient after the first step.

        Raises ConfigError for parameters that this step created.
        """
        self._refuse_late()
        # A PhasedStep gives this warning itself, for each phase.
        if self.attempt.context.rank or isinstance(
            self.parts.step, PhasedStep
        ):
            return
        names = unused_parameters(self.parts.model)
        if names:
            logger.warning(
                "the loss of the first step does not depend on %s, which that step has not trained",
                shorten(names),
            )

    def _refuse_late(self) -> None:
        late = self.parts.as_made.late_parameters(self.parts.model)
        if late:
            raise ConfigError(
                "task",
                self.config.task,
                f"has a model that creates `{late[0]}` during training, too late for the optimizer",
                _MADE_EARLY,
            )

    def after_step(self) -> bool:
        """Do whatever is due after a step; return whether to stop."""
        attempt = self.attempt
        step = attempt.step
        evaluate_now = attempt.is_due(step, self.config.evaluate)
        checkpoint_now = self.checkpointing.due()
        agreed = Agreement()
        is_last = step == attempt.end
        at_once = evaluate_now or checkpoint_now or is_last
        is_due = self.asked.is_slow or step % AGREE_EVERY_STEPS == 0
        if at_once or is_due:
            agreed = self.agree(at_once)
        if step % self.config.log_every_steps == 0 or is_last:
            end_window(attempt, self.monitor)
        waits = at_once or agreed.acts or self.asked.waits
        attempt.settle(step if waits else step - AGREE_EVERY_STEPS)
        improved = evaluate_now and self.evaluate()
        keeps = checkpoint_now or improved or agreed.checkpoint_due
        goes_on = step < attempt.end
        if keeps and goes_on:
            take_first_losses(attempt)
            self.checkpointing.keep(at_once=agreed.preempted)
        if agreed.preempted and goes_on:
            raise PreemptedError(
                f"a node is being taken away; step {step} is kept in {attempt.checkpoint}"
            )
        if not attempt.clock.running:
            attempt.clock.start_span()
        return agreed.stop or not goes_on

    def agree(self, at_once: bool) -> Agreement:
        """Agree with all ranks on what comes next.

        The first agreement ends the longer time budget of slow first steps.
        """
        attempt = self.attempt
        self.parts.step.check_lr()
        agreed = self.asked.next(at_once)
        settle = partial(attempt.clock.settle, attempt.clock.spans)
        attempt.later.append((attempt.step, settle))
        if self.agreements % _CHECK_EVERY == 0 or attempt.step == attempt.end:
            self._refuse_late()
            check_replicas(self.parts, self.config.task, attempt.step)
        self.agreements += 1
        if self.slow_start:
            self.slow_start = False
            attempt.watchdog.enter("training", steps=True)
        return agreed

    def evaluate(self) -> bool:
        """Evaluate; return whether this is the best so far, by `checkpoint.best`."""
        return self.checkpointing.improves(validate(self.attempt))


def step_batches(
    attempt: Attempt, first: int, last: int
) -> tuple[Iterator[Batch], Iterator[list[int]]]:
    """Return iterators over the steps' microbatches, and over each step's sizes.

    The steps are those from `first` up to, but not including, `last` in the
    epoch; the attempt must be at `first`. A step's sizes are the numbers of
    samples that count in each of its microbatches.
    """
    config = attempt.config
    parts = attempt.parts
    every = (
        parts.sampler.plan(step, parts.microbatch_size, parts.even)
        for step in range(first, last)
    )
    # Loaders prepare batches ahead of the step.
    plans, ahead = itertools.tee(every)
    seeds = None
    # No checkpoint contains the random state of loader processes.
    if config.data.num_workers > 0:
        ahead, again = itertools.tee(ahead)
        seeds = _loader_seeds(
            again, config.seed, attempt.context.rank, attempt.step
        )
    flat = (rows for microbatches, _ in ahead for rows in microbatches)
    batches = parts.train_feed.batches(flat, training=True, seeds=seeds)
    return attempt.clock.timed(batches), (sizes for _, sizes in plans)


def _loader_seeds(
    plans: Iterator[_Plan], seed: int, rank: int, start: int
) -> Iterator[int]:
    """Yield the seed of each microbatch from step `start` on, for loader processes."""
    for step, (microbatches, _) in enumerate(plans, start):
        for piece in range(len(microbatches)):
            yield batch_seed(seed, rank, step, piece)


def fit(task: Task, config: TrainConfig, context: RunContext) -> RunResult:
    """On this worker, train the run that `config` describes.

    Every rank must call it; all ranks return the same result.

    A single worker that runs out of memory during training continues from its
    newest checkpoint with a smaller microbatch; with several workers, the
    launcher restarts the group. Raises ConfigError (for a value that only the
    device or the data could refute), DivergedError, PreemptedError,
    TooLargeError, StorageError, CheckpointError, torch.OutOfMemoryError, and
    whatever the task raises.
    """
    config = config.with_global_batch()
    begun: list[dict[str, Any]] = []
    while True:
        try:
            with (
                watched(config.failure, context) as watchdog,
                memory_watched(config, context),
            ):
                _outlast(config.failure, context.world_size)
                return _attempt(task, config, context, watchdog, begun)
        except TooLargeError as error:
            if context.world_size > 1:
                # Without the frames, which keep their tensors alive.
                raise TooLargeError(*error.args) from None
            logger.warning("%s; continuing with a smaller microbatch", error)
            context.microbatch_ceiling = next_smaller(error.microbatch_size)
        for state in begun:
            task.load_state_dict(state)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _outlast(failure: FailureConfig, world_size: int) -> None:
    """Give collectives a timeout longer than any budget of the watchdog.

    The watchdog can tell what hangs; gloo and NCCL cannot.
    """
    if world_size > 1:
        budget_s = 2 * max(failure.hang_timeout_s, failure.of_phases_s, 900.0)
        timeout = timedelta(seconds=min(budget_s, _LONGEST_WAIT_S))
        # torch 2.11 has no public function for this.
        public = getattr(dist, "set_timeout", None)
        set_timeout = public or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout)


def _attempt(
    task: Task,
    config: TrainConfig,
    context: RunContext,
    watchdog: Watchdog,
    begun: list[dict[str, Any]],
) -> RunResult:
    """Build and train once.

    On the first attempt, appends the task's state before training to `begun`.
    """
    with contextlib.ExitStack() as stack:
        inspection = inspect_run(config, context)
        if inspection is not None:
            stack.callback(inspection.close)
        parts = build_replica(task, config, context)
        stack.callback(parts.close)
        if not begun:
            begun.append(copy.deepcopy(task.state_dict()))
        for feed in parts.feeds:
            feed.beat = watchdog.beat
        attempt = Attempt(task, config, context, parts, watchdog)
        return Training(attempt, inspection, stack).run()
