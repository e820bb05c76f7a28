"""Profile some steps of a run, watch its compiler, report what filled its GPU.

Environment set: KINETO_LOG_LEVEL, where it is not, on a CPU: otherwise the profiler
would complain that there is no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from trainers.causes import classify
from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.devices.device import resolve_device
from trainers.errors import StorageError
from trainers.measure.clock import WARMUP_STEPS, StepClock
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_KEPT = 1024
"""Compilations that dynamo remembers (64 by itself): a graph with its backward is two.
"""
_SHOWN = 5
_SETTLE_STEPS = 1  # with the profiler on and nothing kept: its own start is slow
_TABLE_ROWS = 15


class Inspection:
    """Profiles this rank's steps and watches its compiler, as configured."""

    def __init__(
        self,
        profiler: StepProfiler | None,
        compile_watch: CompileWatch | None,
        rank: int,
    ) -> None:
        self.profiler = profiler
        self.compile_watch = compile_watch
        self.rank = rank
        self._warmup_left = WARMUP_STEPS

    def step(self, clock: StepClock) -> None:
        """Note that a step was issued.

        Waits for the device as long as the profiler is active.
        """
        self._warmup_left -= 1
        if self.compile_watch is not None:
            if self.compile_watch.compiled_since():
                clock.leave_out()
            if self._warmup_left == 0 and self.rank == 0:
                self.compile_watch.warn_of_breaks()
        if self.profiler is None:
            return
        clock.end_span()
        clock.settle(clock.spans)
        clock.counting = not self.profiler.step()
        if self.profiler.done:
            self.profiler = None
        clock.start_span()

    def compiled(self) -> dict[str, int] | None:
        """Return counts of graphs, breaks and recompilations; None if not compiled."""
        if self.compile_watch is None:
            return None
        if self.rank == 0:
            self.compile_watch.say_recompiles()
        return self.compile_watch.figures()

    def close(self) -> None:
        """End a recording that is still running."""
        if self.profiler is not None:
            self.profiler.close()


def inspect_run(config: TrainConfig, context: RunContext) -> Inspection | None:
    """Return the inspection that the configuration asks for, or None.

    Call it before the model is built.
    """
    profiler = compile_watch = None
    if config.profile_steps and context.rank == 0:
        device = resolve_device(config.device, context.device_index)
        profiler = StepProfiler(config.profile_steps, context.storage, device)
    if config.compile != "off":
        compile_watch = CompileWatch()
    if profiler or compile_watch:
        return Inspection(profiler, compile_watch, context.rank)
    return None


class StepProfiler:
    """Records `steps` training steps of this rank, after the warm-up.

    The warm-up is the same one that throughput leaves out.

    Writes `profile/trace.json.gz` to `storage`, for ui.perfetto.dev or
    chrome://tracing. Without storage there is only the table in the log. The trace
    includes evaluations and checkpoints between the recorded steps.
    """

    def __init__(
        self, steps: int, storage: Storage | None, device: torch.device
    ) -> None:
        self.storage = storage
        self.device = device
        self.steps = steps
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        elif device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silent
        self._profile = profile(
            activities=activities,
            schedule=schedule(
                wait=WARMUP_STEPS, warmup=_SETTLE_STEPS, active=steps, repeat=1
            ),
            on_trace_ready=self._keep,
            profile_memory=True,
            acc_events=True,
        )
        self._profile.start()

    @property
    def recorded(self) -> int:
        """Number of steps recorded so far; zero or negative before the first."""
        return self._profile.step_num - WARMUP_STEPS - _SETTLE_STEPS

    @property
    def done(self) -> bool:
        """Whether all steps are recorded and written: `step` is not needed any more."""
        return self.recorded == self.steps

    def step(self) -> bool:
        """Note that a step has ended; return whether the next one is slowed.

        The device must have finished the step.

        A slowed step must be left out of the throughput.
        """
        self._profile.step()
        if self.done:
            self._profile.stop()
        return self._profile.current_action != ProfilerAction.NONE

    def close(self) -> None:
        """End the recording early; what was recorded so far is kept."""
        if self.recorded <= 0:
            words = "nothing was profiled: the run ended before step %d, the first after warm-up; train longer"
            logger.warning(words, WARMUP_STEPS + _SETTLE_STEPS + 1)
        self._profile.stop()

    def _keep(self, recorded: profile) -> None:
        steps = self.recorded
        if steps == 0:
            return
        on_device = "device" if self.device.type == "cuda" else "cpu"
        table = recorded.key_averages().table(
            sort_by=f"self_{on_device}_time_total", row_limit=_TABLE_ROWS
        )
        logger.info(
            "profile of %d steps (rank 0; left out of the throughput)\n%s", steps, table
        )
        if self.storage is None:
            return
        storage = self.storage.child("profile")
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory, "trace.json.gz")
            recorded.export_chrome_trace(str(trace))
            try:
                storage.copy(trace, trace.name)
            except StorageError as error:  # the training is worth more than its profile
                logger.warning("the profile is lost: %s", error)
                return
        words = "profile written: %s (open it at https://ui.perfetto.dev)"
        logger.info(words, storage.locate(trace.name))


