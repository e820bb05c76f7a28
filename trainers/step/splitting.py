"""Whether a loss may be split: a step's microbatches and workers add up to it only where it is a weighted mean."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import Dataset

from trainers.data.batch import Batch, fetch, leaves_of, map_tensors
from trainers.model.sharding import is_shard, is_sharded
from trainers.step.evaluation import evaluating
from trainers.step.forward import ForwardPass
from trainers.task import weight_of

logger = logging.getLogger(__name__)

SAMPLES = 8
"""That are looked at."""
_TOLERANCE = 0.01  # of the gradient's norm: far above rounding in float32 or TF32, far below another weighting's
_OF_A_SUM = 1.75  # of 8 samples it is twice the mean of its halves, of 3 1.8 times; a contrastive loss 1.5 times
_NOISE = 3  # times what the same pass differs from itself by
_ROUNDINGS = 16  # of the parameters' own format, where that is a narrower one


def check_loss(
    forward: ForwardPass, dataset: Dataset[Any], order: Tensor, microbatch_size: int, pieces: int
) -> str | None:
    """Return a warning where the gradient of a few samples is not the weighted mean of their halves' gradients.

    For a `throwaway` block. `order` (int64 [n]) are training samples, of which the first are taken; `pieces` is what a
    step is split into, with 1 only of a sum over samples is something said. It is no error, since mixtures of experts
    and contrastive losses are trained so knowingly. Where the pass fails, or what it draws at random changes the
    gradient as much, nothing can be said. Every rank must call it.
    """
    # Two samples where one is a microbatch; not of a sharded model, where one rank must not fail alone.
    rows = order[: min(SAMPLES, microbatch_size if is_sharded(forward.model) else max(2, microbatch_size))]
    if len(rows) == 1:
        return None
    if forward.spec.autocast is not None:
        forward = replace(forward, spec=replace(forward.spec, autocast=None, scaler=False))
    with evaluating(forward.model), forward.alone():
        forward.model.training = True  # what the task looks at; the layers in it are in evaluation mode
        for module in forward.model.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN's backward wants it
        try:
            found = _difference(forward, dataset, rows, only_sums=pieces == 1)
        except Exception as error:  # training says it better
            logger.debug("the loss cannot be split to see: %s", error)
            return None
    if found is None:
        return None
    loss, mean, share = found
    follows = f"the result depends on how a step is split, here into {pieces} pieces"
    if pieces == 1:
        follows = "val_loss depends on the size of its batches, and a step on how it is split"
    fix = "return from weight() what it divides by, such as tokens"
    if _is_sum(loss, mean):
        fix = "divide a sum over samples by their number"
    return (
        f"{forward.said} is no mean over weight(): of {len(rows)} samples it is {loss:.4f}, and {mean:.4f} as the "
        f"mean of two halves (gradients differ by {share:.0%}), so {follows}; {fix}"
    )


def _difference(
    forward: ForwardPass, dataset: Dataset[Any], rows: Tensor, only_sums: bool
) -> tuple[float, float, float] | None:
    """Return the loss of the batch, the weighted mean of its halves', and the share by which their gradients differ;
    None where they do not. `only_sums`: nor where forward passes alone show that it is no sum.
    """

    def read(some: Tensor) -> Batch:
        with torch.no_grad():
            batch = fetch(dataset, some.tolist(), forward.task.collate)
            return forward.task.transform(map_tensors(lambda tensor: tensor.to(forward.device), batch), True)

    batch = again = read(rows)
    parts = rows.tensor_split(2)
    if all(isinstance(leaf, Tensor) and leaf.shape[:1] == rows.shape for leaf in leaves_of(batch)):
        first = len(parts[0])
        halves = [map_tensors(lambda t: t[:first], batch), map_tensors(lambda t: t[first:], batch)]
    else:
        again, *halves = map(read, (rows, *parts))
    weights = [float(weight_of(forward.task, *one)) for one in zip(halves, map(len, parts), strict=True)]
    if not sum(weights):
        return None
    shares = [weight / sum(weights) for weight in weights]
    if only_sums:
        with torch.no_grad():
            loss, *of_halves = (float(forward.loss(part)) for part in (batch, *halves))
        if not _is_sum(loss, sum(share * of_half for share, of_half in zip(shares, of_halves, strict=True))):
            return None
    loss, mean, share = _compare(forward, batch, halves, shares)
    narrow = max((torch.finfo(p.dtype).eps for p in forward.model.parameters() if p.is_floating_point()), default=0.0)
    tolerance = max(_TOLERANCE, _ROUNDINGS * narrow)
    if share <= tolerance:
        return None
    # What is random differs from itself, too; its loss often less than its gradient.
    one, other, noise = _compare(forward, batch, [again], [1.0])
    differs = share > _NOISE * noise or (_is_sum(loss, mean) and abs(loss - mean) > _NOISE * abs(one - other))
    return (loss, mean, share) if differs else None


def _is_sum(loss: float, mean: float) -> bool:
    """Whether the loss of a batch, of which `mean` is the mean of the halves', looks like a sum over its samples."""
    return abs(loss) > _OF_A_SUM * abs(mean)


def _compare(forward: ForwardPass, batch: Batch, parts: list[Batch], shares: list[float]) -> tuple[float, float, float]:
    """Return the batch's loss, the mean of its parts', and how large the difference of their gradients is, beside the
    larger of them.
    """

    def norm() -> float:
        total: Any = get_total_norm([p.grad for p in forward.model.parameters() if p.grad is not None])
        return float(total.full_tensor() if is_shard(total) else total)

    forward.model.zero_grad(set_to_none=True)
    loss = forward.loss(batch)
    loss.backward()
    mean, norms = 0.0, [norm()]
    for part, share in zip(parts, shares, strict=True):
        of_part = forward.loss(part)
        (of_part * -share).backward()
        mean += share * float(of_part.detach())
        norms.append(norm())
    return float(loss.detach()), mean, norms[-1] / (max(norms[:-1]) or 1.0)
