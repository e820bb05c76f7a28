"""What a run asks to see of itself: torch.profiler over some steps, torch.compile's figures, memory on out of memory.

Environment set: KINETO_LOG_LEVEL, where it is not, on a CPU: the profiler would complain of the missing GPU.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.devices.device import resolve_device
from trainers.errors import StorageError, classify
from trainers.measure.clock import WARMUP_STEPS, StepClock
from trainers.storage import Storage

if TYPE_CHECKING:
    from trainers.measure.compilation import CompileWatch

logger = logging.getLogger(__name__)

HISTORY_ENTRIES = 100_000
"""Allocations and frees that the memory history keeps, the newest ones: some hundred MB of stacks at the most."""

_SETTLE_STEPS = 1  # with the profiler on and nothing kept: its own start is slow
_TABLE_ROWS = 15
_KINETO_SILENT = "99"
_CHART = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<body style="font: 14px sans-serif; margin: 2em"><h1 style="font-size: 18px">{title}</h1>
<svg viewBox="0 0 1000 300" style="width: 100%; border: 1px solid #ccc" preserveAspectRatio="none">
<path d="{path}" fill="none" stroke="#0b6" vector-effect="non-scaling-stroke"/></svg>
<p>0 to {span_ms:,.1f} ms; {low:,.1f} to {high:,.1f} MiB</p></body>
"""


class Inspection:
    """What is looked at between steps of this rank; `inspect_run` makes one only where it is asked for."""

    def __init__(self, profiler: StepProfiler | None, compile_watch: CompileWatch | None, rank: int) -> None:
        self.profiler, self.compile_watch, self.rank = profiler, compile_watch, rank
        self._warmup_left = WARMUP_STEPS

    def step(self, clock: StepClock) -> None:
        """A step was issued. Waits for the device while there is something to profile."""
        self._warmup_left -= 1
        if self.compile_watch is not None:
            if self.compile_watch.compiled_since():
                clock.leave_out()
            if self._warmup_left == 0 and self.rank == 0:
                self.compile_watch.warn_of_breaks()
        if self.profiler is None:
            return
        clock.end_span()
        self.profiler.step()
        clock.counting = not self.profiler.active
        if self.profiler.done:
            self.profiler = None
        clock.start_span()

    def compiled(self) -> dict[str, int] | None:
        """Graphs, graph breaks and recompilations so far; None without torch.compile."""
        if self.compile_watch is None:
            return None
        if self.rank == 0:
            self.compile_watch.say_recompiles()
        return self.compile_watch.figures()

    def close(self) -> None:
        """End what still records."""
        if self.profiler is not None:
            self.profiler.close()
            self.profiler = None


def inspect_run(config: TrainConfig, context: RunContext) -> Inspection | None:
    """What the configuration wants to see; None for nothing, which costs nothing. Before the model is built."""
    profiler = compile_watch = None
    if config.profile_steps and context.rank == 0:
        profiler = StepProfiler(
            config.profile_steps, context.storage, resolve_device(config.device, context.device_index)
        )
    if config.compile != "off":
        from trainers.measure.compilation import CompileWatch  # imports dynamo, which takes seconds

        compile_watch = CompileWatch()
    return Inspection(profiler, compile_watch, context.rank) if profiler or compile_watch else None


class StepProfiler:
    """Records `steps` training steps of this rank, after the warm-up that no throughput counts either.

    Writes below `profile/` of `storage`: `trace.json.gz` for ui.perfetto.dev or chrome://tracing,
    `memory_timeline.json` and `memory_timeline.html`. Without storage there is the table in the log only. The profiler
    slows its steps, so the caller must leave them out of the throughput: those for which `active` is true. Evaluations
    and checkpoints between the recorded steps are in the trace too.
    """

    def __init__(self, steps: int, storage: Storage | None, device: torch.device) -> None:
        self.storage, self.device, self.steps = storage, device, steps
        self.done = False
        self._steps_left = WARMUP_STEPS + _SETTLE_STEPS + steps
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        elif device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WARMUP_STEPS, warmup=_SETTLE_STEPS, active=steps, repeat=1),
            on_trace_ready=self._keep,
            profile_memory=True,
            acc_events=True,
        )
        self._profile.start()

    @property
    def active(self) -> bool:
        """Whether the next step is slowed by the profiler."""
        return not self.done and self._steps_left <= _SETTLE_STEPS + self.steps

    def step(self) -> None:
        """A step has ended; the device must have finished it. Once `done`, there is nothing left to call this for."""
        self._steps_left -= 1
        self._profile.step()
        if self._steps_left == 0:
            self._profile.stop()
            self.done = True

    def close(self) -> None:
        """End the recording early, if it has not ended; what was recorded of it is kept."""
        if self.done:
            return
        self.done = True
        if self._steps_left >= self.steps:
            logger.warning(
                "nothing was profiled: the run ended before step %d, the first after warm-up; train longer",
                WARMUP_STEPS + _SETTLE_STEPS + 1,
            )
        self._profile.stop()

    def _keep(self, recorded: profile) -> None:
        steps = self.steps - self._steps_left
        if steps == 0:
            return
        on_device = "device" if self.device.type == "cuda" else "cpu"
        table = recorded.key_averages().table(sort_by=f"self_{on_device}_time_total", row_limit=_TABLE_ROWS)
        logger.info("profile of %d steps (rank 0; left out of the throughput)\n%s", steps, table)
        if self.storage is None:
            return
        storage = self.storage.child("profile")
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory, "trace.json.gz")
            recorded.export_chrome_trace(str(trace))
            with gzip.open(trace, "rt", errors="replace") as stream:
                points = memory_points(json.load(stream), self.device)
            Path(directory, "memory_timeline.json").write_text(json.dumps(points))
            Path(directory, "memory_timeline.html").write_text(memory_chart(points, self.device))
            try:
                for file in sorted(Path(directory).iterdir()):
                    _copy(file, storage, file.name)
            except StorageError as error:  # the training is worth more than its profile
                logger.warning("the profile is lost: %s", error)
                return
        logger.info(
            "profile written: %s (open it at https://ui.perfetto.dev), %s",
            storage.locate("trace.json.gz"),
            storage.locate("memory_timeline.html"),
        )


