"""Explain a run: where its time goes, and which lines of its configuration change that.

Workers take some steps and time the parts of a step. Causes are inferred from
these times and the run's own records. To measure the gain of a change, both
configurations run in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from trainers.config import TrainConfig
from trainers.config.model import Tree, build, override
from trainers.config.yaml import dump_yaml
from trainers.context import RunContext
from trainers.data.feed import Copies
from trainers.data.stream import Stream
from trainers.devices.device import synchronize
from trainers.devices.group import Group
from trainers.errors import PacelineError, first_line
from trainers.launch.process import end_at_once
from trainers.launch.spec import (
    Job,
    RunSpec,
    make_spec,
    open_run,
    read_file,
)
from trainers.loop.build import build_replica
from trainers.measure.clock import WARMUP_STEPS
from trainers.measure.figures import findings, student_t
from trainers.measure.result import Answer, Pauses, RunResult
from trainers.model.optimizer import optimizers_of
from trainers.model.sharding import is_sharded
from trainers.model.strategy import no_sync
from trainers.step import train_step
from trainers.step.train_step import Replica, TrainStep

logger = logging.getLogger(__name__)

_HOST_READS = [
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
]
"""Tensor methods that wait for the device and return values to the host."""
_PARTS = [
    "data",
    "copy",
    "transform",
    "forward",
    "backward",
    "optimizer",
    "host",
]
"""The parts of a step, on one rank."""
_SENT = "all-reduce"
"""The part in which ranks add up tensors."""
_WAITED = "waiting for ranks"
_FEWEST_TRACED = 12
"""The fewest steps in a profile."""
_MOST = 400
"""The most steps until the data starts over."""
_VERIFIED = 3
"""The most causes whose changes are tried."""
_ROUNDS = 4
"""Number of turns of each of the two configurations."""
_FEWEST_STEPS = 30
"""The fewest steps in a turn."""
WORTH = 0.05
"""Share of the time below which a cause is not named."""

Shares = dict[str, float]
"""Seconds, or shares of the time, by part."""


@dataclass(frozen=True)
class StepProfile(Answer):
    """What a profile measured: mean times of a step, on rank 0 unless stated."""

    step_s: float
    """Time of a step while its parts are not timed."""
    parts: Shares
    """Seconds by part, averaged over ranks, in steps that wait for the device
    after each part.
    """
    own_s: list[float]
    """By rank: time of a step without all-reduce and without waiting for other
    ranks. Of a single rank or a sharded model, only `step_s`.
    """
    reads: Shares
    """Seconds per step in which the task reads values from the device, by
    `file:line`, on rank 0.
    """
    accumulation: int
    device: str
    busy_s: float | None = None
    """Seconds per step in which GPU kernels run; None without a GPU."""

    def shares(self) -> Shares:
        """Return each part's share of a step; the shares add up to 1."""
        total = sum(self.parts.values())
        return {
            name: seconds / total
            for name, seconds in self.parts.items()
            if seconds > 0
        }


@dataclass(frozen=True)
class ProfileJob(Job[StepProfile]):
    """Profiles steps of the run, about `seconds` per measurement; writes nothing."""

    answer = StepProfile
    seconds: float

    def execute(self, context: RunContext) -> StepProfile:
        """Profile as one worker; return rank 0's result on every rank."""
        end_at_once()
        context.storage = None
        replica = build_replica(self.load_task(), self.config, context)
        with contextlib.closing(replica):
            return profile_steps(replica, self.seconds)


