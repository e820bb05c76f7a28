"""Choose the microbatch: what size fits, and whether the loss may be split at all.

Whether one fits is forecast from a few samples where memory is ample, else probed
locally, without a collective inside; then agreed by all ranks. Under DDP a rank that
runs out of memory leaves the others waiting in all-reduce. So a size is tried on the
bare module first: worst-case batch, forward, backward and optimizer step, everything
put back after.

Only a loss that is a weighted mean adds up over microbatches.
"""

import contextlib
import functools
import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

from trainers.causes import classify
from trainers.data.batch import Batch, fetch, leaves_of, map_tensors, tensors_of
from trainers.data.stream import digest
from trainers.devices.device import (
    free_gpu_bytes,
    get_rng_state,
    synchronize,
    take_spare,
)
from trainers.devices.group import Group
from trainers.errors import MISSING, ConfigError
from trainers.model.sharding import is_shard, is_sharded
from trainers.model.state import modules_beside
from trainers.model.strategy import no_sync
from trainers.step.ceiling import OUT_OF_MEMORY
from trainers.step.evaluation import evaluating
from trainers.step.forward import ForwardPass
from trainers.step.snapshot import throwaway
from trainers.step.train_step import PhasePass
from trainers.task import Task, weight_of

logger = logging.getLogger(__name__)

SAMPLES = 64
"""Among which those are chosen that are looked at; of a TensorDataset among all."""
_AT_ONCE = 8
_MOST_LEAVES = 3
_MOST_NUMBERS = 2**22  # of a leaf that samples are told apart by
# of the gradient's norm: far above rounding in float32 or TF32, far below another
# weighting's
_TOLERANCE = 0.01
# of 8 samples it is twice the mean of its halves, of 3 1.8 times; a contrastive loss
# 1.5 times
_OF_A_SUM = 1.75
_NOISE = 3  # times what the same pass differs from itself by
_DRAWS = 4  # of what is random
_ROUNDINGS = 16  # of the parameters' own format, where that is a narrower one
_REFUSED = "cannot be trained: "
_FEW = 8
"""Samples of the pass from which the memory of a whole microbatch is forecast."""
_MARGIN = 2
"""How many times the forecast must fit into what is free, to need no probe."""
_STATE_COPIES = 4
"""Of the parameters beside them: gradients, DDP's buckets and two moments."""


