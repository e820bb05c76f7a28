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
from trainers.step.throwaway import throwaway

logger = logging.getLogger(__name__)

_SAMPLES = 8
_TOLERANCE = 0.01  # of the gradient's norm: far above rounding in float32 or TF32, far below another weighting's
_ROUNDINGS = 16  # of the parameters' own format, where that is a narrower one


def check_loss(
    forward: ForwardPass, dataset: Dataset[Any], order: Tensor, microbatch_size: int, pieces: int
) -> str | None:
    """Return a warning where the gradient of a few samples is not the weighted mean of their halves' gradients.

    `order` (int64 [n]) are training samples, of which the first are taken in a throw-away pass; `pieces` is what a step
    is split into, with 1 nothing is looked at. It is no error, since mixtures of experts and contrastive losses are
    trained so knowingly. Where the pass fails or draws random numbers, nothing can be said. Every rank must call it.
    """
    # Two samples where one is a microbatch; not of a sharded model, where one rank must not fail alone.
    rows = order[: min(_SAMPLES, microbatch_size if is_sharded(forward.model) else max(2, microbatch_size))]
    if pieces == 1 or len(rows) == 1:
        return None
    if forward.spec.autocast is not None:
        forward = replace(forward, spec=replace(forward.spec, autocast=None, scaler=False))
    with throwaway(forward, dataset=dataset), evaluating(forward.model):
        forward.model.training = True  # what the task looks at; the layers in it are in evaluation mode
        for module in forward.model.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN's backward wants it
        try:
            found = _difference(forward, dataset, rows)
        except Exception as error:  # training says it better
            logger.debug("the loss cannot be split to see: %s", error)
            return None
    if found is None:
        return None
    loss, mean, share = found
    return (
        f"loss() is no mean over weight(): of {len(rows)} samples it is {loss:.4f}, and {mean:.4f} as the mean of two "
        f"halves (gradients differ by {share:.0%}), so the result depends on how a step is split, here into {pieces} "
        "pieces; return from weight() what loss() divides by, such as tokens; a loss that compares the samples of a "
        "batch is whole on one worker with `microbatch_size` as large as the global batch"
    )


def _difference(forward: ForwardPass, dataset: Dataset[Any], rows: Tensor) -> tuple[float, float, float] | None:
    """Return the loss of the batch, the weighted mean of its halves', and the share by which their gradients differ."""

    def read(some: Tensor) -> Batch:
        with torch.no_grad():
            batch = fetch(dataset, some.tolist(), forward.task.collate)
            return forward.task.transform(map_tensors(lambda tensor: tensor.to(forward.device), batch), True)

    batch = again = read(rows)
    if all(isinstance(leaf, Tensor) and leaf.shape[:1] == rows.shape for leaf in leaves_of(batch)):
        first = -(-len(rows) // 2)
        halves = [map_tensors(lambda t: t[:first], batch), map_tensors(lambda t: t[first:], batch)]
    else:
        again, *halves = map(read, (rows, *rows.tensor_split(2)))
    weights = [float(forward.task.weight(half)) for half in halves]
    if not sum(weights):
        return None
    loss, mean, share = _compare(forward, batch, halves, [weight / sum(weights) for weight in weights])
    narrow = max((torch.finfo(p.dtype).eps for p in forward.model.parameters() if p.is_floating_point()), default=0.0)
    tolerance = max(_TOLERANCE, _ROUNDINGS * narrow)
    # What is random differs from itself, too.
    differs = share > tolerance and not _compare(forward, batch, [again], [1.0])[2] > tolerance
    return (loss, mean, share) if differs else None


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
