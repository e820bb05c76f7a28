"""Write a run's checkpoints during training, at steps on which all ranks agree.

Every few steps the ranks decide together whether to stop, write a checkpoint,
or fail.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from trainers.checkpoint.run_state import Keeper
from trainers.data.stream import Stream, refuse_other_samples
from trainers.devices.device import to_host
from trainers.devices.group import find_unlike
from trainers.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    counted,
)
from trainers.loop._attempt import Attempt
from trainers.model.optimizer import averaged, set_training
from trainers.model.sharding import is_sharded
from trainers.step.train_step import Replica
from trainers.storage import Storage

logger = logging.getLogger(__name__)

STREAM_S = 600.0
"""Default time between two checkpoints of a run on a stream, which has no epochs."""
AGREE_EVERY_STEPS = 10
"""Steps between two agreements of all ranks. A bad loss or a request to stop
takes effect within this many steps, on CUDA within twice as many.
"""
_SLOW_S = 1.0
"""Time between two agreements above which the next one follows after one step."""


class Checkpointing:
    """Writes an attempt's checkpoints.

    A run without storage writes them only to the context's refuge, if there is
    one: before a node is taken away and, if `checkpoint` sets an interval, also
    at each interval and at the end.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        storage = attempt.context.storage
        self._config = attempt.config
        self._every = attempt.config.checkpoint
        if storage is None and self._every.says_when:
            storage = attempt.context.refuge
        steps = self._every.every_steps
        if attempt.epochs is None and steps is self._every.every_s is None:
            self._every = self._every.model_copy(update={"every_s": STREAM_S})
            changes = {"checkpoint": self._every}
            self._config = self._config.model_copy(update=changes)
        self._off_course = ""
        """Why the checkpoint does not fit a run of this length."""
        self._keeper = self._make(storage) if storage else None

    def _make(self, storage: Storage) -> Keeper:
        attempt = self.attempt
        return Keeper(
            storage,
            attempt.parts,
            attempt.task,
            self._config,
            attempt.log,
            self._kept,
        )

    def due(self) -> bool:
        """Return whether a checkpoint is due after this step, by steps or epochs."""
        if self._keeper is None or self._every.every_s is not None:
            return False
        return self.attempt.is_due(self.attempt.step, self._every)

    def wanted(self, preempted: bool) -> bool:
        """Return whether this rank wants a checkpoint: by `every_s`, or if preempted."""
        if self._keeper is None:
            return preempted and self.attempt.context.refuge is not None
        return self._keeper.due() or preempted

    def improves(self, figures: Mapping[str, float]) -> bool:
        """Return whether these figures are the best so far, by `checkpoint.best`."""
        return self._keeper is not None and self._keeper.checkpoints.improves(
            figures
        )

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written in the background on this rank."""
        return self._keeper is not None and self._keeper.checkpoints.busy

    def keep(self, at_once: bool) -> None:
        """Write a checkpoint and the log up to it.

        With `checkpoint.async`, training continues meanwhile unless `at_once`.
        """
        began = time.perf_counter()
        attempt = self.attempt
        position = self._position()
        if self._keeper is None:
            assert attempt.context.refuge is not None
            self._keeper = self._make(attempt.context.refuge)
        figures = (
            attempt.metrics if attempt.evaluated_step == attempt.step else {}
        )
        with (
            attempt.watchdog.phase("checkpoint"),
            averaged(attempt.parts.optimizer, attempt.parts.ema),
        ):
            self._keeper.keep(position, figures, at_once)
        attempt.pauses.checkpoints += 1
        attempt.pauses.checkpoint_s += time.perf_counter() - began

    def _position(self) -> dict[str, Any]:
        attempt = self.attempt
        parts = attempt.parts
        sampler = parts.sampler
        stream = parts.train_feed.dataset
        window = attempt.cut_window
        if attempt.open_steps:
            window = parts.step.open_losses(attempt.open_steps)()
        state = None
        if isinstance(stream, Stream):
            state = stream.state_at(attempt.samples)
        return {
            "step": attempt.step,
            "global_batch_size": attempt.config.batch_size,
            "train_samples": sampler.known_length,
            "train_time_s": attempt.clock.train_time_s,
            "metrics": dict(attempt.metrics),
            "evaluated_step": attempt.evaluated_step,
            "total_steps": parts.total_steps,
            "window": window,
            "reported": attempt.reported,
            "order": sampler.name(anew=attempt.ends_epoch),
            "samples": parts.samples,
            "held_back": parts.held_back,
            "stopping": attempt.stopping.state_dict(),
            "stream": state,
            "stream_mark": attempt.stream_mark(),
            "batch_sizes": list(sampler.batches.sizes)
            if sampler.batches.changes
            else [],
        }

    def _kept(self, where: str) -> None:
        """Report a complete checkpoint."""
        self.attempt.checkpoint = where
        self.attempt.watchdog.beat()
        self.attempt.report(where)
        self.attempt.tell("checkpoint", {"checkpoint": where})

    def advance(self) -> None:
        """Continue with the checkpoint being written; call this once no rank is `busy`."""
        if self._keeper is not None:
            self._keeper.advance()

    def settle(self) -> None:
        """Wait until the checkpoint being written is complete."""
        if self._keeper is not None:
            self.attempt.watchdog.enter("checkpoint")
            self._keeper.settle()
            self.attempt.pauses.written_s = self._keeper.checkpoints.written_s

    def keep_end(self) -> None:
        """Write a checkpoint of the last step, unless there is one, and wait for it."""
        if (
            self._keeper is not None
            and self._keeper.kept_step != self.attempt.step
        ):
            self.keep(at_once=True)
        self.settle()

    def resume(self) -> None:
        """Resume from the newest complete checkpoint, if any; begin a stream there.

        A trial starts over, with a warning in its result, if its length has
        changed and a run of the new length would be in a different state at
        the checkpoint's step.
        """
        attempt = self.attempt
        context = attempt.context
        keeper = self._keeper
        position = None
        if (
            keeper is None
            and context.refuge is not None
            and context.source is not None
        ):
            # Only to resume: nothing is written here.
            keeper = self._make(context.refuge)
        try:
            if keeper is not None:
                position = keeper.resume(context.source, self._check_course)
        except CheckpointError:
            if not self._off_course:
                raise
            attempt.parts.warnings.append(
                f"trained from the start: {self._off_course}"
            )
        if keeper is not None and position is not None:
            self._go_back(keeper, position)
        stream = attempt.parts.train_feed.dataset
        if isinstance(stream, Stream):
            kept = position or {"stream": None, "stream_mark": None}
            stream.begin(attempt.samples, kept["stream"], kept["stream_mark"])

    def _go_back(self, keeper: Keeper, position: Mapping[str, Any]) -> None:
        attempt = self.attempt
        parts = attempt.parts
        step = int(position["step"])
        set_training(parts.optimizer, True)
        attempt.step = step
        attempt.logged_step = step
        parts.step.number = step
        attempt.stopping.load_state_dict(position["stopping"])
        attempt.end_early()
        losses = position["window"]
        # If the run trains no further, its last window is already logged.
        if losses and step < attempt.end:
            attempt.logged_step -= losses["train_loss"][1]
            parts.step.set_losses(losses)
        time_s = float(position["train_time_s"])
        attempt.clock.train_time_s = time_s
        attempt.earlier_time_s = time_s
        attempt.metrics = dict(position["metrics"])
        attempt.evaluated_step = int(position["evaluated_step"])
        is_as_long = position["total_steps"] == parts.total_steps
        for row in position["reported"]:
            if is_as_long or self._is_evaluated(row["step"]):
                attempt.reported.append(row)
                attempt.context.report(row, None, attempt.elapsed_s)
        if keeper.kept_step == step:
            attempt.checkpoint = keeper.checkpoints.locate(step)
        if attempt.context.rank == 0:
            place = attempt.checkpoint or attempt.context.source
            logger.info("resumed at step %d from %s", step, place)
            self._say_other(position)

    def _is_evaluated(self, step: float) -> bool:
        """Whether a run that continues beyond this step also evaluates at this step."""
        return self.attempt.is_due(int(step), self.attempt.config.evaluate)

    @property
    def _goes_by_length(self) -> bool:
        """Whether the learning rate depends on the number of steps in the run."""
        schedule = self.attempt.parts.schedule
        course = self.attempt.config.lr_schedule
        if schedule is not None and not schedule.by_figure:
            return True
        return course.name != "constant" or isinstance(course.warmup, float)

    def _check_course(self, position: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a run of the new length would have another state."""
        parts = self.attempt.parts
        then = position["total_steps"]
        if (
            self.attempt.context.storage is not None
            or then == parts.total_steps
        ):
            return
        step = position["step"]
        follows = position["stopping"] or parts.schedule is not None
        if self._goes_by_length:
            self._off_course = f"the learning rate depends on the number of steps, which was {then} and is {parts.total_steps} now"
        elif step > parts.total_steps:
            self._off_course = f"the checkpoint is of step {step}, and this run ends at step {parts.total_steps}"
        elif follows and not self._is_evaluated(position["evaluated_step"]):
            self._off_course = f"early stopping or the scheduler used the evaluation at the end of {then} steps, which this run does not make"
        if self._off_course:
            raise CheckpointError(self._off_course)

    def _say_other(self, position: Mapping[str, Any]) -> None:
        """Warn if the samples or the length differ from the checkpoint's."""
        parts = self.attempt.parts
        before = position["samples"]
        if before and parts.samples and before != parts.samples:
            logger.warning(
                "the training split gives different samples than before step %d: some may come twice, others never; %s",
                self.attempt.step,
                "let its order follow from a seed, and sort file names",
            )
        then = position["total_steps"]
        if self._goes_by_length and then != parts.total_steps:
            logger.warning(
                "the run now has %s instead of %d: a learning rate that depends on this changes course",
                counted(parts.total_steps, "step"),
                then,
            )

    def close(self) -> None:
        """Abandon the checkpoint being written; may wait for the thread that writes it."""
        if self._keeper is not None:
            self.attempt.watchdog.enter("checkpoint")
            self._keeper.checkpoints.abandon()


