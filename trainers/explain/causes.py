"""What slows a run, by a profile of its steps and by its own records: pure functions of plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainers.config import TrainConfig
from trainers.config.yaml import dump_yaml
from trainers.explain.steps import StepProfile
from trainers.explain.verify import Gain
from trainers.measure.result import Pauses, RunResult

WORTH = 0.05
"""Share of the time below which nothing is named."""
_ENOUGH = 0.01  # of the time, which evaluations and checkpoints may take
_BUSY = 0.1
"""Share of the time in which a machine's own background work may wait for a core."""
_EXCLUDE = "`python -m cluster check --exclude-bad` prints the label_selector that leaves out a slow node"


@dataclass(frozen=True)
class Cause:
    """Something that takes time, and what may change it."""

    kind: str
    share: float
    """Of the run's time, that it takes; what a change saves of it only running both says."""
    words: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of the configuration."""
    fix: str = ""
    """What else helps."""
    of_steps: bool = True
    """Whether a step itself takes less time after the change."""
    gain: Gain | None = None
    """What running both has shown."""

    def lines(self) -> Iterator[str]:
        """As the user reads it."""
        yield f"{self.kind}, {self.share:.0%} of the time: {self.words}"
        for name, value in self.changes.items():
            yield f"    {dump_yaml({name: value}).strip()}"
        if self.fix:
            yield f"    {'or: ' if self.changes else ''}{self.fix}"
        if self.gain is not None:
            yield f"    measured side by side: {self.gain}"


def run_shares(result: RunResult | None, profile: StepProfile | None) -> dict[str, float]:
    """Return the shares of the last launch's time, which add up to 1: steps by the parts of the profile, or without one
    by what the run measured itself. Without a result those of the profile alone.
    """
    inside = profile.shares() if profile is not None else {}
    if result is None:
        return inside
    if not inside:
        waited = result.throughput.data_wait_share if result.throughput is not None else 0.0
        inside = {"data": waited, "steps": 1 - waited}
    pauses = result.pauses or Pauses()
    compiling_s = _compiling_s(result)
    steps_s = _training_s(result) - compiling_s
    outside_s = {"evaluation": pauses.evaluation_s, "checkpoints": pauses.checkpoint_s, "compiling": compiling_s}
    wall_s = max(result.wall_time_s, steps_s + sum(outside_s.values()), 1e-9)
    found = {name: share * steps_s / wall_s for name, share in inside.items()}
    found |= {name: seconds / wall_s for name, seconds in outside_s.items()}
    found["start and end"] = 1 - sum(found.values())
    return {name: share for name, share in found.items() if share > 0}


def name_causes(config: TrainConfig, result: RunResult | None, profile: StepProfile | None) -> list[Cause]:
    """Return what takes more than 5 % of the run's time, the largest first."""
    shares = run_shares(result, profile)
    found = list(_of_records(config, result, shares)) if result is not None else []
    if profile is not None:
        # Shares of a step, as shares of the run.
        of_run = sum(shares.get(name, 0.0) for name in profile.parts)
        found += [*_of_data(config, shares), *_of_steps(config, profile, shares, of_run)]
    elif shares.get("data", 0.0) > WORTH:
        words = "rank 0 waits for batches: for the loader or the task's transform()"
        found.append(Cause("slow loader", shares["data"], words, _more_loaders(config)))
    worth = [cause for cause in found if cause.share > WORTH]
    return sorted(worth, key=lambda cause: -cause.share)


def _training_s(result: RunResult) -> float:
    """Seconds in steps of the last launch."""
    return result.train_time_s - result.earlier_time_s


def _compiling_s(result: RunResult) -> float:
    """Seconds that the steps of a compiled run took beyond as many usual ones."""
    if result.compile is None or result.throughput is None or result.earlier_time_s:
        return 0.0
    return max(0.0, _training_s(result) - result.steps * result.throughput.step_time_s)


def _more_loaders(config: TrainConfig) -> dict[str, Any]:
    changes: dict[str, Any] = {"data.num_workers": max(2, 2 * config.data.num_workers)}
    if config.data.resident is True:
        changes["data.resident"] = False
    return changes


def _of_data(config: TrainConfig, shares: dict[str, float]) -> Iterator[Cause]:
    workers = config.data.num_workers
    where = f"from {workers} loader processes" if workers else "made in the training process"
    fix = "make `__getitems__` of the dataset fetch a whole batch, or keep the data nearer"
    words = f"steps wait for their batches, {where}"
    yield Cause("slow loader", shares.get("data", 0.0), words, _more_loaders(config), fix)
    words = "the task's transform() runs in the training process"
    fix = "do it in the dataset's `__getitems__` or in collate(), and set `data.num_workers: 2`: beside the steps"
    yield Cause("slow transform", shares.get("transform", 0.0), words, fix=fix)


