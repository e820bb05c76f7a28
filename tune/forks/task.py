"""A trial of a task, in its own process."""

import logging
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

import trainers.loop.fit  # noqa: F401 (imported before the fork, for all runs)
from trainers.causes import failure_of
from trainers.config.model import Tree
from trainers.context import RunContext
from trainers.devices.device import (
    device_name,
    grow_segments,
    total_memory_bytes,
    with_gpu_memory,
)
from trainers.errors import (
    ConfigError,
    PacelineError,
    PreemptedError,
    RunFailedError,
    TooLargeError,
)
from trainers.launch.process import setup_logging
from trainers.launch.spec import FunctionSpec, RunSpec, check_precision
from trainers.launch.training import TrainJob
from trainers.step.ceiling import next_smaller
from tune.config import check_reported
from tune.forks.assignment import Assignment, Place
from tune.forks.child import Channel, as_error, imported_libraries

_NAMES = (
    "objective.metric",
    "objective.target",
    "checkpoint.best",
    "early_stopping.metric",
    "schedule()",
)
"""Fields that name a metric: the sweep ends if no trial reports that metric."""


class TrialContext(RunContext):
    """The RunContext of a trial: forwards calls to the worker that started it."""

    def __init__(
        self, channel: Channel, place: Place, assignment: Assignment
    ) -> None:
        super().__init__(
            None,
            "lane",
            place.rank,
            place.world_size,
            place.local_rank,
            place.local_world_size,
            place.device_index,
        )
        self._channel = channel
        self.microbatch_ceiling = assignment.microbatch_ceiling
        self.microbatch_bounds = assignment.microbatch_bounds
        self.source = assignment.source
        self.refuge = assignment.refuge
        self.watches = assignment.watches
        self._goes_on = True

    def report(
        self, metrics: Tree, checkpoint: str | None, elapsed_s: float
    ) -> None:
        """Send an evaluation from rank 0; note whether the trial should continue."""
        if checkpoint is None:
            check_reported(self.watches, metrics)
        if self.rank == 0 and checkpoint is None:
            self._goes_on = (
                self._channel.call("report", metrics) and self._goes_on
            )

    def observe(self, figures: dict[str, float]) -> None:
        """Send the figures of this rank, with its GPU memory, to the worker."""
        self._channel.call("observe", with_gpu_memory(figures))

    def should_stop(self, elapsed_s: float) -> bool:
        """Return whether the search has stopped the trial."""
        return not self._goes_on

    def preempted(self, elapsed_s: float) -> bool:
        """Return whether the node is about to be taken away."""
        return bool(self._channel.call("preempted", elapsed_s))

    def fits(self, microbatch_size: int, fits: bool) -> None:
        """Tell the mailbox, for all other trials, whether a microbatch fits."""
        low, high = self.microbatch_bounds
        if not fits:
            least = min(microbatch_size, high or microbatch_size)
            self.microbatch_bounds = (low, least)
        self._channel.call("fits", microbatch_size, fits)

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """Report where this rank hangs; the trial then ends."""
        self._channel.call("hung", failure, stack)


def check(
    channel: Channel,
    spec: RunSpec | FunctionSpec,
    precisions: Sequence[Any],
    device_type: str,
) -> PacelineError | None:
    """Load the task or function; check that the device supports a task's precisions.

    Returns:
        The error that was found, or None.
    """
    try:
        if isinstance(spec, FunctionSpec):
            spec.load()
            return None
        spec.load_task()
        for precision in precisions:
            tree = spec.tree | {"precision": precision}
            check_precision(replace(spec, tree=tree), device_type)
    except PacelineError as error:
        return error
    return None


def device_label(channel: Channel, device_index: int) -> str:
    """Return the device's name and memory, which determine how much fits on it."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", device_index)
    return (
        f"{device_name(device)}, {total_memory_bytes(device) / 2**30:.1f} GiB"
    )


def run_trial(
    channel: Channel,
    assignment: Assignment,
    path: tuple[str, ...],
    place: Place,
) -> Any:
    """Train, and return the outcome as plain data."""
    began = time.time()
    clock = time.monotonic()
    modules = set(sys.modules)
    setup_logging(1)  # only warnings, because many lanes log into one terminal
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    grow_segments()
    context = TrialContext(channel, place, assignment)
    job = TrainJob(assignment.tree, path, f"trial {assignment.trial}", "")
    try:
        if place.address:
            place.form_group(channel.files)
        result = job.execute(context)
    except SystemExit:
        raise
    except BaseException as error:
        return _failed(as_error(error), context)
    total_s = time.monotonic() - clock
    if place.address:
        from trainers.devices.group import leave_group

        leave_group(failed=False)
    phases_s = {**result.phases_s, "an earlier lane": result.earlier_time_s}
    total_s += result.earlier_time_s
    spent = {
        "began": began,
        "starting_s": max(
            0.0, total_s - result.earlier_time_s - result.wall_time_s
        ),
        "training_s": result.train_time_s,
        "total_s": total_s,
        "first_step_s": result.first_step_s,
        "phases_s": phases_s
        | {"closing": max(0.0, total_s - sum(phases_s.values()))},
    }
    return {
        "status": result.status,
        "result": asdict(result),
        "spent": spent,
        "imported": imported_libraries(modules),
    }


def _failed(error: BaseException, context: RunContext) -> Tree:
    """Return the outcome of a trial that was ended by an error."""
    if isinstance(error, PreemptedError):
        return {"status": error.status, "message": str(error)}
    failure = failure_of(error, context.rank)
    outcome: Tree = {
        "status": failure.status,
        "message": failure.message,
        "follows": failure.follows,
    }
    if isinstance(error, ConfigError) and error.field in _NAMES:
        outcome["misnamed"] = error
    # A single worker reduces its microbatch without a restart.
    if isinstance(error, TooLargeError) and context.world_size > 1:
        outcome["smaller"] = next_smaller(error.microbatch_size)
    if not isinstance(error, PacelineError) and failure.status == "error":
        outcome["traceback"] = "".join(
            traceback.format_exception(error, limit=-20)
        )
    return outcome
