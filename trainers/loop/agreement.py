"""Let all ranks decide together every few steps: stop, write a checkpoint, or fail.

On CUDA nothing waits for the device: what ranks have put in is read at the next
agreement, ten steps later, unless it is needed at once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from trainers.data.batch import Batch, fetch, map_tensors
from trainers.data.stream import Stream, refuse_other_samples
from trainers.devices.device import to_host
from trainers.devices.group import find_unlike
from trainers.errors import FIX, ConfigError, DivergedError
from trainers.loop.attempt import Attempt
from trainers.loop.checkpointing import Checkpointing
from trainers.model.sharding import is_sharded, local
from trainers.step.device_mismatch import named_tensors
from trainers.step.replica import Replica
from trainers.step.throwaway import throwaway
from trainers.task import Task

logger = logging.getLogger(__name__)

AGREE_EVERY_STEPS = 10
"""Steps between two agreements of all ranks: the longest that a bad loss or a stop
waits; on CUDA twice as many.
"""


@dataclass(frozen=True)
class Agreement:
    """What one rank wants, or, once agreed, what any of them wants."""

    stop: bool = False
    diverged: bool = False
    checkpoint_due: bool = False
    preempted: bool = False
    writing: bool = False
    """Whether a checkpoint is being written in the background."""

    @property
    def acts(self) -> bool:
        """Whether something is to be done after this very step."""
        return self.stop or self.checkpoint_due or self.preempted


_DIVERGED = [field.name for field in fields(Agreement)].index("diverged")


class Agreements:
    """Those of an attempt, one after another."""

    def __init__(self, attempt: Attempt, checkpointing: Checkpointing) -> None:
        self.attempt = attempt
        self.checkpointing = checkpointing
        self.waits = attempt.parts.device.type != "cuda"
        self._asked: Callable[[], Agreement] | None = None

    def next(self, at_once: bool) -> Agreement:
        """Agree with all ranks on what comes next.

        At once where that is asked for, or something is to be done; else it is what
        they put in the last time.

        Every rank must call it.

        Raises on all of them DivergedError where a loss was bad, and ConfigError where
        ranks have other samples of a stream.
        """
        attempt = self.attempt
        attempt.clock.end_span()
        agreed = self._asked() if self._asked is not None else Agreement()
        mine, self._asked = _ask(attempt, self.checkpointing)
        alone_acts = mine.acts and attempt.parts.group.world_size == 1
        if self.waits or at_once or agreed.acts or alone_acts:
            agreed = self._asked()
            self._asked = None
        return agreed


def _ask(
    attempt: Attempt, checkpointing: Checkpointing
) -> tuple[Agreement, Callable[[], Agreement]]:
    """Put in what this rank wants; return it, and a function that waits for all."""
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
    flags = torch.tensor([*astuple(mine), elapsed_s, told, -told], dtype=torch.float64)
    if group.device.type == "cuda":  # where `bad` is
        flags = flags.to(group.device, non_blocking=True)
    flags[_DIVERGED] = attempt.parts.step.bad
    step = attempt.step
    read = to_host(group.max(flags))

    def answer() -> Agreement:
        *flagged, attempt.elapsed_s, most, least = read()
        if most != -least:
            refuse_other_samples(attempt.config.task, row)
        agreed = Agreement(*(bool(flag) for flag in flagged))
        if agreed.diverged:
            checkpointing.settle()
            raise _diverged(attempt, range(max(0, step - AGREE_EVERY_STEPS), step))
        if not agreed.writing:
            checkpointing.advance()
        return agreed

    return mine, answer


def check_replicas(attempt: Attempt) -> None:
    """Raise ConfigError on every rank where a parameter is not the same on all of them."""
    parts = attempt.parts
    if is_sharded(parts.model):
        return
    named = {**dict(parts.model.named_parameters()), **parts.beside}
    if (
        found := find_unlike(
            {name: one for name, one in named.items() if one.requires_grad}, parts.group
        )
    ) is not None:
        name, share = found
        rule = f"has trained ranks apart: at step {attempt.step} `{name}` differs by {share:.1e} of its largest value"
        fix = "change parameters by the optimizer alone, or alike on every rank"
        raise ConfigError("task", attempt.config.task, rule, fix)


def _diverged(attempt: Attempt, last: range) -> DivergedError:
    """What a bad loss in the `last` steps is about: tensor and checkpoint.

    Every rank must call it.
    """
    good = (
        f"; the last good checkpoint is {attempt.checkpoint}"
        if attempt.checkpoint
        else ""
    )
    parts = attempt.parts
    found = next(
        filter(None, parts.group.gather(_find_non_finite(parts, attempt.task, last))),
        None,
    )
    why = f": {found}" if found else ""
    return DivergedError(
        f"the loss became NaN or infinite between steps {last.start} and {last.stop}{why}{good}"
    )


def _find_non_finite(parts: Replica, task: Task, steps: range) -> str | None:
    """Return the first thing that is not finite in `steps`: a sample or a parameter.

    Looked at are the samples of this rank's share, what the task's transform makes of
    them, and all parameters.

    None where all are, or where they cannot be read again.
    """
    try:
        with throwaway(parts.step.forward, dataset=parts.train_feed.dataset):
            again = (
                () if isinstance(parts.train_feed.dataset, Stream) else steps
            )  # a stream only goes forward
            if (
                found := next(
                    filter(None, (_in_step(parts, task, step) for step in again)), None
                )
            ) is not None:
                return found
        for name, parameter in parts.model.named_parameters():
            if not bool(torch.isfinite(local(parameter)).all()):
                return f"parameter `{name}` is not finite"
    except Exception as error:
        logger.debug("the last batches cannot be read again: %s", error)
    return None


def _in_step(parts: Replica, task: Task, step: int) -> str | None:
    sampler = parts.sampler
    epoch, index = sampler.batches.place(step)
    sampler.set_epoch(epoch)
    for rows in sampler.share(index).split(parts.microbatch_size):
        if len(rows) == 0:
            continue
        parts.train_feed.beat()
        with torch.no_grad():
            batch = fetch(parts.train_feed.dataset, rows.tolist(), task.collate)
            if (found := _bad_tensor(batch, rows)) is not None:
                return f"{found} is not finite{FIX}or leave out such samples"
            batch = task.transform(
                map_tensors(lambda tensor: tensor.to(parts.device), batch), True
            )
            if (found := _bad_tensor(batch, rows)) is not None:
                return f"{found} is not finite after transform(){FIX}transform()"
    return None


def _bad_tensor(batch: Batch, rows: Tensor) -> str | None:
    """Name a tensor that is not finite, with the sample where dimension 0 counts them."""
    for name, tensor in named_tensors(batch, "batch"):
        bad = ~torch.isfinite(tensor)
        if not bool(bad.any()):
            continue
        if bad.shape[:1] != rows.shape:
            return name
        first = int(
            rows[
                bad.flatten(1).any(1).nonzero()[0, 0]
                if bad.ndim > 1
                else bad.nonzero()[0, 0]
            ]
        )
        return f"{name} of training sample {first}"
    return None