@dataclass(frozen=True)
class Agreement:
    """What one rank wants or, once agreed, what any rank wants."""

    diverged: bool = False
    """The first, which is set on the device."""
    stop: bool = False
    checkpoint_due: bool = False
    preempted: bool = False
    writing: bool = False
    """Whether a checkpoint is being written in the background."""

    @property
    def acts(self) -> bool:
        """Whether something must be done right after this step."""
        return self.stop or self.checkpoint_due or self.preempted


class Agreements:
    """The successive agreements of all ranks during one attempt."""

    def __init__(self, attempt: Attempt, checkpointing: Checkpointing) -> None:
        self.attempt = attempt
        self.checkpointing = checkpointing
        self.waits = attempt.parts.device.type != "cuda"
        self.is_slow = False
        """Whether steps are slow enough to agree after each; equal on all ranks."""
        self._asked: Callable[[], Agreement] | None = None

    def next(self, at_once: bool) -> Agreement:
        """Agree with all ranks on what comes next.

        On CUDA, unless `at_once` is set or something must be done now, this
        method returns what the ranks submitted in the previous call, ten steps
        earlier, so that nothing waits for the device.

        Every rank must call it.

        Raises, on all ranks, DivergedError for a bad loss, and ConfigError if
        ranks have different samples of a stream, or use a sharded model
        differently.
        """
        attempt = self.attempt
        attempt.clock.end_span()
        before_s = attempt.elapsed_s
        agreed = self._asked() if self._asked is not None else Agreement()
        mine, self._asked = _ask(attempt, self.checkpointing)
        alone_acts = mine.acts and attempt.parts.group.world_size == 1
        if self.waits or at_once or agreed.acts or alone_acts:
            agreed = self._asked()
            self._asked = None
        # By the time that all ranks agreed on, not by this rank's clock.
        self.is_slow = attempt.elapsed_s - before_s > _SLOW_S
        return agreed