@dataclass(frozen=True)
class Probe:
    """Take whole steps of a size, to see whether they fit, and put everything back."""

    forward: ForwardPass
    """Of the bare module, before DDP has put its hooks into it."""
    optimizer: Optimizer
    """A fresh one."""
    dataset: Dataset[Any]
    group: Group
    phases: Sequence[PhasePass] = ()
    """Of a step that has some: each is taken."""

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """What a step may take: the forward pass of each phase, or the only one."""
        return self.phases or (self.forward,)

    def run(
        self, size: int, accumulates: bool, with_spare: bool
    ) -> BaseException | None:
        """Return this rank's out-of-memory error in steps of `size`, if any.

        A step that `accumulates` has several such microbatches.

        `with_spare`: it fits only if a little is left.
        """
        error = self._error(size, accumulates, with_spare)
        if self.forward.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return error

    def fits_by_far(self, size: int) -> bool:
        """Return whether memory is so ample on every rank that `size` needs no probe.

        Every rank must call it. Only CUDA counts what a pass takes; whether a forecast
        was right shows in the first step.
        """
        forward = self.forward
        if forward.device.type != "cuda" or is_sharded(forward.model):
            return False
        needed = self._few_bytes * max(1, size / _FEW)
        needed += _STATE_COPIES * sum(
            parameter.nbytes for parameter in forward.model.parameters()
        )
        fits = _MARGIN * needed < free_gpu_bytes(forward.device)
        return all(self.group.gather(fits))

    @functools.cached_property
    def _few_bytes(self) -> float:
        """Memory that a pass of a few samples takes; infinite where it fails.

        The probe explains why.
        """
        device = self.forward.device
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with throwaway(self.forward, dataset=self.dataset):
            try:
                for part in self.passes:
                    with part.alone():
                        part.loss(self.batch(_FEW)).backward()
            except Exception as error:
                logger.debug("memory cannot be forecast: %s", error)
                return math.inf
        return torch.cuda.max_memory_allocated(device) - before

    def _error(
        self, size: int, accumulates: bool, with_spare: bool
    ) -> BaseException | None:
        device = self.forward.device
        with throwaway(self.forward, self.optimizer, self.dataset):
            try:
                spare = take_spare(device) if with_spare else None
                self.take_steps(size, accumulates)
                synchronize(device)
                del spare
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    return error.with_traceback(
                        None
                    )  # its frames hold the tensors that did not fit
                raise
        return None

    def take_steps(self, size: int, accumulates: bool) -> None:
        """Take the first two steps, or one where the second needs no more memory.

        Model and optimizer change.
        """
        optimizer = self.optimizer
        sharded = is_sharded(self.forward.model)
        # The whole gradient of a sharded model is there only while microbatches
        # accumulate: two of them show it. Any other is there beside the activations
        # then, and always as DDP's buckets: it is left for the second step.
        passes = 2 if sharded and accumulates else 1
        stays = not sharded and (accumulates or self.group.world_size > 1)
        for number in range(
            2
        ):  # the second with the optimizer's state in memory, as every step but the first
            if number == 0 or not stays:
                optimizer.zero_grad(set_to_none=True)
            for one, index in itertools.product(self.passes, range(passes)):
                batch = None
                try:
                    batch = self.batch(size)
                    with (
                        one.alone(),
                        contextlib.nullcontext()
                        if index == passes - 1
                        else no_sync(one.model),
                    ):
                        one.loss(batch).backward()
                except RuntimeError as error:
                    if classify(error) not in OUT_OF_MEMORY:
                        one.explain(error, batch)
                    raise
            optimizer.step()
            if not stays and not tensors_of(list(optimizer.state.values())):
                break

    @torch.no_grad()
    def batch(self, size: int) -> Batch:
        """Return the batch of `size` samples that takes most memory, as a step gets it."""
        forward = self.forward
        batch = forward.task.worst_case_batch(self.dataset, size)
        return forward.task.transform(
            map_tensors(lambda tensor: tensor.to(forward.device), batch), True
        )


def choose_microbatch(
    wanted: int | str,
    share: int,
    probe: Probe,
    accumulates: bool = False,
    bounds: tuple[int | None, int | None] = (None, None),
    tell: Callable[[int, bool], None] = lambda size, fits: None,
) -> int:
    """Return the microbatch size: the wanted one, or for `auto` the largest that fits.

    The share is split into as few parts as that takes.

    `share` is the most samples that a rank has in a step, or the most to try where a
    step `accumulates` anyway. `bounds` are the largest size that is known to fit and
    the smallest that is known not to: neither is tried again; `tell` is called with
    each size that was tried. Every rank must call it, with equal bounds. Raises the
    out-of-memory error, on every rank, when the wanted size (or, for auto, a single
    sample) does not fit. So it does when a smaller size than one that did not fit meets
    another error: BatchNorm and losses over pairs refuse a single sample.

    The forward of a sharded model is a collective: there a rank that runs out of memory
    raises at once, whatever is wanted, since the others wait for it and can only be
    ended from outside.
    """
    search = _Search(wanted, share, probe, accumulates, bounds, tell)
    if wanted != "auto":
        size = min(int(wanted), share)
        search.fits(size)
        return size
    return fewest_parts(share, search.fits)