def profile_steps(replica: Replica, seconds: float) -> StepProfile:
    """Time a replica's steps, about `seconds` per measurement; a collective."""
    group = replica.group
    device = replica.device
    model = replica.step.forward.model
    clock = PartClock(device)
    with parts_timed(replica, clock):
        steps = Steps(replica, clock)
        steps.time_s(WARMUP_STEPS)
        each_s = steps.time_s(2)
        clock.reads.clear()
        count = group.first(max(_FEWEST_TRACED, int(seconds / each_s)))
        step_s = steps.time_s(count)
        reads = {
            place: read_s / count for place, read_s in clock.reads.items()
        }
        parts = steps.parts_s(count)
        busy_s = _busy_s(steps) if device.type == "cuda" else None
        own_s = [step_s]
        if group.world_size > 1 and not is_sharded(model):
            # Last: the ranks' parameters differ from here on.
            with no_sync(model):
                alone = steps.parts_s(count)
            own_s = group.gather(sum(alone.values()) - alone[_SENT])
            # A rank waits for other ranks first, then for the sums. With DDP
            # both waits are part of the backward pass.
            shared_s = max(0.0, sum(parts.values()) - own_s[group.rank])
            in_backward_s = max(0.0, shared_s - parts[_SENT])
            parts["backward"] = max(0.0, parts["backward"] - in_backward_s)
            parts[_WAITED] = min(shared_s, max(own_s) - own_s[group.rank])
            parts[_SENT] = shared_s - parts[_WAITED]
    of_ranks = group.gather(parts)
    mean_parts = {
        name: statistics.fmean(of_rank[name] for of_rank in of_ranks)
        for name in parts
    }
    profiled = StepProfile(
        step_s=step_s,
        parts=mean_parts,
        own_s=own_s,
        reads=reads,
        accumulation=replica.accumulation,
        device=device.type,
        busy_s=busy_s,
    )
    return group.first(profiled)


