"""What is checked and tried before the first step, without a trace in the run.

States that no checkpoint could restore are refused, the microbatch is found,
and throw-away passes examine the task, on every rank.
"""

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from trainers.checkpoint.validation import loadable
from trainers.context import RunContext
from trainers.data.sampler import StepSampler, check_apart
from trainers.devices.group import Group
from trainers.errors import ConfigError, shorten
from trainers.loop.data import tell_samples
from trainers.model.sharding import is_sharded
from trainers.model.strategy import Replicated, no_sync
from trainers.step.ceiling import Ceiling
from trainers.step.evaluation import check_evaluation
from trainers.step.flops import count_flops
from trainers.step.forward import ForwardPass
from trainers.step.microbatch import (
    SAMPLES,
    Probe,
    check_loss,
    choose_microbatch,
)
from trainers.step.snapshot import CollectiveWatch, throwaway
from trainers.step.train_step import Replica, Trained
from trainers.task import Task

logger = logging.getLogger(__name__)


def check_states(trained: Trained, task: Task) -> None:
    """Raise ConfigError now, not after a crash, for state that no checkpoint restores."""
    for part in (task, trained.optimizer, trained.model):
        loadable(part.state_dict(), f"{type(part).__name__}.state_dict()")


def find_microbatch(
    probe: Probe,
    share: int,
    wanted: int | str,
    ceiling: Ceiling,
    context: RunContext,
) -> int:
    """Return the microbatch size; a rank has at most `share` samples in a step."""
    group = probe.group
    known = ceiling.read() if group.rank == 0 else None
    known, bounds = group.first((known, context.microbatch_bounds))
    largest = share
    if wanted == "auto":
        largest = min(share, known or share)
    tried = [largest]

    def tell(size: int, fits: bool) -> None:
        tried.append(size)
        context.fits(size, fits)

    accumulates = largest < share
    try:
        return choose_microbatch(
            wanted, largest, probe, accumulates, bounds, tell
        )
    except (RuntimeError, MemoryError) as error:
        # The other ranks of a sharded model still wait in its forward.
        if is_sharded(probe.forward.model):
            ceiling.refuse(error, tried[-1])
        raise
    except ValueError as error:
        _refuse_single(error, "microbatch_size", wanted)
        raise


def _refuse_single(error: ValueError, field: str, value: object) -> None:
    """Raise ConfigError for BatchNorm's complaint about one sample; else return."""
    if "more than 1 value per channel" in str(error):
        raise ConfigError(
            field,
            value,
            "leaves a worker a microbatch of one sample, which BatchNorm cannot normalise",
            "choose a batch size that leaves each worker at least two samples of every step, or set `drop_last: true`",
        ) from error


@dataclass
class Seen:
    """What throw-away passes found, to become fields of the Replica."""

    flops_per_sample: float | None
    samples: str
    held_back: str
    even: bool
    warnings: list[str]


def look_first(
    probe: Probe,
    sampler: StepSampler,
    last: int,
    size: int,
    pieces: int,
    val: Dataset[Any] | None,
    at_once: int,
    context: RunContext,
) -> Seen:
    """Run the throw-away passes before training, the same ones on every rank.

    Microbatches have `size` samples, and all ranks together split a step into
    `pieces`. `last` is the last step of the first epoch, or of a shorter run.
    Evaluations take `at_once` samples at a time.
    """
    train = probe.dataset
    forward = probe.forward
    model = forward.model
    group = probe.group
    planned = [*sampler.plan(0, size)[0], *sampler.plan(last, size)[0]]
    has_singles = any(group.gather(min(map(len, planned)) == 1))
    watch = CollectiveWatch()
    with throwaway(forward, dataset=(train, val)):
        with watch if group.world_size > 1 else contextlib.nullcontext():
            rows = sampler.rows(0, SAMPLES)
            # First, while the model is as it was made.
            found = [
                check_loss(part, train, rows, size, pieces)
                for part in probe.passes
            ]
            if has_singles and _has(model, _BatchNorm):
                _try_single(probe, sampler.anchor(0))
            microbatch = sampler.rows(0, size)
            flops_per_sample = count_flops(
                forward, train, microbatch, probe.phases
            )
        samples = tell_samples(train)
        held_back = tell_samples(val)
        found.append(check_apart(train, val))
        found.append(_left_in_float64(forward))
        if val is not None and not is_sharded(model):
            context.enter("evaluation")
            found.append(check_evaluation(forward, val, at_once))
    warnings = _said(found, group)
    # SyncBatchNorm is also looked for: some models ran no training pass above.
    syncs = group.world_size > 1 and _has(model, nn.SyncBatchNorm)
    even = is_sharded(model) or any(group.gather(watch.seen or syncs))
    return Seen(flops_per_sample, samples, held_back, even, warnings)


