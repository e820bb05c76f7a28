"""Check that a loss may be split: only a weighted mean adds up over microbatches."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import Dataset, TensorDataset

from trainers.data.batch import Batch, fetch, leaves_of, map_tensors
from trainers.data.stream_reader import digest
from trainers.devices.rng import get_rng_state
from trainers.errors import MISSING, ConfigError
from trainers.model.beside import modules_beside
from trainers.model.sharding import is_shard, is_sharded
from trainers.step.evaluation import evaluating
from trainers.step.forward import ForwardPass
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
