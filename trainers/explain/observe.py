"""Take some steps of a replica that is built, and say where their time goes. Every rank must call what is here."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainers.config import TrainConfig
from trainers.data.batch import fetch
from trainers.data.stream import Stream
from trainers.devices.device import synchronize
from trainers.explain.pairs import ROUNDS, fixed_share, is_host_bound, reads_gain, sent_share
from trainers.explain.readings import RankReadings, Readings, Span
from trainers.explain.segments import Segments, parts_timed
from trainers.explain.stepper import Stepper, warm
from trainers.measure.profiler import Inspection
from trainers.step.flops import device_peak
from trainers.step.replica import Replica

_FEWEST = 12
_SPIN_S, _SPINS = 0.003, 20
_MANY_READS = 50


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
            fixed_share=fixed_share(stepper, config),
            recompiled_share=lost_s / (lost_s + parts.total_steps * usual_s),
            hand_over_s=ready_s[2],
            all_reduce_s=reduced,
            sent_share=sent_share(stepper) if reduced is not None else None,
            reads_gain=reads_gain(stepper) if any(parts.group.gather(bool(reads))) else None,
            host_bound=is_host_bound(stepper),
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
    for _ in range(ROUNDS):
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