class CompileWatch:
    """Counts graphs, graph breaks and recompilations from its creation on.

    Dynamo counts for the whole process, so only one may exist at a time.

    It imports dynamo, which takes seconds: create it only for a run that compiles.
    """

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._utils = utils
        self._utils.set_compilation_metrics_limit(_KEPT)
        self._utils.clear_compilation_metrics()
        self._before = {
            group: Counter(self._utils.counters[group])
            for group in ("graph_break", "resumes", "stats")
        }
        self._graphs = self._utils.counters["stats"]["unique_graphs"]

    def figures(self) -> dict[str, int]:
        """Return counts of `graphs`, `graph_breaks` and `recompiles`.

        These count the compiled graphs, the places where a graph broke, and the
        compilations caused by a failed guard.
        """
        return {
            "graphs": self._new("stats")["unique_graphs"],
            # Breaks for one reason at two places make one reason and two resumed
            # functions; some resume nothing.
            "graph_breaks": max(
                len(self._new("graph_break")), len(self._new("resumes"))
            ),
            "recompiles": len(self._recompiles()),
        }

    def compiled_since(self) -> bool:
        """Whether a graph was compiled since the last call; almost free."""
        before = self._graphs
        self._graphs = self._utils.counters["stats"]["unique_graphs"]
        return self._graphs != before

    def warn_of_breaks(self) -> None:
        """Warn where the graph broke, if it did; call it after the warm-up."""
        reasons = [reason.splitlines() for reason in self._new("graph_break")]
        if reasons:
            shown = "; ".join(lines[0].strip() for lines in reasons[:_SHOWN])
            advice = "TORCH_LOGS=graph_breaks shows where, `fullgraph: true` makes those of the model errors"
            places = self.figures()["graph_breaks"]
            logger.warning(
                "torch.compile broke the graph at %d places: %s (%s)",
                places,
                shown,
                advice,
            )

    def say_recompiles(self) -> None:
        """Log why graphs were compiled again, the most frequent reasons first."""
        reasons = Counter(self._recompiles())
        for reason, count in reasons.most_common(_SHOWN):
            logger.info("torch.compile compiled again (%d x): %s", count, reason)

    def _new(self, group: str) -> Counter[str]:
        return Counter(self._utils.counters[group]) - self._before[group]

    def _recompiles(self) -> list[str]:
        metrics = self._utils.get_compilation_metrics()
        found = [
            entry.recompile_reason
            for entry in metrics
            if entry.is_forward and entry.recompile_reason
        ]
        # "0/1: tensor 'x' size mismatch ...": which of the earlier graphs refused says
        # nothing to a user.
        return [reason.partition(": ")[2].strip() or reason for reason in found]


@contextlib.contextmanager
def memory_watched(config: TrainConfig, context: RunContext) -> Iterator[None]:
    """Save a memory report if the block runs out of device memory."""
    device = resolve_device(config.device, context.device_index)
    try:
        yield
    except Exception as error:
        save_memory_report(error, device, context.storage, context.rank)
        raise


def save_memory_report(
    error: BaseException, device: torch.device, storage: Storage | None, rank: int
) -> None:
    """Save what the GPU's memory contained when `error` ended the run.

    Does nothing for other errors and other devices.

    Writes `memory/rank-N-summary.txt` and, for https://pytorch.org/memory_viz,
    `memory/rank-N-snapshot.pickle`. Without storage (a trial of a sweep) the summary is
    logged at debug level. Never raises: the error itself matters more.
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
            directory.copy(snapshot, names[1])
    except (StorageError, OSError, RuntimeError) as failure:
        logger.warning("no memory report of rank %d: %s", rank, failure)
        return
    words = "rank %d ran out of memory; what lay in it: %s, and %s for https://pytorch.org/memory_viz"
    logger.warning(words, rank, *map(directory.locate, names))
