"""Does this microbatch fit? Probed locally, without a collective inside; then agreed by all ranks.

Under DDP a rank that runs out of memory leaves the others waiting in all-reduce. So a size is tried on the bare
module first: worst-case batch, forward, backward and optimizer step, everything put back after.
"""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainers.device import synchronize
from trainers.errors import classify
from trainers.parallel import Group
from trainers.precision import PrecisionSpec
from trainers.rng import get_rng_state, set_rng_state
from trainers.task import Task, map_tensors

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("out_of_memory", "out_of_host_memory")


def choose_microbatch(
    wanted: int | str,
    share: int,
    model: nn.Module,
    optimizer: Optimizer,
    task: Task,
    dataset: Dataset[Any],
    spec: PrecisionSpec,
    group: Group,
) -> int:
    """The microbatch size: the wanted one, or for `auto` the first of share, share/2, share/4, ... that fits.

    `model` is the module before DDP has put its hooks into it, `optimizer` a fresh one, `share` the most samples
    that a rank has in a step. Every rank must call it. Raises the out-of-memory error, on every rank, when the
    wanted size (or, for auto, a single sample) does not fit.
    """
    size = share if wanted == "auto" else min(int(wanted), share)
    while True:
        error = _probe(size, model, optimizer, task, dataset, spec, group.device)
        met = group.gather(None if error is None else f"{type(error).__name__}: {error}".splitlines()[0])
        reasons = [reason for reason in met if reason is not None]
        if not reasons:
            return size
        if wanted != "auto" or size == 1:
            raise error or torch.OutOfMemoryError(f"a microbatch of {size} did not fit on another rank: {reasons[0]}")
        logger.info("a microbatch of %d does not fit (%s)", size, reasons[0])
        size = -(-size // 2)


def _probe(
    size: int,
    model: nn.Module,
    optimizer: Optimizer,
    task: Task,
    dataset: Dataset[Any],
    spec: PrecisionSpec,
    device: torch.device,
) -> BaseException | None:
    """One whole step of `size` samples on this rank alone; the out-of-memory error that it met, if any."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    task_state = copy.deepcopy(task.state_dict())
    random_state = get_rng_state(device)
    try:
        with torch.no_grad():
            batch = map_tensors(lambda tensor: tensor.to(device), task.worst_case_batch(dataset, size))
            batch = task.transform(batch, True)
        with spec.autocast_context(device):
            outputs = task.forward(model, spec.convert_batch(batch))
            loss = task.loss(outputs, batch)
        loss.backward()
        optimizer.step()
        synchronize(device)
    except (RuntimeError, MemoryError) as error:
        if classify(error) not in OUT_OF_MEMORY:
            raise
        return error.with_traceback(None)  # its frames hold the tensors that did not fit
    finally:
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        optimizer.load_state_dict(optimizer_state)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        task.load_state_dict(task_state)
        set_rng_state(random_state, device)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return None
