"""Take some steps of a replica that is built, and say where their time goes. Every rank must call what is here."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainers.config import TrainConfig
from trainers.data.batch import fetch
from trainers.data.stream import Stream
from trainers.devices.device import synchronize
from trainers.explain.readings import RankReadings, Readings, Span
from trainers.explain.segments import Segments, parts_timed, stale_reads
from trainers.measure.clock import WARMUP_STEPS
from trainers.measure.profiler import Inspection
from trainers.step.flops import device_peak
from trainers.step.replica import Replica

_FEWEST, _MOST = 12, 400
_SPIN_S, _SPINS = 0.003, 20
_SLICE_S = 0.1
_MANY_READS = 50
_ROUNDS = 8

Plan = tuple[list[Tensor], list[int]]


def plans(parts: Replica, pieces: int = 1) -> Iterator[list[Plan]]:
    """Yield the microbatches of the whole steps of each epoch; with `pieces` that many steps' samples as one step of as
    many microbatches as one has.
    """
    sampler, size = parts.sampler, parts.microbatch_size
    whole = max(1, sampler.length // sampler.batches.size(0))
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        steps = [sampler.plan(step, size, parts.even) for step in range(min(whole, _MOST))]
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
    return stepper.parts.group.first(min(_MOST, max(fewest, int(seconds / each))))


def observe(parts: Replica, config: TrainConfig, inspection: Inspection | None, seconds: float) -> Readings:
    """Return the readings of steps that take about `seconds`."""
    stepper = Stepper(parts)
    count = warm(stepper, seconds, _FEWEST)
    rows, reads, spins, recompiled = _segmented(stepper, count, inspection, spinning=config.data.num_workers == 0)
    ready_s = _batch_ready_s(parts) if parts.train_feed.resident is None else (0.0, 0.0, 0.0)
    for _ in range(stepper.prepared):
        stepper.step()
    plain_s = stepper.time_s(max(1, count // 2))
    if any(parts.group.gather(sum(reads.values()) > _MANY_READS)):
        _without_watching(rows, plain_s)
    usual_s, recompiled_s = (statistics.fmean(map(_wall_s, some)) if some else 0.0 for some in (rows, recompiled))
    lost_s = len(recompiled) * max(0.0, recompiled_s - usual_s)
    own = RankReadings(parts.group.rank, *_means(rows), stolen=spins, reads=reads)
    every = _with_waiting(parts.group.gather(own), reduced := _all_reduce_s(parts))
    return parts.group.first(
        Readings(
            ranks=every,
            step_s=statistics.fmean(sum(one.wall_s.values()) for one in every),
            plain_step_s=plain_s,
            steps=len(rows),
            samples=-(-config.batch_size // parts.group.world_size),
            microbatch_size=parts.microbatch_size,
            accumulation=parts.accumulation,
            train_samples=parts.sampler.length,
            device=parts.device.type,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            fixed_share=_fixed_share(stepper, config),
            recompiled_share=lost_s / (lost_s + parts.total_steps * usual_s),
            hand_over_s=ready_s[2],
            all_reduce_s=reduced,
            reads_gain=_reads_gain(stepper) if any(parts.group.gather(bool(reads))) else None,
            host_bound=_is_host_bound(stepper),
            loader_busy=ready_s[1] / ready_s[0] if ready_s[0] else 0.0,
            device_peaks={
                name: peak for name in ("fp32", "tf32", "bf16") if (peak := device_peak(parts.device, name)) is not None
            },
        )
    )


Row = tuple[dict[str, float], dict[str, float]]


def _wall_s(row: Row) -> float:
    return sum(row[0].values())


def _segmented(
    stepper: Stepper, count: int, inspection: Inspection | None, spinning: bool
) -> tuple[list[Row], dict[str, int], float, list[Row]]:
    """Return wall and waited time of each of `count` steps by segment, host reads a step, and the share stolen; last
    the steps that compiled again, which the others leave out.
    """
    parts = stepper.parts
    segments, rows, recompiled, spun = Segments(parts.device), list[Row](), list[Row](), [0.0, 0.0]
    watch = inspection.compile_watch if inspection is not None else None
    if watch is not None:
        watch.compiled_since()
    every, batches = max(1, count // _SPINS), stepper.batches
    stepper.batches = _charged(batches, segments)
    spare = stepper.prepared  # what is ready is no measure
    with parts_timed(parts, segments):
        for number in range(count + spare):
            segments.take()
            with segments.within("forward"):
                stepper.step()
            row, compiled = segments.take(), watch is not None and watch.compiled_since()
            if number >= spare:
                (recompiled if compiled else rows).append(row)
            if spinning and number % every == 0:
                spin(spun)
    stepper.batches = batches
    for _ in range(0 if spinning else _SPINS):
        spin(spun)
    reads = {place: round(times / count) for place, times in segments.read_at.items() if times >= count / 2}
    return rows or recompiled, reads, max(0.0, 1 - spun[1] / spun[0]), recompiled if rows else []


def _without_watching(rows: Sequence[Row], plain_s: float) -> None:
    """Take out of the forward pass what watching so many host reads costs, by the time of steps without it."""
    watched_s = statistics.fmean(map(_wall_s, rows))
    for wall, _ in rows:
        wall["forward"] = max(0.0, wall.get("forward", 0.0) - max(0.0, watched_s - plain_s))


def _charged(batches: Iterator[Any], segments: Segments) -> Iterator[Any]:
    """The same batches, whose making is charged to the loader."""
    while True:
        with segments.within("loader"):
            batch = next(batches)
        yield batch


def spin(spun: list[float]) -> None:
    """Keep this thread busy for a moment; add the wall time and the CPU time that it got."""
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < _SPIN_S:
        pass
    spun[0] += time.perf_counter() - wall
    spun[1] += time.thread_time() - cpu


def _means(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the mean wall time of each segment, what of it was blocked, and the half width of its interval."""
    names = {name for wall, _ in rows for name in wall}
    spans = {name: Span.of([wall.get(name, 0.0) for wall, _ in rows]) for name in names}
    waits = {name: [waited.get(name, 0.0) for _, waited in rows] for name in names}
    blocked = {name: max(0.0, statistics.fmean(some)) for name, some in waits.items()}
    return (
        {name: span.value for name, span in spans.items()},
        blocked,
        {name: span.high - span.value for name, span in spans.items()},
    )


