"""Times some steps of a run by their parts, on workers; the steps are thrown away.

All time belongs to one part at a time, so that the parts add up to the step. Where the
device is asynchronous each change of part waits for it. What is timed is patched for a
block, and never in training.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from trainers.context import RunContext
from trainers.data.feed import Copies
from trainers.data.stream import Stream
from trainers.devices.device import synchronize
from trainers.json_data import validated
from trainers.launch.signals import end_at_once
from trainers.launch.spec import Job
from trainers.loop.build import build_replica
from trainers.measure.clock import WARMUP_STEPS
from trainers.model.strategy import no_sync
from trainers.step.flops import device_peak
from trainers.step.replica import Replica

HOST_READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
)
"""Methods of a tensor that wait for the device and give its values to the host."""
_FEWEST = 12
_MOST = 400
_FASTER_FORMAT = 1.5


@dataclass(frozen=True)
class StepProfile:
    """What steps have taken; means over steps and ranks."""

    step_s: float
    """Of a step as training takes it."""
    parts: dict[str, float]
    """Seconds by part, of steps that wait for the device at each part."""
    own_s: list[float]
    """By rank: a step without adding up gradients, and without waiting for other ranks.
    """
    reads: dict[str, float]
    """Seconds of a step in which the task reads values of the device, by `file:line`,
    on rank 0.
    """
    accumulation: int
    device: str
    busy_s: float | None = None
    """Of a step: what the kernels of a GPU run."""
    is_faster_in_bf16: bool = False

    def shares(self) -> dict[str, float]:
        """Share of a step by part; they add up to 1."""
        total = sum(self.parts.values())
        return {
            name: seconds / total for name, seconds in self.parts.items() if seconds > 0
        }

    def to_json(self) -> str:
        """As it crosses between processes."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class ProfileJob(Job[StepProfile]):
    """Takes steps of the run for about `seconds`; writes nothing."""

    seconds: float

    def read_result(self, text: bytes) -> StepProfile:
        """Parse what `execute` returned on rank 0."""
        return validated(json.loads(text), StepProfile)

    def execute(self, context: RunContext) -> StepProfile:
        """Profile as one worker; the result is rank 0's."""
        end_at_once()
        context.storage = None
        config = self.config.model_copy(update={"profile_steps": 0})
        replica = build_replica(self.load_task(), config.with_global_batch(), context)
        try:
            return profile_steps(replica, self.seconds)
        finally:
            replica.close()


def profile_steps(replica: Replica, seconds: float) -> StepProfile:
    """Take steps of a replica for about `seconds`. Every rank must call it."""
    group = replica.group
    device = replica.device
    clock = PartClock(device)
    with parts_timed(replica, clock):
        steps = Steps(replica, clock)
        count = steps.warm(seconds)
        step_s = steps.time_s(count)
        reads = {place: read_s / count for place, read_s in clock.reads.items()}
        parts = steps.parts_s(count)
        busy_s = _busy_s(steps) if device.type == "cuda" else None
        own_s = [step_s]
        if isinstance(replica.step.forward.model, DistributedDataParallel):
            with no_sync(
                replica.step.forward.model
            ):  # last: the ranks' parameters differ from here on
                own_s = group.gather(steps.time_s(count))
            # What the backward pass of this rank waits for is other ranks first, then
            # the gradients.
            waited_s = max(own_s) - own_s[group.rank]
            sent_s = max(0.0, step_s - max(own_s))
            parts["waiting for ranks"] = waited_s
            parts["all-reduce"] = sent_s
            parts["backward"] = max(0.0, parts["backward"] - waited_s - sent_s)
    of_ranks = group.gather(parts)
    mean_parts = {
        name: statistics.fmean(of_rank[name] for of_rank in of_ranks) for name in parts
    }
    fp32, bf16 = (device_peak(device, name) or 0.0 for name in ("fp32", "bf16"))
    profiled = StepProfile(
        step_s=step_s,
        parts=mean_parts,
        own_s=own_s,
        reads=reads,
        accumulation=replica.accumulation,
        device=device.type,
        busy_s=busy_s,
        is_faster_in_bf16=bf16 > _FASTER_FORMAT * fp32 > 0,
    )
    return group.first(profiled)


