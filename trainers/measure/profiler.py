"""Profile some of a run's steps, count compiled graphs, and report what filled a GPU.

Environment set: KINETO_LOG_LEVEL, on a CPU and unless it is already set,
because the profiler would otherwise complain that there is no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
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

_SETTLE_STEPS = 1  # recorded but not kept: the profiler's start is slow
_TABLE_ROWS = 15


class Inspection:
    """Profiles this rank's steps and watches its compiler, as configured."""

    def __init__(
        self,
        profiler: StepProfiler | None,
        compile_watch: CompileWatch | None,
    ) -> None:
        self.profiler = profiler
        self.compile_watch = compile_watch

    def step(self, clock: StepClock) -> None:
        """Note that a step was issued.

        Waits for the device while the profiler is active.
        """
        if (
            self.compile_watch is not None
            and self.compile_watch.compiled_since()
        ):
            clock.leave_out()
        if self.profiler is None:
            return
        clock.end_span()
        clock.settle(clock.spans)
        clock.counting = not self.profiler.step()
        if self.profiler.done:
            self.profiler = None
        clock.start_span()

    def compiled(self) -> dict[str, int] | None:
        """Return the number of compiled graphs; None if the run does not compile."""
        if self.compile_watch is None:
            return None
        return {"graphs": self.compile_watch.graphs()}

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
        return Inspection(profiler, compile_watch)
    return None


class StepProfiler:
    """Records `steps` training steps of this rank, after the warm-up.

    Writes `profile/trace.json.gz` to `storage`, for ui.perfetto.dev or
    chrome://tracing. Without storage there is only the table in the log.
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
        """Note that a step has ended; return whether profiling slows the next one.

        The device must have finished the step.
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
            "profile of %d steps (rank 0; left out of the throughput)\n%s",
            steps,
            table,
        )
        if self.storage is None:
            return
        storage = self.storage.child("profile")
        with tempfile.TemporaryDirectory() as directory:
            trace = Path(directory, "trace.json.gz")
            recorded.export_chrome_trace(str(trace))
            try:
                storage.write(trace.name, trace.read_bytes())
            except (
                StorageError
            ) as error:  # the training is worth more than its profile
                logger.warning("the profile is lost: %s", error)
                return
        words = "profile written: %s (open it at https://ui.perfetto.dev)"
        logger.info(words, storage.locate(trace.name))


class CompileWatch:
    """Counts compiled graphs from its creation on.

    Creating a CompileWatch imports dynamo, which takes seconds, so create one
    only for a run that compiles.
    """

    def __init__(self) -> None:
        from torch._dynamo import utils

        self._stats = utils.counters["stats"]
        self._before = self._graphs = self._stats["unique_graphs"]

    def graphs(self) -> int:
        """Return how many graphs were compiled."""
        return self._stats["unique_graphs"] - self._before

    def compiled_since(self) -> bool:
        """Whether a graph was compiled since the last call."""
        before = self._graphs
        self._graphs = self._stats["unique_graphs"]
        return self._graphs != before


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
    error: BaseException,
    device: torch.device,
    storage: Storage | None,
    rank: int,
) -> None:
    """Save what the GPU's memory contained when `error` ended the run.

    Does nothing if the error is not about GPU memory, on other devices, and
    without storage (as in a trial of a sweep). Never raises: the error itself
    matters more.
    """
    is_full = device.type == "cuda" and classify(error) == "out_of_memory"
    if not is_full or storage is None:
        return
    directory = storage.child("memory")
    name = f"rank-{rank}-summary.txt"
    try:
        directory.write(name, torch.cuda.memory_summary(device).encode())
    except (StorageError, RuntimeError) as failure:
        logger.warning(
            "the memory report of rank %d could not be written: %s",
            rank,
            failure,
        )
        return
    words = "rank %d ran out of memory; its allocations are listed in %s"
    logger.warning(words, rank, directory.locate(name))