def _of_steps(config: TrainConfig, profile: StepProfile, shares: dict[str, float], of_run: float) -> Iterator[Cause]:
    def of_step(seconds: float) -> float:
        return seconds / profile.step_s * of_run

    places = sorted(profile.reads, key=lambda place: -profile.reads[place])[:3]
    words = f"the host waits for the device where the task reads its values: {', '.join(places)}"
    fix = "keep values on the device (`metrics()` sums them there)"
    yield Cause("hidden synchronisation", of_step(sum(profile.reads.values())), words, fix=fix)

    usual_s = statistics.median_low(profile.own_s)
    slowest_s = max(profile.own_s)
    words = f"rank {profile.own_s.index(slowest_s)} takes {slowest_s * 1e3:.3g} ms for its own part of a step, "
    words += f"others {usual_s * 1e3:.3g} ms"
    yield Cause("straggling rank", of_step(slowest_s - usual_s), words, fix=_EXCLUDE)

    words = "steps wait for gradients to be added up over the ranks"
    changes: dict[str, Any] = {"ddp.compression": "bf16"} if config.ddp.compression == "none" else {}
    if config.ddp.bucket_cap_mb is not None and config.ddp.bucket_cap_mb < 25:
        changes = {"ddp.bucket_cap_mb": 25}
    fix = "a larger global_batch_size sends them less often"
    yield Cause("slow all-reduce", shares.get("all-reduce", 0.0), words, changes, fix)

    if profile.busy_s is not None:
        idle = max(0.0, profile.step_s - profile.busy_s) / profile.step_s * of_run
        idle -= sum(shares.get(name, 0.0) for name in ("data", "copy", "all-reduce", "waiting for ranks"))
        words = "the GPU is idle until the host has issued its work"
        graphs = not config.cuda_graphs and config.compile == "off" and len(profile.own_s) == 1
        fix = "a larger global_batch_size gives each call more to do"
        yield Cause("host-bound small batches", idle, words, {"cuda_graphs": True} if graphs else {}, fix)

    computing = shares.get("forward", 0.0) + shares.get("backward", 0.0)
    if profile.accumulation > 1 and config.microbatch_size != "auto":
        words = f"a step goes through in {profile.accumulation} microbatches of {config.microbatch_size} samples"
        yield Cause("microbatch too small", computing, words, {"microbatch_size": "auto"})
    if profile.device == "cpu" and config.precision != "fp32":
        words = f"{config.precision} on a CPU: casts cost time, and few have arithmetic for it"
        yield Cause("wrong precision", computing, words, {"precision": "fp32"})
    elif profile.is_faster_in_bf16 and config.precision == "fp32":
        words = "fp32 on a device that multiplies faster in bf16"
        yield Cause("wrong precision", computing, words, {"precision": "bf16"})


def _of_records(config: TrainConfig, result: RunResult, shares: dict[str, float]) -> Iterator[Cause]:
    pauses = result.pauses or Pauses()
    sections = (
        ("evaluation too often", "evaluation", pauses.evaluations, "evaluate", config.evaluate),
        ("checkpoint stalls", "checkpoints", pauses.checkpoints, "checkpoint", config.checkpoint),
    )
    for kind, part, count, name, section in sections:
        share = shares.get(part, 0.0)
        if count < 2:  # the last one is always made
            continue
        intervals = {key: getattr(section, key, None) for key in ("every_steps", "every_s", "every_epochs")}
        key = next((key for key, value in intervals.items() if value), "every_epochs")
        seldom = (intervals[key] or 1) * max(2, round(share / _ENOUGH))
        fix = "`checkpoint.async: true` writes them beside the steps" if name == "checkpoint" else ""
        yield Cause(kind, share, f"{count} of them", {f"{name}.{key}": seldom}, fix, of_steps=False)
    recompiles = (result.compile or {}).get("recompiles", 0)
    if recompiles:
        words = f"{recompiles} graphs were compiled again in mid-training"
        fix = "give the model batches of one shape (`drop_last: true`, padding), or set `compile: off`"
        yield Cause("recompiles", shares.get("compiling", 0.0), words, fix=fix)
    pressure = max((rank.get("cpu_pressure") or 0.0 for rank in result.ranks), default=0.0)
    words = "work on this machine waited for a core"
    fix = "end what else runs there; `scaling.cpus_per_worker` reserves cores"
    if pressure > _BUSY:
        yield Cause("busy neighbour", pressure, words, fix=fix)