class PartClock:
    """Seconds by part, of steps in which it is on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self.seconds = defaultdict[str, float](float)
        self.reads = defaultdict[str, float](float)
        """Seconds of the task's host reads by place, while it is off."""
        self._parts = ["host"]
        self._since = time.perf_counter()

    def start(self) -> None:
        """Measure from now on."""
        synchronize(self.device)
        self.is_on = True
        self._since = time.perf_counter()

    def charge(self) -> None:
        """Charge the time since the last change to the part at hand."""
        if self.is_on:
            synchronize(self.device)
            now = time.perf_counter()
            self.seconds[self._parts[-1]] += now - self._since
            self._since = now

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Charge a block to a part, except for the blocks inside it."""
        self.charge()
        self._parts.append(part)
        try:
            yield
        finally:
            self.charge()
            self._parts.pop()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, charged to a part."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.within(part):
                return function(*args, **kwargs)

        return called


class Steps:
    """Takes steps of a replica as training does, without what is due between them."""

    def __init__(self, replica: Replica, clock: PartClock) -> None:
        self.replica = replica
        self.clock = clock
        feed = replica.train_feed
        if isinstance(feed.dataset, Stream):
            feed.dataset.begin(0, None, None)
        for_rows, for_sizes = itertools.tee(self._plans())
        self._sizes = (sizes for plans in for_sizes for _, sizes in plans)
        epochs = (
            [rows for microbatches, _ in plans for rows in microbatches]
            for plans in for_rows
        )
        self._batches = itertools.chain.from_iterable(
            feed.batches(epoch, training=True) for epoch in epochs
        )

    def _plans(self) -> Iterator[list[Any]]:
        """Yield the whole steps of each epoch: rows and sizes of their microbatches."""
        replica = self.replica
        sampler = replica.sampler
        whole = max(1, sampler.length // sampler.batches.size(0))
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            steps = range(min(whole, _MOST))
            yield [
                sampler.plan(step, replica.microbatch_size, replica.even)
                for step in steps
            ]

    def _fetched(self) -> Iterator[Any]:
        while True:
            with self.clock.within("data"):
                batch = next(self._batches)
            yield batch

    def take(self) -> None:
        """Take one step; an asynchronous device is not waited for."""
        sizes = next(self._sizes)
        with self.clock.within("forward"):
            self.replica.step(
                self._fetched(),
                sizes,
                self.replica.sampler.step_size(0),
                idle=not any(sizes),
            )

    def warm(self, seconds: float) -> int:
        """Take the first steps; return how many, alike on all ranks, take `seconds`."""
        self.time_s(WARMUP_STEPS)
        each_s = self.time_s(2)
        self.clock.reads.clear()
        return self.replica.group.first(min(_MOST, max(_FEWEST, int(seconds / each_s))))

    def time_s(self, count: int) -> float:
        """Return the mean time of some steps."""
        synchronize(self.clock.device)
        began = time.perf_counter()
        for _ in range(count):
            self.take()
        synchronize(self.clock.device)
        return (time.perf_counter() - began) / count

    def parts_s(self, count: int) -> dict[str, float]:
        """Return the mean seconds of each part of some steps."""
        self.clock.start()
        for _ in range(count):
            self.take()
        self.clock.charge()
        self.clock.is_on = False
        names = (
            "data",
            "copy",
            "transform",
            "forward",
            "backward",
            "optimizer",
            "host",
        )
        return {name: self.clock.seconds[name] / count for name in names}


def _busy_s(steps: Steps) -> float:
    """Return the time of a step in which kernels run."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        steps.time_s(_FEWEST)
    busy_us: float = sum(
        event.self_device_time_total for event in recorded.key_averages()
    )
    return busy_us / 1e6 / _FEWEST


@contextlib.contextmanager
def parts_timed(replica: Replica, clock: PartClock) -> Iterator[None]:
    """Tell the clock of the parts of steps and the task's host reads, for a block."""
    feed = replica.train_feed
    optimizer = replica.optimizer
    with contextlib.ExitStack() as stack:
        _patch(stack, Copies, "begin", clock.timed("copy", Copies.begin))
        _patch(
            stack,
            torch.autograd,
            "backward",
            clock.timed("backward", torch.autograd.backward),
        )
        _patch(stack, optimizer, "step", clock.timed("optimizer", optimizer.step))
        if feed._transform is not None:
            _patch(stack, feed, "_transform", clock.timed("transform", feed._transform))
        for name in HOST_READS:
            _patch(
                stack,
                torch.Tensor,
                name,
                _timed_read(clock, getattr(torch.Tensor, name)),
            )
        yield


def _timed_read(clock: PartClock, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tensor method that tells the clock the time of the task's calls."""

    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        module = str(frame.f_globals.get("__name__", ""))
        is_library = module.partition(".")[0] in ("torch", "trainers")
        if clock.is_on or is_library or torch.compiler.is_compiling():
            return method(tensor, *args, **kwargs)
        began = time.perf_counter()
        found = method(tensor, *args, **kwargs)
        clock.reads[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += (
            time.perf_counter() - began
        )
        return found

    return read


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack ends."""
    is_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(
        lambda: setattr(owner, name, before) if is_own else delattr(owner, name)
    )