def _ask(
    attempt: Attempt, checkpointing: Checkpointing
) -> tuple[Agreement, Callable[[], Agreement]]:
    """Submit what this rank wants; return it, and a function that awaits all ranks."""
    context = attempt.context
    max_time_s = attempt.config.max_time_s
    elapsed_s = time.monotonic() - attempt.began
    out_of_time = max_time_s is not None and elapsed_s > max_time_s
    preempted = context.preempted(attempt.elapsed_s)
    mine = Agreement(
        stop=context.should_stop(attempt.elapsed_s) or out_of_time,
        checkpoint_due=checkpointing.wanted(preempted),
        preempted=preempted,
        writing=checkpointing.busy,
    )
    row, trail = attempt.stream_mark() or (0, "0")
    told = float(int(trail[:12], 16))  # exact: 48 bits
    group = attempt.parts.group
    used = float(attempt.parts.step.used.digest)
    numbers = [elapsed_s, told, -told, used, -used]
    flags = torch.tensor([*astuple(mine), *numbers], dtype=torch.float64)
    if group.device.type == "cuda":  # the device of `bad`
        flags = flags.to(group.device, non_blocking=True)
    flags[0] = attempt.parts.step.bad
    step = attempt.step
    read = to_host(group.max(flags))

    def answer() -> Agreement:
        *flagged, attempt.elapsed_s, most, least, most_used, least_used = (
            read()
        )
        if most != -least:
            task = attempt.config.task
            refuse_other_samples("stream", task, f" before row {row}")
        if most_used != -least_used:
            raise ConfigError(
                "strategy",
                "fsdp",
                f"needs all ranks to use the same blocks and parameters; before step {step} they did not",
                "use all blocks and parameters in every forward and loss (`0 * output.sum()` is a use), or set `strategy: ddp`",
            )
        agreed = Agreement(*(bool(flag) for flag in flagged))
        if agreed.diverged:
            checkpointing.settle()
            first = max(0, step - AGREE_EVERY_STEPS)
            words = f"the loss became NaN or infinite between steps {first} and {step}"
            if attempt.checkpoint:
                words += f"; the last good checkpoint is {attempt.checkpoint}"
            raise DivergedError(words)
        if not agreed.writing:
            checkpointing.advance()
        return agreed

    return mine, answer


def check_replicas(parts: Replica, task: str, step: int) -> None:
    """Raise ConfigError on every rank if a parameter differs between ranks."""
    if is_sharded(parts.model):
        return
    named = {**dict(parts.model.named_parameters()), **parts.beside}
    trained = {
        name: tensor for name, tensor in named.items() if tensor.requires_grad
    }
    found = find_unlike(trained, parts.group)
    if found is not None:
        name, share = found
        raise ConfigError(
            "task",
            task,
            f"lets parameters drift apart between ranks: at step {step} `{name}` differs by {share:.1e} of its largest value",
            "change parameters only through the optimizer, or identically on every rank",
        )