class _Search:
    """Ask all ranks which sizes fit, and remember why larger ones did not."""

    def __init__(
        self,
        wanted: int | str,
        share: int,
        probe: Probe,
        accumulates: bool,
        bounds: tuple[int | None, int | None],
        tell: Callable[[int, bool], None],
    ) -> None:
        self._wanted = wanted
        self._share = share
        self._probe = probe
        self._accumulates = accumulates
        self._known_fit, self._known_misfit = bounds
        self._tell = tell
        self._too_large = ""
        if accumulates and wanted == "auto" and share == 1:
            self._too_large = "a larger microbatch ran out of memory"
        self._kind: type[BaseException] = torch.OutOfMemoryError

    def fits(self, size: int) -> bool:
        """Return whether a size fits on every rank; raise if none smaller is left."""
        last = self._wanted != "auto" or size == 1
        if self._known_misfit is not None and size >= self._known_misfit:
            known = f"a microbatch of {self._known_misfit} is known not to fit"
            self._too_large = known
            if last:
                raise torch.OutOfMemoryError(known)
            return False
        if self._known_fit is not None and size <= self._known_fit:
            return True
        if self._probe.fits_by_far(size):
            return True
        error, reason = self._probed(size, last)
        self._tell(size, reason is None)
        if reason is None:
            return True
        if last:
            other = f"a microbatch of {size} did not fit on another rank: {reason}"
            raise error or torch.OutOfMemoryError(other)
        self._too_large = f"a microbatch of {size} does not fit ({reason})"
        if error is not None and classify(error) == "out_of_host_memory":
            self._kind = MemoryError
        logger.info("%s", self._too_large)
        return False

    def _probed(self, size: int, last: bool) -> tuple[BaseException | None, str | None]:
        """Return this rank's error, and the first reason of any rank."""
        refused = ""
        accumulates = self._accumulates or size < self._share
        try:
            error = self._probe.run(size, accumulates, with_spare=not last)
        except Exception as other:
            if not self._too_large:
                raise
            error = other
            refused = _REFUSED
        if error is not None and is_sharded(self._probe.forward.model):
            self._tell(size, False)
            if not refused:
                raise error
            words = f"{self._too_large}, and one of {size} {refused}{error}"
            raise self._kind(words) from error
        mine = None
        if error is not None:
            mine = f"{refused}{type(error).__name__}: {error}".splitlines()[0]
        met = [words for words in self._probe.group.gather(mine) if words]
        for words in met:
            if words.startswith(_REFUSED):
                sentence = f"{self._too_large}, and one of {size} {words}"
                raise self._kind(sentence) from error
        return error, next(iter(met), None)


