"""Choose the microbatch: what size fits, and whether the loss may be split at all.

Whether a size fits is forecast from a few samples if memory is ample.
Otherwise each rank probes it locally, without collectives, and then all ranks
agree: under DDP a rank that ran out of memory would leave the others waiting
in all-reduce. The probe takes whole steps of the bare module with the
worst-case batch, and then restores everything.

Only a loss that is a weighted mean may be accumulated over microbatches.
"""

import functools
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
from trainers.data.batch import (
    Batch,
    fetch,
    leaves_of,
    map_tensors,
    tensors_of,
)
from trainers.data.stream import digest
from trainers.devices.device import (
    free_gpu_bytes,
    get_rng_state,
    let_go,
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
from trainers.task import collate_of, overrides, weight_of

logger = logging.getLogger(__name__)

SAMPLES = 64
"""The number of samples among which `check_loss` chooses; in a TensorDataset, it
chooses among all.
"""
_AT_ONCE = 8
_MOST_LEAVES = 3
_MOST_NUMBERS = 2**22  # in a leaf that may be a label
# Relative to the gradient's norm: far above rounding errors in float32 or
# TF32, far below the effect of another weighting.
_TOLERANCE = 0.01
# A sum over 8 samples is 2 times the mean of its halves', over 3 samples 1.8
# times; a contrastive loss is 1.5 times.
_OF_A_SUM = 1.75
_NOISE = 3  # times the difference between two runs of the same pass
_DRAWS = 4  # repeats of a pass that draws random numbers
_ROUNDINGS = 16  # of the parameters' format, if narrower than float32
_FEW = 8
"""Number of samples in the pass from which a whole microbatch's memory is forecast."""
_MARGIN = 2
"""No probe is needed if free memory is more than this many times the forecast."""
_STATE_COPIES = 4
"""Memory besides the parameters, in multiples of the parameters' memory:
gradients, DDP's buckets and two moments.
"""


@dataclass(frozen=True)
class Probe:
    """Takes throw-away steps of a given size to see whether they fit, then undoes them."""

    forward: ForwardPass
    """The forward pass of the bare module, before DDP adds its hooks."""
    optimizer: Optimizer
    """The optimizer, before its first step."""
    dataset: Dataset[Any]
    group: Group
    phases: Sequence[PhasePass] = ()
    """The phases of a step, if it has any; all of them are run."""
    check: Callable[[], None] = lambda: None
    """Called after the steps; raises ConfigError for state that they left."""

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """The forward passes of a step: one per phase, or the only one."""
        return self.phases or (self.forward,)

    def run(
        self, size: int, accumulates: bool, with_spare: bool
    ) -> BaseException | None:
        """Take steps of `size`; return this rank's out-of-memory error, or None.

        A step that `accumulates` has several such microbatches. With
        `with_spare`, a size fits only if some memory is left over.
        """
        error = self._error(size, accumulates, with_spare)
        let_go(self.forward.device)
        return error

    def fits_by_far(self, size: int) -> bool:
        """Return whether every rank has so much free memory that `size` needs no probe.

        Every rank must call it. Only CUDA reports the memory that a pass
        takes; on other devices, and for a sharded model, the answer is False.
        A wrong forecast shows in the first step.
        """
        forward = self.forward
        if forward.device.type != "cuda" or is_sharded(forward.model):
            return False
        parameters = sum(part.nbytes for part in forward.model.parameters())
        activations = self._few_bytes * max(1, size / _FEW)
        needed = activations + _STATE_COPIES * parameters
        fits = _MARGIN * needed < free_gpu_bytes(forward.device)
        return all(self.group.gather(fits))

    @functools.cached_property
    def _few_bytes(self) -> float:
        """Memory that a pass of a few samples takes; infinite if the pass fails."""
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
                self.check()
                synchronize(device)
                del spare
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    # Its frames hold the tensors that did not fit.
                    return error.with_traceback(None)
                raise
        return None

    def take_steps(self, size: int, accumulates: bool) -> None:
        """Take the first two steps, or just one if the second needs no more memory.

        Changes model and optimizer.
        """
        optimizer = self.optimizer
        sharded = is_sharded(self.forward.model)
        # A sharded model has its whole gradient in memory only while
        # microbatches accumulate, so two are run. Any other model has it in
        # addition to the activations if microbatches accumulate, or if DDP's
        # buckets keep it: it then stays for the second step.
        passes = 2 if sharded and accumulates else 1
        stays = not sharded and (accumulates or self.group.world_size > 1)
        # The second step has the optimizer's state in memory, like every step
        # but the first.
        for number in range(2):
            if number == 0 or not stays:
                optimizer.zero_grad(set_to_none=True)
            for part in self.passes:
                for _ in range(passes - 1):
                    with no_sync(part.model):
                        self._backward(part, size)
                batch = self._backward(part, size)
            optimizer.step()
            del batch  # in memory until here, as in training
            if not stays and not tensors_of(list(optimizer.state.values())):
                break

    def _backward(self, part: ForwardPass, size: int) -> Batch:
        batch = self.batch(size)
        with part.alone():
            part.loss(batch).backward()
        return batch

    def batch(self, size: int) -> Batch:
        """Return the batch of `size` samples that takes the most memory, on the device."""
        with torch.no_grad():
            batch = self.forward.task.worst_case_batch(self.dataset, size)
        return self.forward.prepare(batch)


def choose_microbatch(
    wanted: int | str,
    share: int,
    probe: Probe,
    accumulates: bool = False,
    bounds: tuple[int | None, int | None] = (None, None),
    tell: Callable[[int, bool], None] = lambda size, fits: None,
) -> int:
    """Return the microbatch size: the wanted one, or for `auto` the largest that fits.

    For `auto` the share is split evenly into as few microbatches as possible.

    `share` is the most samples that a rank has in a step, or the most to try
    if a step `accumulates` anyway. `bounds` are the largest size known to fit
    and the smallest known not to; neither is tried again. `tell` is called
    with each size that was tried. Every rank must call it, with equal bounds.
    Raises the out-of-memory error, on every rank, if the wanted size (for
    auto: a single sample) does not fit. Also raises it if a size did not fit
    and a smaller size fails with another error, as BatchNorm and losses over
    pairs refuse a single sample.

    The forward of a sharded model is a collective. There a rank that runs out
    of memory raises immediately, because the other ranks are already waiting
    for it and can only be ended from outside.
    """
    search = _Search(wanted, share, probe, accumulates, bounds, tell)
    if accumulates and wanted == "auto" and share == 1:
        search.too_large = "a larger microbatch ran out of memory"
    if wanted != "auto":
        size = min(int(wanted), share)
        search.fits(size)
        return size
    return fewest_parts(share, search.fits)


@dataclass
class _Search:
    """Tries sizes on all ranks, and remembers why larger ones did not fit."""

    wanted: int | str
    share: int
    probe: Probe
    accumulates: bool
    bounds: tuple[int | None, int | None]
    tell: Callable[[int, bool], None]
    too_large: str = ""
    """Why a larger size did not fit."""
    kind: type[BaseException] = torch.OutOfMemoryError
    """The out-of-memory error to raise."""

    def fits(self, size: int) -> bool:
        """Return whether a size fits on every rank; raise if it was the last to try."""
        last = self.wanted != "auto" or size == 1
        known_fit, known_misfit = self.bounds
        if known_misfit is not None and size >= known_misfit:
            self.too_large = (
                f"a microbatch of {known_misfit} is known not to fit"
            )
            if last:
                raise torch.OutOfMemoryError(self.too_large)
            return False
        if known_fit is not None and size <= known_fit:
            return True
        if self.probe.fits_by_far(size):
            return True
        error, reason = self._probed(size, last)
        self.tell(size, reason is None)
        if reason is None:
            return True
        if last:
            raise error or torch.OutOfMemoryError(
                f"a microbatch of {size} did not fit on another rank: {reason}"
            )
        self.too_large = f"a microbatch of {size} does not fit ({reason})"
        if error is not None and classify(error) == "out_of_host_memory":
            self.kind = MemoryError
        logger.info("%s", self.too_large)
        return False

    def _probed(
        self, size: int, last: bool
    ) -> tuple[BaseException | None, str | None]:
        """Return this rank's error, and the reason of the first rank that failed."""
        accumulates = self.accumulates or size < self.share
        try:
            error = self.probe.run(size, accumulates, with_spare=not last)
        except Exception as other:
            if not self.too_large or isinstance(other, ConfigError):
                raise
            words = f"{self.too_large}, and one of {size} cannot be trained"
            error = self.kind(f"{words}: {type(other).__name__}: {other}")
            error.__cause__ = other
        if error is not None and is_sharded(self.probe.forward.model):
            self.tell(size, False)
            raise error  # other ranks wait in the model's forward
        mine = None
        if error is not None:
            mine = f"{type(error).__name__}: {error}".splitlines()[0]
        reasons = filter(None, self.probe.group.gather(mine))
        return error, next(reasons, None)


def fewest_parts(share: int, fits: Callable[[int], bool]) -> int:
    """Split `share` samples evenly into the fewest fitting parts; return the largest size.

    The number of parts is doubled until they fit, then bisected. `fits` is
    asked at most once per size, and must raise if a single sample does not
    fit.
    """

    def size(parts: int) -> int:
        return -(-share // parts)

    too_few = 0
    parts = 1
    while not fits(size(parts)):
        too_few = parts
        parts = min(2 * parts, share)
    while parts - too_few > 1:
        middle = (parts + too_few) // 2
        is_known_to_fit = size(middle) == size(parts)
        is_known_not_to = size(middle) == size(too_few)
        if is_known_to_fit or (not is_known_not_to and fits(size(middle))):
            parts = middle
        else:
            too_few = middle
    return size(parts)


def check_loss(
    forward: ForwardPass,
    dataset: Dataset[Any],
    order: Tensor,
    microbatch_size: int,
    pieces: int,
) -> ConfigError | str | None:
    """Check that a few samples' gradient is the weighted mean of its halves' gradients.

    Returns an error or a warning if it is not, and None if it is. Also returns
    None if nothing can be concluded, because the pass fails, or because its
    random draws change the gradient as much as the halving does.

    `order` (int64 [n]) lists training samples. The first are checked, then
    others whose halves differ in their labels. `pieces` is how many
    microbatches a step has over all ranks; with 1, only a loss that is a sum
    over samples is reported. A task with its own weight() gets a warning
    rather than an error, since mixtures of experts and contrastive losses are
    knowingly trained that way; a task that draws random numbers gets a warning
    as well. Call it in a `throwaway` block, on every rank.
    """
    # At least two samples, even if a microbatch has one; but not for a sharded
    # model, whose ranks must all fail together.
    least = 1 if is_sharded(forward.model) else 2
    size = min(_AT_ONCE, max(least, microbatch_size), len(order))
    if size == 1:
        return None
    if forward.spec.autocast is not None:
        spec = replace(forward.spec, autocast=None, scaler=False)
        forward = replace(forward, spec=spec)
    try:
        found = _first_difference(
            forward, dataset, order, size, only_sums=pieces == 1
        )
    except ConfigError:
        raise
    except Exception as error:  # training reports it better
        logger.debug("the loss cannot be tried in halves: %s", error)
        return None
    if found is None:
        return None
    loss, mean, share, is_random = found
    follows = (
        f"the result depends on how a step is split, here into {pieces} pieces"
    )
    if pieces == 1:
        follows = "val_loss depends on the size of its batches, and a step on how it is split"
    fix = "return from weight() what the loss divides by, such as tokens or the sum of the samples' class weights"
    if _is_sum(loss, mean):
        fix = "divide a sum over samples by their number"
    rule = (
        f"is not a mean over weight(): it is {loss:.4f} for {size} samples at once, and {mean:.4f} as the mean of two halves "
        f"(gradients differ by {share:.0%}), so {follows}"
    )
    if pieces == 1 or is_random or overrides(forward.task, "weight"):
        return f"{forward.said} {rule}; {fix}"
    known = "if each piece is meant to have its own loss, let weight() return the number of samples"
    return ConfigError(forward.said, MISSING, rule, f"{fix}; {known}")


def _first_difference(
    forward: ForwardPass,
    dataset: Dataset[Any],
    order: Tensor,
    size: int,
    only_sums: bool,
) -> tuple[float, float, float, bool] | None:
    """Return the first `_difference` among the choices of samples, or None."""
    with (
        evaluating(
            forward.model, *modules_beside(forward.task, forward.model)
        ),
        forward.alone(),
    ):
        # The task may read this flag; the layers stay in evaluation mode.
        forward.model.training = True
        for module in forward.model.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN's backward needs it
        for rows in _choices(forward, dataset, order, size):
            found = _difference(forward, dataset, rows, only_sums)
            if only_sums or found is not None:
                return found
    return None


def _choices(
    forward: ForwardPass, dataset: Dataset[Any], order: Tensor, size: int
) -> Iterator[Tensor]:
    """Yield choices of `size` rows: the first ones, then half rare, half common labels."""
    yield order[:size]
    pool = order
    leaves = []
    if type(dataset) is TensorDataset:
        pool = torch.arange(len(dataset))
        leaves = list(dataset.tensors)
    else:
        leaves = leaves_of(
            fetch(dataset, order.tolist(), collate_of(forward.task))
        )
    labels = [leaf for leaf in leaves if _is_label(leaf, len(pool))]
    for leaf in labels[:_MOST_LEAVES]:
        label = leaf.reshape(len(pool), -1).double().sum(1)
        values, places, counts = torch.unique(
            label, return_inverse=True, return_counts=True
        )
        if len(values) > 1:
            by_value = places.argsort(stable=True)
            by_count = counts[places[by_value]].argsort(stable=True)
            chosen = pool[by_value[by_count]]
            yield torch.cat([chosen[: size // 2], chosen[size // 2 - size :]])


def _is_label(leaf: Any, samples: int) -> bool:
    """Whether a leaf is small enough to be a label, weight or mask, not an input."""
    if not isinstance(leaf, Tensor) or leaf.shape[:1] != (samples,):
        return False
    most = samples if leaf.is_floating_point() else _MOST_NUMBERS
    return leaf.numel() <= min(most, _MOST_NUMBERS) and not leaf.is_complex()


def _difference(
    forward: ForwardPass, dataset: Dataset[Any], rows: Tensor, only_sums: bool
) -> tuple[float, float, float, bool] | None:
    """Compare a batch's loss and gradient with those of its halves; None if they agree.

    Returns the batch's loss, the halves' weighted mean, the relative
    difference of the gradients, and whether random numbers were drawn
    meanwhile.

    With `only_sums`, also returns None if the forward passes already show that
    the loss is not a sum.
    """
    batch = forward.read(dataset, rows)
    parts = rows.tensor_split(2)
    random_state = digest(get_rng_state(forward.device))
    leaves = leaves_of(batch)
    can_be_cut = all(
        isinstance(t, Tensor) and t.shape[:1] == rows.shape for t in leaves
    )
    if can_be_cut:
        first = len(parts[0])
        halves = [
            map_tensors(lambda t: t[:first], batch),
            map_tensors(lambda t: t[first:], batch),
        ]
    else:
        halves = [forward.read(dataset, part) for part in parts]
    weights = [
        float(weight_of(forward.task, half, len(part)))
        for half, part in zip(halves, parts, strict=True)
    ]
    if not sum(weights):
        return None
    shares = [weight / sum(weights) for weight in weights]
    if only_sums:
        loss, *of_halves = (
            float(forward.loss(b).detach()) for b in (batch, *halves)
        )
        weighted = zip(shares, of_halves, strict=True)
        if not _is_sum(
            loss, sum(share * of_half for share, of_half in weighted)
        ):
            return None
    loss, mean, share = _compare(forward, batch, halves, shares)
    formats = {
        p.dtype for p in forward.model.parameters() if p.is_floating_point()
    }
    roundings = [_ROUNDINGS * torch.finfo(dtype).eps for dtype in formats]
    if share <= max([_TOLERANCE, *roundings]):
        return None
    is_random = digest(get_rng_state(forward.device)) != random_state
    # A pass with random draws also differs from itself, in its loss often less
    # than in its gradient.
    others = []
    for _ in range(_DRAWS if is_random else 1):
        other = batch if can_be_cut else forward.read(dataset, rows)
        others.append(_compare(forward, batch, [other], [1.0]))
    noise = max(share for _, _, share in others)
    noise_of_loss = max(abs(loss - again) for loss, again, _ in others)
    is_sum = _is_sum(loss, mean) and abs(loss - mean) > _NOISE * noise_of_loss
    if is_sum or share > _NOISE * noise:
        return loss, mean, share, is_random
    return None


def _is_sum(loss: float, mean: float) -> bool:
    """Return whether a batch's loss looks like a sum over its samples.

    `mean` is the mean of its halves' losses.
    """
    return abs(loss) > _OF_A_SUM * abs(mean)


def _compare(
    forward: ForwardPass, batch: Batch, parts: list[Batch], shares: list[float]
) -> tuple[float, float, float]:
    """Return a batch's loss, its parts' mean loss, and how far gradients differ.

    The parts' gradients are subtracted in turn from the batch's. The last
    figure is the norm of what remains, relative to the largest norm on the
    way.
    """

    def norm() -> float:
        gradients = [
            p.grad for p in forward.model.parameters() if p.grad is not None
        ]
        total: Any = get_total_norm(gradients)
        return float(total.full_tensor() if is_shard(total) else total)

    forward.model.zero_grad(set_to_none=True)
    loss = forward.loss(batch)
    loss.backward()
    mean = 0.0
    norms = [norm()]
    for part, share in zip(parts, shares, strict=True):
        if share:  # as in training: without weight, its loss may be NaN
            of_part = forward.loss(part)
            (of_part * -share).backward()
            mean += share * float(of_part.detach())
        norms.append(norm())
    return float(loss.detach()), mean, norms[-1] / (max(norms[:-1]) or 1.0)
