"""Does this microbatch fit? Probed locally, without a collective inside; then agreed by all ranks.

Under DDP a rank that runs out of memory leaves the others waiting in all-reduce. So a size is tried on the bare
module first: worst-case batch, forward, backward and optimizer step, everything put back after.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainers.data.transfer import raise_if_mismatch
from trainers.devices.device import synchronize
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.errors import classify
from trainers.model.precision import PrecisionSpec
from trainers.model.strategy import Group, is_sharded, local, no_sync
from trainers.task import Task, map_tensors, tensors_of

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
    accumulates: bool = False,
    bounds: tuple[int | None, int | None] = (None, None),
    tell: Callable[[int, bool], None] = lambda size, fits: None,
) -> int:
    """The microbatch size: the wanted one, or for `auto` the share split into as few parts as fit.

    `model` is the module before DDP has put its hooks into it, `optimizer` a fresh one, `share` the most samples
    that a rank has in a step, or the most to try where a step `accumulates` anyway. `bounds` are the largest size that
    is known to fit and the smallest that is known not to: neither is tried again; `tell` hears of each size that was
    tried. Every rank must call it, with equal bounds. Raises the out-of-memory error, on every rank, when the wanted
    size (or, for auto, a single sample) does not fit.

    The forward of a sharded model is a collective: there a rank that runs out of memory raises at once, whatever
    is wanted, since the others wait for it and can only be ended from outside.
    """

    def fits(size: int) -> bool:
        """On every rank; raises where there is nothing smaller to try."""
        known_fit, known_misfit = bounds
        if known_misfit is not None and size >= known_misfit:
            if wanted != "auto" or size == 1:
                raise torch.OutOfMemoryError(f"a microbatch of {known_misfit} is known not to fit")
            return False
        if known_fit is not None and size <= known_fit:
            return True
        # The whole gradient of a sharded model is there only while microbatches accumulate: two of them show it.
        passes = 2 if is_sharded(model) and (accumulates or size < share) else 1
        error = _probe(size, passes, model, optimizer, task, dataset, spec, group.device)
        if error is not None and is_sharded(model):
            tell(size, False)
            raise error
        met = group.gather(None if error is None else f"{type(error).__name__}: {error}".splitlines()[0])
        reasons = [reason for reason in met if reason is not None]
        tell(size, not reasons)
        if reasons and (wanted != "auto" or size == 1):
            raise error or torch.OutOfMemoryError(f"a microbatch of {size} did not fit on another rank: {reasons[0]}")
        if reasons:
            logger.info("a microbatch of %d does not fit (%s)", size, reasons[0])
        return not reasons

    if wanted != "auto":
        size = min(int(wanted), share)
        fits(size)
        return size
    return fewest_parts(share, fits)


def fewest_parts(share: int, fits: Callable[[int], bool]) -> int:
    """The size of the largest part when `share` samples are split into as few even parts as fit.

    Parts are doubled until one fits, then bisected: `fits` is asked at most once for a size, and for sizes that are
    known not to fit no more than that takes. It must raise when a single sample does not fit.
    """
    too_few, parts = 0, 1
    while not fits(-(-share // parts)):
        too_few, parts = parts, min(2 * parts, share)
    while parts - too_few > 1:
        middle = (parts + too_few) // 2
        size = -(-share // middle)
        if size == -(-share // parts) or (size != -(-share // too_few) and fits(size)):
            parts = middle
        else:
            too_few = middle
    return -(-share // parts)


def _probe(
    size: int,
    passes: int,
    model: nn.Module,
    optimizer: Optimizer,
    task: Task,
    dataset: Dataset[Any],
    spec: PrecisionSpec,
    device: torch.device,
) -> BaseException | None:
    """Whole steps of `passes` times `size` samples; the out-of-memory error that this rank met in it, if any."""
    tensors = [local(tensor) for tensor in (*model.parameters(), *model.buffers())]
    before = [tensor.to("cpu", copy=True) for tensor in tensors]
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    task_state = copy.deepcopy(task.state_dict())
    random_state = get_rng_state(device)
    batch = None
    try:
        for _ in range(2):  # the second with the optimizer's state in memory, as every step but the first
            optimizer.zero_grad(set_to_none=True)
            for index in range(passes):
                with torch.no_grad():
                    batch = map_tensors(lambda tensor: tensor.to(device), task.worst_case_batch(dataset, size))
                    batch = task.transform(batch, True)
                with contextlib.nullcontext() if index == passes - 1 else no_sync(model):
                    with spec.autocast_context(device):
                        outputs = task.forward(model, spec.convert_batch(batch))
                        loss = task.loss(outputs, batch)
                    loss.backward()
            optimizer.step()
            if not tensors_of(list(optimizer.state.values())):
                break
        synchronize(device)
    except (RuntimeError, MemoryError) as error:
        if classify(error) not in OUT_OF_MEMORY:
            if isinstance(error, RuntimeError):
                raise_if_mismatch(error, task, model, batch, device)
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
