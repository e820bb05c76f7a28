"""Which causes a profile's readings show: pure functions of plain data.

A cause is recognised by what it does to a step: where its time goes, whether the processor computes in it, how it grows
with the samples, and how ranks differ. What is common to all ranks is judged by the fastest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainers.config import TrainConfig
from trainers.explain.readings import RankReadings, Readings, Span, Suspicion

WORTH = 0.05
"""Share of the time below which nothing is advised."""
_FIXED = 1 / 3
"""Share of a step that may be the same for any batch, before a larger one is tried."""
_MOST_LOADERS, _LARGER = 8, 4
_FASTER_FORMAT = 1.5
_LEARNS = "the learning rate follows by `lr_scaling`; what is learned in an epoch changes"
_OWN = ("loader", "transform", "forward", "host reads", "backward", "optimizer", "other")


def suspect(readings: Readings, config: TrainConfig) -> list[Suspicion]:
    """Return what may take more than 5 % of a step's time, the largest first."""
    found = [
        *_loader(readings, config),
        *_transform(readings),
        *_blocked(readings),
        *_straggler(readings),
        *_communication(readings, config),
        *_small_batch(readings, config),
        *_microbatch(readings, config),
        *_precision(readings, config),
        *_neighbour(readings),
    ]
    worth = [one for one in found if one.probe or (one.gain.value > WORTH and one.gain.low > WORTH / 2)]
    return sorted(worth, key=lambda one: -one.own)