def memory_points(trace: dict[str, Any], device: torch.device) -> list[tuple[float, int]]:
    """(ms since the first event, bytes allocated by torch) at every allocation and free of a Chrome trace.

    On a CPU the bytes are the change since the recording began: what was there before is not known.
    """
    # c10::DeviceType numbers, as the trace has them.
    device_type, index = (1, device.index or 0) if device.type == "cuda" else (0, -1)
    points = []
    for event in trace["traceEvents"]:
        if event.get("name") != "[memory]":
            continue
        args = event["args"]
        if args["Device Type"] == device_type and args["Device Id"] == index:
            points.append((float(event["ts"]) / 1e3, int(args["Total Allocated"])))
    points.sort(key=lambda point: point[0])
    began_ms = points[0][0] if points else 0.0
    return [(ms - began_ms, allocated) for ms, allocated in points]


def memory_chart(points: list[tuple[float, int]], device: torch.device) -> str:
    """A page with the memory over time as one line, whole without a network."""
    title = f"Memory that torch has allocated on {device}"
    if device.type != "cuda":
        title += ", against the start of the recording"
    if not points:
        points = [(0.0, 0)]
    span_ms = points[-1][0] or 1.0
    low = min(allocated for _, allocated in points)
    high = max(allocated for _, allocated in points)
    scale = 280 / ((high - low) or 1)
    corners = [(1000 * ms / span_ms, 290 - scale * (allocated - low)) for ms, allocated in points]
    path = f"M0 {corners[0][1]:.1f}" + "".join(f"H{x:.2f}V{y:.1f}" for x, y in corners)
    return _CHART.format(title=title, path=path, span_ms=span_ms, low=low / 2**20, high=high / 2**20)


@contextlib.contextmanager
def memory_watched(config: TrainConfig, context: RunContext) -> Iterator[None]:
    """Save a memory report when the block, one attempt at the run, ends out of device memory.

    With `memory_history` it has the stack of each allocation.
    """
    device = resolve_device(config.device, context.device_index)
    recorded = config.memory_history and device.type == "cuda"
    if config.memory_history and not recorded and context.rank == 0:
        logger.warning("`memory_history: true` means nothing on %s: only CUDA allocations are recorded", device.type)
    if recorded:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    try:
        yield
    except Exception as error:
        save_memory_report(error, device, context.storage, context.rank)
        raise
    finally:
        if recorded:
            torch.cuda.memory._record_memory_history(enabled=None)


def save_memory_report(error: BaseException, device: torch.device, storage: Storage | None, rank: int) -> None:
    """Keep what lay in the GPU's memory when `error` ended the run: nothing for other errors and other devices.

    Writes `memory/rank-N-summary.txt` and, for https://pytorch.org/memory_viz, `memory/rank-N-snapshot.pickle`.
    Without storage (a trial of a sweep) the summary is a debug line. Never raises: the error itself matters more.
    """
    if device.type != "cuda" or classify(error) != "out_of_memory":
        return
    try:
        summary = torch.cuda.memory_summary(device)
        if storage is None:
            logger.debug("memory of rank %d when it ran out\n%s", rank, summary)
            return
        directory = storage.child("memory")
        names = f"rank-{rank}-summary.txt", f"rank-{rank}-snapshot.pickle"
        directory.write(names[0], summary.encode())
        with tempfile.TemporaryDirectory() as aside:
            snapshot = Path(aside, names[1])
            torch.cuda.memory._dump_snapshot(str(snapshot))
            _copy(snapshot, directory, names[1])
    except (StorageError, OSError, RuntimeError) as failure:
        logger.warning("no memory report of rank %d: %s", rank, failure)
        return
    logger.warning(
        "rank %d ran out of memory; what lay in it: %s, and %s for https://pytorch.org/memory_viz",
        rank,
        *(directory.locate(name) for name in names),
    )


def _copy(file: Path, storage: Storage, name: str) -> None:
    with file.open("rb") as source, storage.writer(name) as target:
        shutil.copyfileobj(source, target)