class PartClock:
    """Measures seconds by part of a step, while the clock is on.

    At any time exactly one part is charged, so the parts add up to the step.
    If the device is asynchronous, each change of part waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False
        self.seconds = defaultdict[str, float](float)
        self.reads = defaultdict[str, float](float)
        """Seconds of the task's host reads by place, measured while the clock
        is off.
        """
        self._parts = ["host"]
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begin to measure."""
        synchronize(self.device)
        self.seconds.clear()
        self.is_on = True
        self._since = time.perf_counter()

    def charge(self) -> None:
        """Charge the current part with the time since the last charge."""
        if self.is_on:
            synchronize(self.device)
            now = time.perf_counter()
            self.seconds[self._parts[-1]] += now - self._since
            self._since = now

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Charge the time of a block, or of a decorated function's calls, to a part.

        Nested blocks of other parts are left out.
        """
        self.charge()
        self._parts.append(part)
        try:
            yield
        finally:
            self.charge()
            self._parts.pop()


class Steps:
    """Takes a replica's steps as training does, with nothing else between them."""

    def __init__(self, replica: Replica, clock: PartClock) -> None:
        self.replica = replica
        self.clock = clock
        self._plans = self._planned()

    def _planned(self) -> Iterator[tuple[list[int], Iterator[Any]]]:
        """Yield each full step's microbatch sizes, with the batches of its epoch."""
        replica = self.replica
        sampler = replica.sampler
        feed = replica.train_feed
        size = sampler.batches.size(0)
        count = min(max(1, sampler.length // size), _MOST)
        ahead = 0  # rows that an epoch advances: a stream cannot go back
        if isinstance(feed.dataset, Stream):
            feed.dataset.begin(0, None, None)
            ahead = count * size
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            rows = []
            each_sizes = []
            for step in range(count):
                plan = sampler.plan(
                    step, replica.microbatch_size, replica.even
                )
                rows += [of_piece + epoch * ahead for of_piece in plan[0]]
                each_sizes.append(plan[1])
            batches = feed.batches(rows, training=True)
            for sizes in each_sizes:
                yield sizes, batches
            next(batches, None)  # the loader ends its epoch

    def _fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.clock.within("data"):
                batch = next(batches)
            yield batch

    def take(self) -> None:
        """Take one step without waiting for an asynchronous device."""
        sizes, batches = next(self._plans)
        size = self.replica.sampler.step_size(0)
        fetched = self._fetched(batches)
        with self.clock.within("forward"):
            self.replica.step(fetched, sizes, size, idle=not any(sizes))

    def time_s(self, count: int) -> float:
        """Return the mean time of `count` steps."""
        synchronize(self.clock.device)
        began = time.perf_counter()
        for _ in range(count):
            self.take()
        synchronize(self.clock.device)
        return (time.perf_counter() - began) / count

    def parts_s(self, count: int) -> Shares:
        """Return the mean seconds of each part over `count` steps."""
        self.clock.start()
        for _ in range(count):
            self.take()
        self.clock.charge()
        self.clock.is_on = False
        return {
            name: self.clock.seconds[name] / count for name in [*_PARTS, _SENT]
        }


def _busy_s(steps: Steps) -> float:
    """Return the time per step during which GPU kernels run."""
    with profile(
        activities=[ProfilerActivity.CUDA], acc_events=True
    ) as recorded:
        steps.time_s(_FEWEST_TRACED)
    busy_us: float = sum(
        event.self_device_time_total for event in recorded.key_averages()
    )
    return busy_us / 1e6 / _FEWEST_TRACED


@contextlib.contextmanager
def parts_timed(replica: Replica, clock: PartClock) -> Iterator[None]:
    """Within the block, time the parts of steps and the task's reads from the device.

    The timed functions are patched for the block only.
    """
    feed = replica.train_feed
    timed: list[tuple[Any, str, str]] = [
        (Copies, "begin", "copy"),
        (torch.autograd, "backward", "backward"),
    ]
    # Phases step the optimizers separately.
    for optimizer in optimizers_of(replica.optimizer):
        timed.append((optimizer, "step", "optimizer"))
    if feed._transform is not None:
        timed.append((feed, "_transform", "transform"))
    if replica.group.world_size > 1:
        timed.append((Group, "sum", _SENT))
        timed.append((TrainStep, "_average", _SENT))
        timed.append((train_step, "share_tensors", _SENT))
    with contextlib.ExitStack() as stack:
        for owner, name, part in timed:
            timed_function = clock.within(part)(getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed_function))
        for name in _HOST_READS:
            read = _timed_read(clock, getattr(torch.Tensor, name))
            stack.enter_context(patch.object(torch.Tensor, name, read))
        yield


def _timed_read(
    clock: PartClock, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a tensor method to time the task's calls of it."""

    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        module = str(frame.f_globals.get("__name__", ""))
        is_library = module.partition(".")[0] in ("torch", "trainers")
        if clock.is_on or is_library or torch.compiler.is_compiling():
            return method(tensor, *args, **kwargs)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        began = time.perf_counter()
        found = method(tensor, *args, **kwargs)
        clock.reads[place] += time.perf_counter() - began
        return found

    return read


@dataclass(frozen=True)
class Gain(Answer):
    """The share of a step's time that a change saves, with its 95 % interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(old_s: list[float], new_s: list[float]) -> Gain:
        """Compute the gain from the old and new seconds per step of each round."""
        logs = [
            math.log(new / old) for old, new in zip(old_s, new_s, strict=True)
        ]
        mean = statistics.fmean(logs)
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        half = student_t(len(logs) - 1, 0.975) * error
        low = 1 - math.exp(mean + half)
        high = 1 - math.exp(mean - half)
        return Gain(1 - math.exp(mean), low, high)

    def __str__(self) -> str:
        how, ends = "less", (self.low, self.high)
        if self.value < 0:
            how, ends = "more", (-self.high, -self.low)
        return f"{abs(self.value):.0%} {how} time per step (95 % interval {ends[0]:.0%} to {ends[1]:.0%} {how})"


@dataclass(frozen=True)
class Cause:
    """Something that takes time, and what may reduce that time."""

    kind: str
    share: float
    """The share of the run's time that the cause takes; a change may save
    less.
    """
    words: str
    changes: Tree = field(default_factory=dict)
    """Dotted keys of the configuration."""
    fix: str = ""
    """What else helps."""
    gain: Gain | None = None
    """The measured gain of `changes`."""

    def lines(self) -> Iterator[str]:
        """Yield the cause as lines for the user."""
        yield f"{self.kind}, {self.share:.0%} of the time: {self.words}"
        for name, value in self.changes.items():
            yield f"    {dump_yaml({name: value}).strip()}"
        if self.fix:
            yield f"    {'or: ' if self.changes else ''}{self.fix}"
        if self.gain is not None:
            yield f"    measured side by side: {self.gain}"


def run_shares(
    result: RunResult | None, profile: StepProfile | None
) -> Shares:
    """Return the shares of the last launch's time, which add up to 1.

    Without a result, only the profile's shares are returned; without a
    profile, steps are one share.
    """
    inside = profile.shares() if profile is not None else {}
    if result is None:
        return inside
    inside = inside or {"steps": 1.0}
    pauses = result.pauses or Pauses()
    compiling_s = _compiling_s(result)
    steps_s = _training_s(result) - compiling_s
    outside_s = {
        "evaluation": pauses.evaluation_s,
        "checkpoints": pauses.checkpoint_s,
        "compiling": compiling_s,
    }
    wall_s = max(result.wall_time_s, steps_s + sum(outside_s.values()), 1e-9)
    found = {name: share * steps_s / wall_s for name, share in inside.items()}
    found |= {name: seconds / wall_s for name, seconds in outside_s.items()}
    found["start and end"] = 1 - sum(found.values())
    return {name: share for name, share in found.items() if share > 0}


def name_causes(
    config: TrainConfig, result: RunResult | None, profile: StepProfile | None
) -> list[Cause]:
    """Return the causes that take more than 5 % of the run's time, largest first."""
    shares = run_shares(result, profile)
    found = list(_of_records(result, shares)) if result is not None else []
    if profile is not None:
        # The share of the run's time that is spent in steps.
        of_run = sum(shares.get(name, 0.0) for name in profile.parts)
        found += _of_steps(config, profile, shares, of_run)
    worth = [cause for cause in found if cause.share > WORTH]
    return sorted(worth, key=lambda cause: -cause.share)


def _training_s(result: RunResult) -> float:
    """Return the seconds that the last launch spent in steps."""
    return result.train_time_s - result.earlier_time_s


def _compiling_s(result: RunResult) -> float:
    """Return by how many seconds compilation prolonged a run's steps."""
    if (
        result.compile is None
        or result.throughput is None
        or result.earlier_time_s
    ):
        return 0.0
    return max(
        0.0, _training_s(result) - result.steps * result.throughput.step_time_s
    )


def _of_steps(
    config: TrainConfig, profile: StepProfile, shares: Shares, of_run: float
) -> Iterator[Cause]:
    def of_step(seconds: float) -> float:
        return seconds / profile.step_s * of_run

    workers = config.data.num_workers
    words = f"steps wait for their batches, loaded with `data.num_workers: {workers}`"
    changes: Tree = {"data.num_workers": max(2, 2 * workers)}
    fix = "make `__getitems__` of the dataset fetch a whole batch, or move the data closer"
    yield Cause("slow loader", shares.get("data", 0.0), words, changes, fix)
    words = "the task's transform() runs in the training process"
    fix = "move it to the dataset's `__getitems__` or to collate(), and set `data.num_workers`, to run it during the steps"
    yield Cause("slow transform", shares.get("transform", 0.0), words, fix=fix)

    places = sorted(profile.reads, key=lambda place: -profile.reads[place])[:3]
    words = f"the host waits for the device where the task reads values from it: {', '.join(places)}"
    fix = "keep values on the device (`metrics()` sums them there)"
    yield Cause(
        "hidden synchronisation",
        of_step(sum(profile.reads.values())),
        words,
        fix=fix,
    )

    usual_s = statistics.median_low(profile.own_s)
    slowest_s = max(profile.own_s)
    words = f"rank {profile.own_s.index(slowest_s)} takes {slowest_s / usual_s:.2f} times as long as the median rank for a step, without waits for other ranks"
    fix = "check that rank's node, or exclude it with `scaling.label_selector`"
    yield Cause(
        "straggling rank", of_step(slowest_s - usual_s), words, fix=fix
    )

    words = "steps wait for gradients to be added up over the ranks"
    fix = "raise `global_batch_size`, so that gradients are sent less often"
    yield Cause("slow all-reduce", shares.get(_SENT, 0.0), words, fix=fix)

    if profile.busy_s is not None:
        idle = of_step(max(0.0, profile.step_s - profile.busy_s))
        for name in ("data", "copy", _SENT, _WAITED):
            idle -= shares.get(name, 0.0)
        words = "the GPU is idle while the host issues work"
        fix = "raise `global_batch_size`, so that each call has more work, or try `cuda_graphs: auto`"
        yield Cause("host-bound small batches", idle, words, fix=fix)

    computing = shares.get("forward", 0.0) + shares.get("backward", 0.0)
    if profile.accumulation > 1 and config.microbatch_size != "auto":
        words = f"a step is split into {profile.accumulation} microbatches of {config.microbatch_size} samples"
        changes = {"microbatch_size": "auto"}
        yield Cause("microbatch too small", computing, words, changes)
    if profile.device == "cuda" and config.precision == "fp32":
        words = (
            "the GPU computes in fp32; GPUs from Ampere on are faster in bf16"
        )
        yield Cause("wrong precision", computing, words, {"precision": "bf16"})


def _of_records(result: RunResult, shares: Shares) -> Iterator[Cause]:
    pauses = result.pauses or Pauses()
    if pauses.evaluations > 1:
        words = f"{pauses.evaluations} evaluations"
        fix = "evaluate less often: `evaluate.every_steps`, `evaluate.every_epochs`"
        share = shares.get("evaluation", 0.0)
        yield Cause("evaluation too often", share, words, fix=fix)
    if pauses.checkpoints > 1:
        words = f"{pauses.checkpoints} checkpoints"
        fix = "set `checkpoint.async: true`, which writes during the steps, or raise `checkpoint.every_s`"
        share = shares.get("checkpoints", 0.0)
        yield Cause("checkpoint stalls", share, words, fix=fix)
    words = "graphs are compiled, and again for each new shape of a batch"
    fix = "see why with `TORCH_LOGS=recompiles`; give the model batches of one shape (`drop_last: true`, padding), or set `compile: off`"
    yield Cause("compiling", shares.get("compiling", 0.0), words, fix=fix)


@dataclass(frozen=True)
class Subject:
    """The run to explain."""

    location: str
    """A run's URI, or a YAML file."""
    directory: Path | None
    config: TrainConfig
    result: RunResult | None = None
    """None for a YAML file, or a run that has not ended or has failed."""


@dataclass(frozen=True)
class Explanation:
    """Where a run's time goes, and why."""

    uri: str
    shares: Shares
    """Shares of the run's time by part; they add up to 1."""
    causes: list[Cause]
    """The largest share first."""
    notes: list[str]
    """What the ranks' figures show; also why there is no profile, if there is none."""

    def __str__(self) -> str:
        lines = [f"{self.uri}: where the time goes"]
        for name, share in sorted(
            self.shares.items(), key=lambda item: -item[1]
        ):
            lines.append(f"  {share * 1e2:5.1f} %  {name}")
        lines += self.notes
        for number, cause in enumerate(self.causes, 1):
            head, *rest = cause.lines()
            lines += [f"{number}. {head}", *rest]
        if not self.causes:
            lines.append(
                f"no known cause takes more than {WORTH:.0%} of the time"
            )
        return "\n".join(lines)


def read_subject(location: str) -> Subject:
    """Read a run from a directory, a URI or a YAML file; ConfigError if there is none."""
    if location.endswith((".yaml", ".yml")):
        tree, directory = read_file(location)
        return Subject(location, directory, build(TrainConfig, tree, location))
    storage, config = open_run(location)
    result = None
    if storage.exists("result.json"):
        result = storage.read_json("result.json", RunResult)
    directory = Path(storage.path) if storage.is_local else None
    return Subject(storage.uri, directory, config, result)


def explain(
    subject: Subject,
    workers: Callable[[Job[Any]], Any],
    seconds: float,
    launcher: str = "spawn",
    verify: bool = False,
) -> Explanation:
    """Explain a run.

    Workers started by `launcher` take steps of the run; each measurement takes
    about `seconds`. With `verify`, the changes for each of the first three
    causes that have any are measured against the old configuration.
    """
    result = subject.result
    notes = []
    if result is not None:
        notes = [sentence for _, sentence in findings(result.ranks)]
    measured = None
    try:
        spec = _measurable(subject, launcher)
        measured = workers(ProfileJob(**asdict(spec), seconds=seconds))
    except PacelineError as error:
        notes.append(f"not profiled: {first_line(error)}")
    causes = name_causes(subject.config, result, measured)
    if verify and measured is not None:
        tried = [cause for cause in causes if cause.changes][:_VERIFIED]
        steps = max(_FEWEST_STEPS, int(seconds / measured.step_s))
        causes = [
            _verified(cause, spec, steps, workers) if cause in tried else cause
            for cause in causes
        ]
    return Explanation(
        subject.location, run_shares(result, measured), causes, notes
    )


def _measurable(subject: Subject, launcher: str) -> RunSpec:
    """Return the run to measure, with all its workers and its largest batch."""
    config = subject.config
    changes = {
        "scaling.num_workers": config.scaling.max_workers,
        "launcher": launcher,
        "batch_schedule": None,
        "batch_size_per_worker": None,
        "global_batch_size": config.batch_size,
    }
    tree = override(TrainConfig, config.tree(), changes)
    own_workers = launcher != "ray"
    spec = make_spec(tree, subject.location, subject.directory, own_workers)
    assert isinstance(spec, RunSpec)
    return replace(spec, quiet=True)


def _verified(
    cause: Cause, spec: RunSpec, steps: int, workers: Callable[[Job[Any]], Any]
) -> Cause:
    """Return the cause with the measured gain of its change."""
    try:
        new = override(TrainConfig, spec.tree, cause.changes)
        build(TrainConfig, new, spec.source)
        job = CompareJob(**asdict(spec), new=new, steps=steps)
        return replace(cause, gain=workers(job))
    except PacelineError as error:
        logger.warning(
            "the change %s could not be measured: %s",
            cause.changes,
            first_line(error),
        )
        return cause


@dataclass(frozen=True)
class CompareJob(Job[Gain]):
    """Takes steps of both configurations in turn; writes nothing."""

    answer = Gain
    new: Tree
    """The changed configuration, in the form of `tree`."""
    steps: int
    """Steps in one turn."""

    def execute(self, context: RunContext) -> Gain:
        """Measure as one worker; return rank 0's result on every rank."""
        end_at_once()
        context.storage = None
        old_s: list[float] = []
        new_s: list[float] = []
        turns = [(self.tree, old_s), (self.new, new_s)]
        for _ in range(_ROUNDS):
            for tree, taken in turns:
                taken.append(self._step_s(tree, context))
            turns.reverse()
        return Gain.of(old_s, new_s)

    def _step_s(self, tree: Tree, context: RunContext) -> float:
        """Build a new replica; return the mean time of its steps on rank 0."""
        torch.compiler.reset()  # each turn compiles as a run does
        spec = replace(self, tree=tree)
        replica = build_replica(spec.load_task(), spec.config, context)
        with contextlib.closing(replica):
            steps = Steps(replica, PartClock(replica.device))
            steps.time_s(WARMUP_STEPS)
            return replica.group.first(steps.time_s(self.steps))