def _share(readings: Readings, seconds: float, *names: str) -> Span:
    """A share of the step, with the spread of the segments that it is of."""
    spread = math.hypot(*(one.spread.get(name, 0.0) for one in readings.ranks[:1] for name in names))
    value = seconds / readings.step_s
    return Span(value, max(0.0, value - spread / readings.step_s), min(1.0, value + spread / readings.step_s))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _loader(readings: Readings, config: TrainConfig) -> Iterator[Suspicion]:
    waited, workers = readings.segment("loader"), config.data.num_workers
    if waited / readings.step_s <= WORTH:
        return
    rest = max(readings.step_s - waited, 1e-9)
    is_computing = readings.loader_busy > 0.5
    wanted = max(math.ceil(max(workers, 1) * readings.step_s / rest) - (workers == 0), workers + 1)
    spare = max(1, readings.cores // len(readings.ranks), workers + 1)
    wanted = min(wanted, spare if is_computing and workers == 0 else _MOST_LOADERS)
    how = "which the processor spends on making them" if is_computing else "most of which it waits for storage"
    where = f"from {workers} loader processes" if workers else f"in the training process, {how}"
    words = f"a step waits {_ms(waited)} of {_ms(readings.step_s)} for its batch {where}"
    left = 0.0 if workers else max(0.0, waited / wanted - rest)
    fix = "make `__getitems__` of the dataset fetch a whole batch, or keep the data nearer" if workers else ""
    changes = {"data.num_workers": wanted, "data.resident": False}
    changes = changes if config.data.resident is True else {"data.num_workers": wanted}
    yield Suspicion("slow loader", words, _share(readings, waited - left, "loader"), changes, fix, probe=True)


def _transform(readings: Readings) -> Iterator[Suspicion]:
    taken = readings.segment("transform")
    moved = taken - readings.hand_over_s
    words = f"the task's transform() takes {_ms(taken)} of {_ms(readings.step_s)} in the training process"
    fix = "do it in the dataset's `__getitems__` or in collate(), and set `data.num_workers: 2`: beside the steps"
    yield Suspicion("slow transform", words, _share(readings, max(0.0, moved), "transform"), fix=fix)


def _waited_s(readings: Readings) -> float:
    """What every rank waits of a step in the task's own code."""
    return min(sum(one.blocked_s.get(name, 0.0) for name in ("forward", "backward")) for one in readings.ranks)


def _blocked(readings: Readings) -> Iterator[Suspicion]:
    reads = readings.segment("host reads")
    waits = _waited_s(readings)
    places = ", ".join(f"{place} ({times} a step)" for place, times in list(readings.ranks[0].reads.items())[:3])
    words = f"a step waits {_ms(reads + waits)} of {_ms(readings.step_s)} in the task's own code"
    words += f": it reads values at {places}" if places and reads > waits else ", where it waits and computes nothing"
    fix = "keep values on the device (`metrics()` sums them there), and move waiting out of forward() and loss()"
    share = _share(readings, reads + waits, "host reads", "forward", "backward")
    if readings.reads_gain is not None and readings.reads_gain[0] * readings.step_s > waits:
        share = Span(*readings.reads_gain)
        words = f"steps whose reads wait for nothing take {share.value:.0%} less: it reads values at {places}"
    yield Suspicion("hidden synchronisation", words, share, fix=fix)


def _own(rank: RankReadings) -> float:
    return sum(rank.wall_s.get(name, 0.0) for name in _OWN)


def _last_and_usual(readings: Readings) -> tuple[RankReadings, RankReadings]:
    """Return the rank whose own part of a step takes longest, and the median one."""
    ordered = sorted(readings.ranks, key=_own)
    return ordered[-1], ordered[(len(ordered) - 1) // 2]


def _straggler(readings: Readings) -> Iterator[Suspicion]:
    if len(readings.ranks) < 2:
        return
    last, usual = _last_and_usual(readings)
    late = _own(last) - _own(usual)
    where = max(_OWN, key=lambda name: last.wall_s.get(name, 0.0) - usual.wall_s.get(name, 0.0))
    words = f"rank {last.rank} takes {_ms(late)} longer than the others for its own part of a step, most in {where}"
    fix = "`python -m cluster check --exclude-bad` prints the label_selector that leaves out a slow node"
    yield Suspicion("straggling rank", words, _share(readings, late, where), fix=fix)


def _communication(readings: Readings, config: TrainConfig) -> Iterator[Suspicion]:
    taken = readings.sending_s
    if readings.all_reduce_s is None or taken / readings.step_s <= WORTH:
        return
    spent = f"a step spends {_ms(taken)} of {_ms(readings.step_s)} on adding up gradients"
    if config.ddp.bucket_cap_mb is not None and taken > 1.2 * readings.all_reduce_s:
        words = f"{spent}; all of them at once take {_ms(readings.all_reduce_s)}"
        share = _share(readings, taken - readings.all_reduce_s, "communication")
        yield Suspicion("small all-reduce buckets", words, share, {"ddp.bucket_cap_mb": 25}, probe=True)
        return
    if config.ddp.compression == "none":
        share = _share(readings, taken / 2, "communication")
        fix = "a larger global_batch_size sends them less often"
        yield Suspicion("slow all-reduce", spent, share, {"ddp.compression": "bf16"}, fix, probe=True)
    if _is_mostly_sending(readings) and _may_be_larger(readings, config):
        share = _share(readings, (1 - 1 / _LARGER) * taken, "communication")
        fix = f"`ddp.compression: bf16` halves what is sent; {_LEARNS}"
        larger = {"global_batch_size": _LARGER * config.batch_size}
        yield Suspicion("slow all-reduce", spent, share, larger, fix, probe=True, most=share.high)


def _fixed(readings: Readings) -> float | None:
    """The share of a step that is the same for any batch, and has no other cause; None where it was not measured."""
    fixed, shares = readings.fixed_share, readings.shares()
    if fixed is None:
        return None
    last, usual = _last_and_usual(readings)
    others = [shares.get(name, 0.0) for name in ("host reads", "loader", "transform")]
    others += [readings.sending_s / readings.step_s, (_own(last) - _own(usual)) / readings.step_s]
    return fixed - sum(share for share in others if share > WORTH) - _waited_s(readings) / readings.step_s


def _is_mostly_sending(readings: Readings) -> bool:
    """Whether, of what is the same for any batch, adding up gradients takes the most; the optimizer's arithmetic comes
    with it, as both are the parameters'.
    """
    fixed, sent = readings.fixed_share, readings.sending_s / readings.step_s
    return fixed is not None and sent > fixed - sent - readings.shares().get("optimizer", 0.0)


def _may_be_larger(readings: Readings, config: TrainConfig) -> bool:
    return readings.train_samples >= _LARGER * config.batch_size


def _small_batch(readings: Readings, config: TrainConfig) -> Iterator[Suspicion]:
    fixed = _fixed(readings)
    if readings.host_bound and len(readings.ranks) == 1 and not config.cuda_graphs and config.compile == "off":
        words = "the device is done as soon as the host has issued a step: it waits for the host"
        yield Suspicion("host-bound small batches", words, Span(0.5, 0.0, 1.0), {"cuda_graphs": True}, probe=True)
    elif fixed is not None and fixed > _FIXED and not _is_mostly_sending(readings) and _may_be_larger(readings, config):
        larger = _LARGER * config.batch_size
        words = f"{fixed:.0%} of a step of {config.batch_size} samples does not grow with them: calls, the optimizer"
        gain, changes = (1 - 1 / _LARGER) * fixed, {"global_batch_size": larger}
        span = Span(gain, 0.0, 1.0)
        yield Suspicion("host-bound small batches", words, span, changes, _LEARNS, probe=True, most=gain)


def _microbatch(readings: Readings, config: TrainConfig) -> Iterator[Suspicion]:
    if readings.accumulation == 1 or config.microbatch_size == "auto":
        return
    words = f"a worker's {readings.samples} samples of a step go through in {readings.accumulation} microbatches"
    words += f" of {readings.microbatch_size}"
    gain = Span(1 - 1 / readings.accumulation, 0.0, 1.0)
    yield Suspicion("microbatch too small", words, gain, {"microbatch_size": "auto"}, probe=True)


def _precision(readings: Readings, config: TrainConfig) -> Iterator[Suspicion]:
    precision, peaks = config.precision, readings.device_peaks
    if readings.device == "cpu" and precision != "fp32":
        words = f"{precision} on a CPU: casts cost time, and few have arithmetic for it"
        yield Suspicion(
            "wrong precision", words, Span(0.1, 0.0, 1.0), {"precision": "fp32"}, probe=True, in_evaluation=True
        )
    elif precision == "fp32" and peaks.get("bf16", 0.0) > _FASTER_FORMAT * peaks.get("fp32", math.inf):
        words = f"fp32 on a device that multiplies {peaks['bf16'] / peaks['fp32']:.1f} times as fast in bf16"
        yield Suspicion(
            "wrong precision", words, Span(0.3, 0.0, 1.0), {"precision": "bf16"}, probe=True, in_evaluation=True
        )


def _neighbour(readings: Readings) -> Iterator[Suspicion]:
    """It takes nothing of the time in which the task waits for something else."""
    stolen = min(one.stolen for one in readings.ranks)
    gain = Span(stolen, 0.8 * stolen, min(1.0, 1.2 * stolen)).scaled(1 - _waited_s(readings) / readings.step_s)
    words = f"a busy thread gets {1 - stolen:.0%} of a core here: something else runs on this machine"
    fix = "end it, or leave the machine out by `scaling.label_selector`; `scaling.cpus_per_worker` reserves cores"
    yield Suspicion("busy neighbour", words, gain, fix=fix)
