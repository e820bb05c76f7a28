"""What all ranks agree on every few steps: whether to stop, to keep a checkpoint, or to give up."""

import time
from dataclasses import astuple, dataclass, fields

import torch

from trainers.data.stream import refuse_other_samples
from trainers.errors import DivergedError
from trainers.loop.attempt import Attempt
from trainers.loop.checkpointing import Checkpointing
from trainers.step.non_finite import find_non_finite

AGREE_EVERY_STEPS = 10
"""Steps between two agreements of all ranks: the longest that a bad loss or a stop waits."""


@dataclass(frozen=True)
class Agreement:
    """What one rank wants, or, once agreed, what any of them wants."""

    stop: bool = False
    diverged: bool = False
    checkpoint_due: bool = False
    preempted: bool = False
    writing: bool = False
    """Whether a checkpoint is being written in the background."""


_DIVERGED = [field.name for field in fields(Agreement)].index("diverged")


def agree(attempt: Attempt, checkpointing: Checkpointing) -> Agreement:
    """Agree with all ranks on what comes next; raises on all of them DivergedError where a loss was bad, and
    ConfigError where ranks have other samples of a stream.
    """
    attempt.clock.end_span()
    context, max_time_s = attempt.context, attempt.config.max_time_s
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
    if group.device.type == "cuda":  # where `bad` is: so the host waits for the device once, in tolist()
        flags = flags.to(group.device, non_blocking=True)
    flags[_DIVERGED] = attempt.parts.step.bad
    *flagged, attempt.elapsed_s, most, least = group.max(flags).tolist()
    if most != -least:
        refuse_other_samples(attempt.config.task, row)
    agreed = Agreement(*(bool(flag) for flag in flagged))
    if agreed.diverged:
        checkpointing.settle()
        raise _diverged(attempt)
    if not agreed.writing:
        checkpointing.advance()
    return agreed


def _diverged(attempt: Attempt) -> DivergedError:
    """Which steps, tensor and checkpoint a bad loss is about. Every rank must call it."""
    good = f"; the last good checkpoint is {attempt.checkpoint}" if attempt.checkpoint else ""
    last = range(max(0, attempt.step - AGREE_EVERY_STEPS), attempt.step)
    parts = attempt.parts
    found = next(filter(None, parts.group.gather(find_non_finite(parts, attempt.task, last))), None)
    why = f": {found}" if found else ""
    return DivergedError(f"the loss became NaN or infinite between steps {last.start} and {last.stop}{why}{good}")
