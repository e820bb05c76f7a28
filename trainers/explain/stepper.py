"""Steps of a replica that is built, as training takes them, which are thrown away."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainers.data.stream import Stream
from trainers.devices.device import synchronize
from trainers.measure.clock import WARMUP_STEPS
from trainers.step.replica import Replica

MOST = 400
"""Steps of which plans are made at once, and that are timed together."""

Plan = tuple[list[Tensor], list[int]]


def plans(parts: Replica, pieces: int = 1) -> Iterator[list[Plan]]:
    """Yield the microbatches of the whole steps of each epoch; with `pieces` that many steps' samples as one step of as
    many microbatches as one has.
    """
    sampler, size = parts.sampler, parts.microbatch_size
    whole = max(1, sampler.length // sampler.batches.size(0))
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        steps = [sampler.plan(step, size, parts.even) for step in range(min(whole, MOST))]
        found = []
        for group in zip(*(steps[one::pieces] for one in range(pieces)), strict=False):
            joined = [torch.cat(rows) for rows in zip(*(rows for rows, _ in group), strict=True)]
            found.append((joined, [sum(sizes) for sizes in zip(*(sizes for _, sizes in group), strict=True)]))
        yield found


class Stepper:
    """Takes steps of a replica as training does, without what is due between them."""

    def __init__(self, parts: Replica, pieces: int = 1) -> None:
        self.parts = parts
        if isinstance(stream := parts.train_feed.dataset, Stream):
            stream.begin(0, None, None)
        epochs, again = itertools.tee(plans(parts, pieces))
        self._sizes = (sizes for steps in again for _, sizes in steps)
        rows = ([one for rows, _ in steps for one in rows] for steps in epochs)
        self.batches: Iterator[Any] = itertools.chain.from_iterable(
            parts.train_feed.batches(one, training=True) for one in rows
        )
        self.samples = parts.sampler.step_size(0) * pieces
        """Of a step, over all ranks."""

    @property
    def prepared(self) -> int:
        """Steps whose batches loader processes have ready when nobody takes any."""
        loader = self.parts.train_feed._loader
        batches = loader.num_workers * (loader.prefetch_factor or 2) if loader is not None else 0
        return -(-batches // self.parts.accumulation)

    def step(self) -> None:
        """Take one; where the device is asynchronous it is not waited for."""
        sizes = next(self._sizes)
        self.parts.step(self.batches, sizes, self.samples, idle=not any(sizes))

    def time_s(self, steps: int) -> float:
        """Return the mean time of some steps."""
        synchronize(self.parts.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.parts.device)
        return (time.perf_counter() - began) / steps


def warm(stepper: Stepper, seconds: float, fewest: int = 1) -> int:
    """Take the first steps, and return how many take `seconds`, `fewest` at least: as many on every rank."""
    for _ in range(WARMUP_STEPS):
        stepper.step()
    each = stepper.time_s(2)
    return stepper.parts.group.first(min(MOST, max(fewest, int(seconds / each))))
