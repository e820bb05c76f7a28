"""Does this microbatch fit? Probed locally, without a collective inside; then agreed by all ranks.

Under DDP a rank that runs out of memory leaves the others waiting in all-reduce. So a size is tried on the bare
module first: worst-case batch, forward, backward and optimizer step, everything put back after.
"""

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainers.data.batch import map_tensors, tensors_of
from trainers.devices.device import synchronize
from trainers.devices.group import Group
from trainers.errors import classify
from trainers.model.sharding import is_sharded
from trainers.model.strategy import no_sync
from trainers.step.ceiling import OUT_OF_MEMORY
from trainers.step.forward import ForwardPass
from trainers.step.throwaway import throwaway

logger = logging.getLogger(__name__)

_REFUSED = "cannot be trained: "


@dataclass(frozen=True)
class Probe:
    """Whole steps of a size, to see whether they fit; everything is put back after them."""

    forward: ForwardPass
    """Of the bare module, before DDP has put its hooks into it."""
    optimizer: Optimizer
    """A fresh one."""
    dataset: Dataset[Any]
    group: Group

    def run(self, size: int, passes: int) -> BaseException | None:
        """Take steps of `passes` times `size` samples; return the out-of-memory error that this rank met, if any."""
        error = self._error(size, passes)
        if self.forward.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return error

    def _error(self, size: int, passes: int) -> BaseException | None:
        forward, optimizer, batch = self.forward, self.optimizer, None
        with throwaway(forward, optimizer, self.dataset):
            try:
                for _ in range(2):  # the second with the optimizer's state in memory, as every step but the first
                    optimizer.zero_grad(set_to_none=True)
                    for index in range(passes):
                        with torch.no_grad():
                            batch = forward.task.worst_case_batch(self.dataset, size)
                            batch = map_tensors(lambda tensor: tensor.to(forward.device), batch)
                            batch = forward.task.transform(batch, True)
                        with contextlib.nullcontext() if index == passes - 1 else no_sync(forward.model):
                            forward.loss(batch).backward()
                    optimizer.step()
                    if not tensors_of(list(optimizer.state.values())):
                        break
                synchronize(forward.device)
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    return error.with_traceback(None)  # its frames hold the tensors that did not fit
                if isinstance(error, RuntimeError):
                    forward.explain(error, batch)
                raise
        return None


def choose_microbatch(
    wanted: int | str,
    share: int,
    probe: Probe,
    accumulates: bool = False,
    bounds: tuple[int | None, int | None] = (None, None),
    tell: Callable[[int, bool], None] = lambda size, fits: None,
) -> int:
    """Return the microbatch size: the wanted one, or for `auto` the share split into as few parts as fit.

    `share` is the most samples that a rank has in a step, or the most to try where a step `accumulates` anyway.
    `bounds` are the largest size that is known to fit and the smallest that is known not to: neither is tried again;
    `tell` is called with each size that was tried. Every rank must call it, with equal bounds. Raises the out-of-memory
    error, on every rank, when the wanted size (or, for auto, a single sample) does not fit. So it does when a smaller
    size than one that did not fit meets another error: BatchNorm and losses over pairs refuse a single sample.

    The forward of a sharded model is a collective: there a rank that runs out of memory raises at once, whatever
    is wanted, since the others wait for it and can only be ended from outside.
    """
    known_fit, known_misfit = bounds
    sharded = is_sharded(probe.forward.model)
    too_large = "a larger microbatch ran out of memory" if accumulates and wanted == "auto" and share == 1 else ""
    kind: type[BaseException] = torch.OutOfMemoryError

    def fits(size: int) -> bool:
        """On every rank; raises where there is nothing smaller to try."""
        nonlocal too_large, kind
        last = wanted != "auto" or size == 1
        if known_misfit is not None and size >= known_misfit:
            too_large = f"a microbatch of {known_misfit} is known not to fit"
            if last:
                raise torch.OutOfMemoryError(too_large)
            return False
        if known_fit is not None and size <= known_fit:
            return True
        # The whole gradient of a sharded model is there only while microbatches accumulate: two of them show it.
        refused = ""
        try:
            error = probe.run(size, passes=2 if sharded and (accumulates or size < share) else 1)
        except Exception as other:
            if not too_large:
                raise
            error, refused = other, _REFUSED
        if error is not None and sharded:
            tell(size, False)
            if refused:
                raise kind(f"{too_large}, and one of {size} {refused}{error}") from error
            raise error
        met = probe.group.gather(None if error is None else f"{refused}{type(error).__name__}: {error}".splitlines()[0])
        reason = next((words for words in met if words and words.startswith(_REFUSED)), next(filter(None, met), None))
        if reason is not None and reason.startswith(_REFUSED):
            raise kind(f"{too_large}, and one of {size} {reason}") from error
        tell(size, reason is None)
        if reason is None:
            return True
        if last:
            raise error or torch.OutOfMemoryError(f"a microbatch of {size} did not fit on another rank: {reason}")
        too_large = f"a microbatch of {size} does not fit ({reason})"
        if error is not None and classify(error) == "out_of_host_memory":
            kind = MemoryError
        logger.info("%s", too_large)
        return False

    if wanted != "auto":
        size = min(int(wanted), share)
        fits(size)
        return size
    return fewest_parts(share, fits)


def fewest_parts(share: int, fits: Callable[[int], bool]) -> int:
    """Return the size of the largest part when `share` samples are split into as few even parts as fit.

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