def _has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def _try_single(probe: Probe, row: Tensor) -> None:
    """Raise ConfigError if BatchNorm refuses a microbatch of one sample.

    The last microbatch of an epoch may have just one sample.
    """
    batch = probe.forward.read(probe.dataset, row)
    try:
        if not probe.phases:
            with torch.no_grad():
                probe.forward(batch, with_loss=False)
        for phase in probe.phases:
            with phase.alone():
                phase.loss(batch)
    except ValueError as error:
        _refuse_single(error, "drop_last", False)
        raise


def _left_in_float64(forward: ForwardPass) -> str | None:
    """Return a warning that names parameters which the precision leaves in float64."""
    spec = forward.spec
    if spec.name == "fp32" or spec.parameters is not None:
        return None
    named = forward.model.named_parameters()
    left = [name for name, weight in named if weight.dtype == torch.float64]
    words = f"precision {spec.name} leaves these parameters in float64"
    return f"{words}: {shorten(left)}" if left else None


def _said(found: list[ConfigError | str | None], group: Group) -> list[str]:
    """Log and return rank 0's warnings; raise rank 0's first error on every rank."""
    warnings: list[str] = []
    for words in group.first(found):
        if isinstance(words, ConfigError):
            raise words
        if words is not None:
            warnings.append(words)
    if group.rank == 0:
        for warning in warnings:
            logger.warning("%s", warning)
    return warnings


def settle_buckets(replica: Replica, wrapped: Replicated) -> None:
    """Run throw-away passes that settle how DDP averages gradients.

    In the first, each rank uses its own samples without communicating, to see
    whether DDP can average the gradients of the loss. If it can, two passes
    with averaging follow: DDP rebuilds its buckets after the first backward
    pass, and a resumed run must sum gradients in the same order as an
    uninterrupted one.
    """
    sampler = replica.sampler
    # Training's microbatch size is known to fit, and another size would be
    # compiled for nothing. No loader process reads the samples: its random
    # state would carry over into training.
    size = replica.microbatch_size
    anchor = sampler.anchor(0)
    share = sampler.share(0)[:size] if sampler.known_length else anchor
    own = torch.cat([share, anchor.repeat(size - len(share))])
    why = _pass_through(replica, wrapped, own, alone=True)
    why = next(filter(None, replica.group.gather(why)), None)
    if why is not None:
        replica.step.average_by_hand(why)
        return
    for _ in range(2):
        _pass_through(replica, wrapped, anchor.repeat(size), alone=False)


def _pass_through(
    replica: Replica, wrapped: Replicated, rows: Tensor, alone: bool
) -> str | None:
    """Run a pass of a microbatch; return why DDP cannot average its gradients, or None."""
    forward = replica.step.forward
    dataset = replica.train_feed.dataset
    with throwaway(forward, dataset=dataset):
        batch = forward.read(dataset, rows)
        wrapped.called = False
        try:
            with no_sync(wrapped) if alone else contextlib.nullcontext():
                (forward.loss(batch) * 0.0).backward()
        except (RuntimeError, MemoryError) as error:
            replica.ceiling.refuse(error, len(rows))
            raise
        return wrapped.unfit()