def fewest_parts(share: int, fits: Callable[[int], bool]) -> int:
    """Return the largest part when `share` samples are split into the fewest that fit.

    Parts are even.

    Parts are doubled until one fits, then bisected: `fits` is asked at most once for a
    size, and for sizes that are known not to fit no more than that takes. It must raise
    when a single sample does not fit.
    """
    too_few = 0
    parts = 1
    while not fits(-(-share // parts)):
        too_few = parts
        parts = min(2 * parts, share)
    while parts - too_few > 1:
        middle = (parts + too_few) // 2
        size = -(-share // middle)
        is_known_to_fit = size == -(-share // parts)
        is_known_not_to = size == -(-share // too_few)
        if is_known_to_fit or (not is_known_not_to and fits(size)):
            parts = middle
        else:
            too_few = middle
    return -(-share // parts)


def check_loss(
    forward: ForwardPass,
    dataset: Dataset[Any],
    order: Tensor,
    microbatch_size: int,
    pieces: int,
) -> ConfigError | str | None:
    """Check that the gradient of a few samples is the weighted mean of their halves'.

    Returns what to raise, or to warn of, where it is not.

    For a `throwaway` block. `order` (int64 [n]) are training samples, of which the
    first are taken, and then others, whose halves differ in their labels. `pieces` is
    what a step is split into, with 1 only of a sum over samples is something said. A
    task with a weight() of its own is warned, since mixtures of experts and contrastive
    losses are trained so knowingly, and so is one that draws at random. Where the pass
    fails, or what it draws changes the gradient as much, nothing can be said. Every
    rank must call it.
    """
    # Two samples where one is a microbatch; not of a sharded model, where one rank must
    # not fail alone.
    size = min(
        _AT_ONCE,
        microbatch_size if is_sharded(forward.model) else max(2, microbatch_size),
        len(order),
    )
    if size == 1:
        return None
    if forward.spec.autocast is not None:
        forward = replace(
            forward, spec=replace(forward.spec, autocast=None, scaler=False)
        )
    try:
        found = _first_difference(forward, dataset, order, size, only_sums=pieces == 1)
    except ConfigError:
        raise
    except Exception as error:  # training says it better
        logger.debug("the loss cannot be split to see: %s", error)
        return None
    if found is None:
        return None
    loss, mean, share, is_random = found
    follows = f"the result depends on how a step is split, here into {pieces} pieces"
    if pieces == 1:
        follows = (
            "val_loss depends on the size of its batches, and a step on how it is split"
        )
    fix = "return from weight() what it divides by, such as tokens or the sum of the samples' class weights"
    if _is_sum(loss, mean):
        fix = "divide a sum over samples by their number"
    rule = (
        f"is no mean over weight(): of {size} samples it is {loss:.4f}, and {mean:.4f} as the mean of two halves "
        f"(gradients differ by {share:.0%}), so {follows}"
    )
    if pieces == 1 or is_random or type(forward.task).weight is not Task.weight:
        return f"{forward.said} {rule}; {fix}"
    known = "where each piece is meant to be by itself, a weight() that returns the number of samples says so"
    return ConfigError(forward.said, MISSING, rule, f"{fix}; {known}")


def _first_difference(
    forward: ForwardPass,
    dataset: Dataset[Any],
    order: Tensor,
    size: int,
    only_sums: bool,
) -> tuple[float, float, float, bool] | None:
    """Return the first `_difference` of the samples that are looked at."""
    with (
        evaluating(forward.model, *modules_beside(forward.task, forward.model)),
        forward.alone(),
    ):
        # What the task looks at; the layers in it are in evaluation mode.
        forward.model.training = True
        for module in forward.model.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN's backward wants it
        for rows in _choices(forward, dataset, order, size):
            found = _difference(forward, dataset, rows, only_sums=only_sums)
            if only_sums or found is not None:
                return found
    return None


def _choices(
    forward: ForwardPass, dataset: Dataset[Any], order: Tensor, size: int
) -> Iterator[Tensor]:
    """Yield rows of `size` samples: the first, then by each label rare and common ones."""
    yield order[:size]
    pool = order
    leaves = []
    if type(dataset) is TensorDataset:
        pool = torch.arange(len(dataset))
        leaves = list(dataset.tensors)
    else:
        leaves = leaves_of(fetch(dataset, order.tolist(), forward.task.collate))
    labels = [_label(leaf, len(pool)) for leaf in leaves]
    for label in [label for label in labels if label is not None][:_MOST_LEAVES]:
        values, places, counts = torch.unique(
            label, return_inverse=True, return_counts=True
        )
        if len(values) > 1:
            by_value = places.argsort(stable=True)
            chosen = pool[by_value[counts[places[by_value]].argsort(stable=True)]]
            yield torch.cat([chosen[: size // 2], chosen[size // 2 - size :]])


def _label(leaf: Any, samples: int) -> Tensor | None:
    """Return a number by which samples differ: class, weight, or how much is masked.

    None of inputs.
    """
    if (
        not isinstance(leaf, Tensor)
        or leaf.shape[:1] != (samples,)
        or leaf.numel() > _MOST_NUMBERS
    ):
        return None
    if leaf.is_complex() or (leaf.is_floating_point() and leaf.numel() > samples):
        return None
    return leaf.reshape(samples, -1).double().sum(1)


def _difference(
    forward: ForwardPass, dataset: Dataset[Any], rows: Tensor, only_sums: bool
) -> tuple[float, float, float, bool] | None:
    """Return how a batch's loss and gradient differ from their halves'; None if not.

    It is the loss, the halves' weighted mean, the share by which gradients differ, and
    whether anything was drawn at random meanwhile.

    `only_sums`: nor where forward passes alone show that it is no sum.
    """

    def read(some: Tensor) -> Batch:
        with torch.no_grad():
            batch = fetch(dataset, some.tolist(), forward.task.collate)
            return forward.task.transform(
                map_tensors(lambda tensor: tensor.to(forward.device), batch), True
            )

    batch = read(rows)
    parts = rows.tensor_split(2)
    random_state = digest(get_rng_state(forward.device))
    if all(
        isinstance(leaf, Tensor) and leaf.shape[:1] == rows.shape
        for leaf in leaves_of(batch)
    ):
        first = len(parts[0])
        halves = [
            map_tensors(lambda t: t[:first], batch),
            map_tensors(lambda t: t[first:], batch),
        ]
        others: Iterator[Batch] = itertools.repeat(batch)
    else:
        halves = list(map(read, parts))
        others = map(read, itertools.repeat(rows))
    weights = [
        float(weight_of(forward.task, *one))
        for one in zip(halves, map(len, parts), strict=True)
    ]
    if not sum(weights):
        return None
    shares = [weight / sum(weights) for weight in weights]
    if only_sums:
        loss, *of_halves = (
            float(forward.loss(part).detach()) for part in (batch, *halves)
        )
        if not _is_sum(
            loss,
            sum(
                share * of_half
                for share, of_half in zip(shares, of_halves, strict=True)
            ),
        ):
            return None
    loss, mean, share = _compare(forward, batch, halves, shares)
    narrow = max(
        (
            torch.finfo(p.dtype).eps
            for p in forward.model.parameters()
            if p.is_floating_point()
        ),
        default=0.0,
    )
    tolerance = max(_TOLERANCE, _ROUNDINGS * narrow)
    if share <= tolerance:
        return None
    is_random = digest(get_rng_state(forward.device)) != random_state
    # What is random differs from itself, too; its loss often less than its gradient.
    again = [
        _compare(forward, batch, [other], [1.0])
        for other in itertools.islice(others, _DRAWS if is_random else 1)
    ]
    noise = max(share for _, _, share in again)
    noise_of_loss = max(abs(one - other) for one, other, _ in again)
    differs = share > _NOISE * noise or (
        _is_sum(loss, mean) and abs(loss - mean) > _NOISE * noise_of_loss
    )
    return (loss, mean, share, is_random) if differs else None


def _is_sum(loss: float, mean: float) -> bool:
    """Return whether a batch's loss looks like a sum over its samples.

    `mean` is that of the halves.
    """
    return abs(loss) > _OF_A_SUM * abs(mean)


def _compare(
    forward: ForwardPass, batch: Batch, parts: list[Batch], shares: list[float]
) -> tuple[float, float, float]:
    """Return the batch's loss, the mean of its parts', and how gradients differ.

    The difference is a norm, and the larger of theirs stands beside it.
    """

    def norm() -> float:
        total: Any = get_total_norm(
            [p.grad for p in forward.model.parameters() if p.grad is not None]
        )
        return float(total.full_tensor() if is_shard(total) else total)

    forward.model.zero_grad(set_to_none=True)
    loss = forward.loss(batch)
    loss.backward()
    mean = 0.0
    norms = [norm()]
    for part, share in zip(parts, shares, strict=True):
        if share == 0:  # as in training: its loss may be NaN
            norms.append(norm())
            continue
        of_part = forward.loss(part)
        (of_part * -share).backward()
        mean += share * float(of_part.detach())
        norms.append(norm())
    return float(loss.detach()), mean, norms[-1] / (max(norms[:-1]) or 1.0)
