"""Does this microbatch fit?

Forecast from a few samples where memory is ample, else probed locally, without a
collective inside; then agreed by all ranks.

Under DDP a rank that runs out of memory leaves the others waiting in all-reduce. So a
size is tried on the bare module first: worst-case batch, forward, backward and
optimizer step, everything put back after.
"""

import contextlib
import functools
import gc
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainers.causes import classify
from trainers.data.batch import Batch, map_tensors, tensors_of
from trainers.devices.device import free_gpu_bytes, synchronize, take_spare
from trainers.devices.group import Group
from trainers.model.sharding import is_sharded
from trainers.model.strategy import no_sync
from trainers.step.ceiling import OUT_OF_MEMORY
from trainers.step.forward import ForwardPass
from trainers.step.phased_step import PhasePass
from trainers.step.throwaway import throwaway

logger = logging.getLogger(__name__)

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
