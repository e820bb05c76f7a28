"""Where a bad loss came from: looked for once a run has diverged, in what its last steps read and in its parameters."""

import logging

import torch
from torch import Tensor

from trainers.data.batch import Batch, fetch, map_tensors
from trainers.data.stream import Stream
from trainers.errors import FIX
from trainers.model.sharding import local
from trainers.step.device_mismatch import named_tensors
from trainers.step.replica import Replica
from trainers.step.throwaway import throwaway
from trainers.task import Task

logger = logging.getLogger(__name__)


def find_non_finite(parts: Replica, task: Task, steps: range) -> str | None:
    """Return the first thing that is not finite: a sample of this rank's share of `steps`, what the task's transform
    makes of it, or a parameter. None where all are, or where they cannot be read again.
    """
    try:
        with throwaway(parts.step.forward, dataset=parts.train_feed.dataset):
            again = () if isinstance(parts.train_feed.dataset, Stream) else steps  # a stream only goes forward
            if (found := next(filter(None, (_in_step(parts, task, step) for step in again)), None)) is not None:
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
            batch = task.transform(map_tensors(lambda tensor: tensor.to(parts.device), batch), True)
            if (found := _bad_tensor(batch, rows)) is not None:
                return f"{found} is not finite after transform(){FIX}transform()"
    return None


def _bad_tensor(batch: Batch, rows: Tensor) -> str | None:
    """Name a tensor that is not finite, with the sample where its first dimension counts them."""
    for name, tensor in named_tensors(batch, "batch"):
        bad = ~torch.isfinite(tensor)
        if not bool(bad.any()):
            continue
        if bad.shape[:1] != rows.shape:
            return name
        first = int(rows[bad.flatten(1).any(1).nonzero()[0, 0] if bad.ndim > 1 else bad.nonzero()[0, 0]])
        return f"{name} of training sample {first}"
    return None