def _with_waiting(ranks: list[RankReadings], reduced_s: float | None) -> list[RankReadings]:
    """Tell waiting for other ranks from communication: the slowest rank waits for nobody, and a collective takes no
    longer than it does with all ranks there.
    """
    if reduced_s is None:
        return ranks
    own = [sum(one.wall_s.values()) - one.wall_s.get("communication", 0.0) for one in ranks]
    for rank, seconds in zip(ranks, own, strict=True):
        tail = rank.wall_s.get("communication", 0.0)
        waited = min(tail, max(own) - seconds)
        rank.wall_s.update({"communication": tail - waited, "waiting for ranks": waited})
    return ranks


def _all_reduce_s(parts: Replica) -> float | None:
    """Return how long one all-reduce of all gradients takes with every rank there; None with one rank."""
    if not isinstance(parts.step.forward.model, DistributedDataParallel):
        return None
    size = sum(one.numel() for one in parts.model.parameters() if one.requires_grad)
    buffer, found = torch.zeros(size, device=parts.device), list[float]()
    for _ in range(_ROUNDS):
        dist.barrier()
        synchronize(parts.device)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        synchronize(parts.device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _batch_ready_s(parts: Replica) -> tuple[float, float, float]:
    """Return wall and CPU time of fetching one microbatch in this process, and the time that handing it over from
    another one takes.
    """
    feed = parts.train_feed
    if isinstance(feed.dataset, Stream):
        return 0.0, 0.0, 0.0
    rows = parts.sampler.rows(0, parts.microbatch_size).numpy()
    walls, cpus, hands = list[float](), list[float](), list[float]()
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        batch = fetch(feed.dataset, rows, feed._collate)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        wall = time.perf_counter()
        ForkingPickler.loads(ForkingPickler.dumps(batch))
        hands.append(time.perf_counter() - wall)
    return statistics.median(walls), statistics.median(cpus), statistics.median(hands)


def _fixed_share(stepper: Stepper, config: TrainConfig) -> float | None:
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


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int = _ROUNDS) -> list[tuple[float, float]]:
    """Return both figures of each round, taken right after each other, the first of them in turn."""
    found = []
    for number in range(rounds):
        if number % 2:
            late = second()
            found.append((first(), late))
        else:
            found.append((first(), second()))
    return found


def _is_host_bound(stepper: Stepper) -> bool:
    """Return whether an asynchronous device is done as soon as the host has issued its steps."""
    device = stepper.parts.device
    if device.type == "cpu":
        return False
    synchronize(device)
    began = time.perf_counter()
    for _ in range(2 * _ROUNDS):
        stepper.step()
    issued = time.perf_counter() - began
    synchronize(device)
    return issued > 0.9 * (time.perf_counter() - began)


def _reads_gain(stepper: Stepper) -> list[float] | None:
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


@dataclass(frozen=True)
class Pair:
    """Two configurations side by side: seconds a sample of each round."""

    rounds: list[tuple[float, float]]

    @property
    def gain(self) -> Span:
        """Share of the time of the first that the second saves, by the geometric mean of the rounds: below 1."""
        of_rounds = Span.of([math.log(new / old) for old, new in self.rounds])
        return Span(*(1 - math.exp(one) for one in (of_rounds.value, of_rounds.high, of_rounds.low)))
