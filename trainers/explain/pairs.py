"""What steps would take without something: pairs of slices of steps with it and without, right after each other.

Every rank must call what is here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainers.config import TrainConfig
from trainers.data.stream import Stream
from trainers.devices.device import synchronize
from trainers.explain.readings import Span
from trainers.explain.segments import stale_reads
from trainers.explain.stepper import Stepper
from trainers.model.strategy import no_sync

_SLICE_S = 0.1
ROUNDS = 8


@dataclass(frozen=True)
class Pair:
    """Two configurations side by side: seconds a sample of each round."""

    rounds: list[tuple[float, float]]

    @property
    def gain(self) -> Span:
        """Share of the time of the first that the second saves, by the geometric mean of the rounds: below 1."""
        of_rounds = Span.of([math.log(new / old) for old, new in self.rounds])
        return Span(*(1 - math.exp(one) for one in (of_rounds.value, of_rounds.high, of_rounds.low)))


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """Return both figures of each round, taken right after each other, the first of them in turn."""
    found = []
    for number in range(rounds):
        if number % 2:
            late = second()
            found.append((first(), late))
        else:
            found.append((first(), second()))
    return found


def sent_share(stepper: Stepper) -> float:
    """Return the share of a step that is gone where gradients are not added up, from pairs of both. It is the slowest
    rank's, so that waiting for it is none of it. The ranks' parameters differ from then on.
    """
    parts = stepper.parts

    def slowest(steps: int) -> float:
        return max(parts.group.gather(stepper.time_s(steps)))

    def alone(steps: int) -> float:
        with no_sync(parts.step.forward.model):
            return slowest(steps)

    steps = parts.group.first(max(1, int(_SLICE_S / stepper.time_s(3))))
    pairs = paired(lambda: slowest(steps), lambda: alone(steps))
    return max(0.0, statistics.median(1 - without / usual for usual, without in pairs))


def fixed_share(stepper: Stepper, config: TrainConfig) -> float | None:
    """Return the share of a step that stays when its samples double, from pairs of both; None where steps of another
    size are compiled anew, or cannot be had.
    """
    parts = stepper.parts
    whole = parts.sampler.length // parts.sampler.batches.size(0)
    fixed_shape = config.compile != "off" or config.cuda_graphs or isinstance(parts.train_feed.dataset, Stream)
    if fixed_shape or whole < 2 or parts.accumulation > 1 or parts.train_feed._loader is not None:
        return None
    doubled = Stepper(parts, pieces=2)
    slice_steps = parts.group.first(max(1, min(4, int(_SLICE_S / doubled.time_s(3)))))
    pairs = paired(lambda: stepper.time_s(slice_steps), lambda: doubled.time_s(slice_steps))
    return min(1.0, max(0.0, statistics.median(2 - double / single for single, double in pairs)))


def is_host_bound(stepper: Stepper) -> bool:
    """Return whether an asynchronous device is done as soon as the host has issued its steps."""
    device = stepper.parts.device
    if device.type == "cpu":
        return False
    synchronize(device)
    began = time.perf_counter()
    for _ in range(2 * ROUNDS):
        stepper.step()
    issued = time.perf_counter() - began
    synchronize(device)
    return issued > 0.9 * (time.perf_counter() - began)


def reads_gain(stepper: Stepper) -> list[float] | None:
    """Return the gain, with its interval, of steps whose host reads wait for nothing; None on a CPU, which has no queue
    that a read would empty.
    """
    if stepper.parts.device.type == "cpu":
        return None
    known: dict[tuple[str, int], Any] = {}

    def stale() -> float:
        with stale_reads(known) as begin:
            begin()
            stepper.step()  # to know what is read
            synchronize(stepper.parts.device)
            began = time.perf_counter()
            for _ in range(4):
                begin()
                stepper.step()
            synchronize(stepper.parts.device)
            return (time.perf_counter() - began) / 4

    gain = Pair(paired(lambda: stepper.time_s(4), stale)).gain
    return [gain.value, gain.low, gain.high]
