"""A trial of the user's own training function, in the worker of a lane (Ray).

Its process gets Ray Train's own answers of the worker, but for what belongs to one
trial: reports go to the mailbox, where Ray has a controller, and checkpoints into a
directory of the trial's own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import ray
from ray.train import Checkpoint, CheckpointUploadMode

from trainers.errors import ConfigError
from trainers.launch.spec import FunctionSpec
from trainers.on_ray.internals import quiet_reports
from tune.forks.assignment import Assignment, Place
from tune.forks.child import TrialStopped
from tune.forks.client import Fork, Zygote
from tune.ray_internals import (
    TrainContext,
    flatten_dict,
    get_train_context,
    get_train_fn_utils,
    set_train_context,
)
from tune.trials.microbatch_bounds import fixed_size
from tune.trials.record import placed


@dataclass
class FunctionContext(TrainContext):
    """Ray's context of a worker, for one trial."""

    lane: Any = None
    assignment: Any = None
    began: float = 0.0
    """When the training began, by this machine's clock."""
    row: Any = None
    """The numbers that are being reported, as a row of the trial's curve.

    Its step is the report's own number where the function has none.
    """

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Any = None,
        name: Any = None,
        mode: Any = None,
        *given: Any,
    ) -> None:
        """Report as Ray does, but to the search, which may end the trial.

        No checkpoint is stored later.
        """
        time_s = time.perf_counter() - self.began
        known = {
            key: float(value)
            for key, value in flatten_dict(metrics).items()
            if _is_number(value)
        }
        self.row = placed(
            {"step": self.report_call_index + 1.0, **known, "train_time_s": time_s}
        )
        if checkpoint is not None:
            self.storage_context._create_validation_file()
        mode = CheckpointUploadMode.SYNC if mode is CheckpointUploadMode.ASYNC else mode
        super().report(metrics, checkpoint, name, mode, *given)

    def _sync_checkpoint_dir_name_across_ranks(
        self, checkpoint_dir_name: str | None = None
    ) -> str:
        # The same on all ranks.
        return checkpoint_dir_name or f"checkpoint_{self.report_call_index:06d}"

    def _wait_then_report(self, training_report: Any, report_call_index: int) -> None:
        stored = training_report.checkpoint
        self.current_report_index = report_call_index
        self.checkpoint = stored or self.checkpoint
        goes_on = self.lane.tell(
            "report_part",
            self.assignment.ticket,
            self.assignment.attempt,
            report_call_index,
            self.get_world_size(),
            self.row if self.get_world_rank() == 0 else {},
            stored and stored.path,
        )
        if not goes_on:
            raise TrialStopped(0)

    def get_all_reported_checkpoints(self, *args: Any, **given: Any) -> Any:
        """A sweep's trial keeps no list of them."""
        raise self._refused(
            "get_all_reported_checkpoints",
            "call `ray.train.get_checkpoint` for the newest one",
        )

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """A sweep's file can name no Ray dataset."""
        raise self._refused(
            "get_dataset_shard",
            "read the data in the function, or sweep with `tune.ray`",
        )

    def _refused(self, call: str, fix: str) -> ConfigError:
        named = self.assignment.tree["train_func"]
        return ConfigError(
            "train_func",
            named,
            f"calls `{call}`, which a sweep from a file does not have",
            fix,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


class FunctionTrial:
    """A trial, in one rank of its lane.

    Its process asks the attributes of Ray's own implementation, which answers in the
    worker, with the trial's context.
    """

    def __init__(
        self, lane: Any, assignment: Assignment, path: tuple[str, ...]
    ) -> None:
        self._lane = lane
        self._assignment = assignment
        self._path = path
        self._utils = get_train_fn_utils()
        self._own = get_train_context()
        self._context = _context(self._own, lane, assignment)
        self._called_s: float | None = None
        """When the function began, by this process's clock."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)

    def begins(self) -> None:
        """Note that the function is about to be called."""
        self._called_s = time.perf_counter()
        begun = self._assignment.begun
        self._context.began = self._called_s - (begun.train_time_s if begun else 0.0)

    def run(
        self,
        zygote: Zygote,
        place: Place,
        files: list[int],
        serve: Callable[[Fork, Any], dict[str, Any]],
    ) -> dict[str, Any]:
        """Run it; `serve` answers what its process asks.

        Returns:
            This rank's outcome as plain data.

        Raises:
            InterruptedError: another rank has ended the trial.
            NoOutcomeError: its process has died.
        """
        quiet_reports()
        clock_s = time.perf_counter()
        began = time.time()
        name = self._assignment.trial
        set_train_context(self._context)
        try:
            fork = zygote.fork(
                "tune.forks.function:run_function",
                FunctionSpec(self._assignment.tree, self._path, f"trial {name}", ""),
                place,
                [str(gpu) for gpu in ray.get_gpu_ids()],
                name,
                self._context.storage_context,
                files=files,
            )
            outcome = serve(fork, self)
        except TrialStopped:
            outcome = {"status": "stopped"}
        finally:
            if hasattr(self._own, "collective_seq"):  # from Ray 2.60 on
                self._own.collective_seq = self._context.collective_seq
            set_train_context(self._own)
        for key in ("returned", "raised"):
            outcome.pop(key, None)
        status = outcome["status"]
        if status in ("done", "stopped"):
            ended_s = time.perf_counter()
            called_s = self._called_s or ended_s
            outcome["result"] = {
                "peak_memory_bytes": outcome.pop("peak_memory_bytes", None)
            }
            outcome["spent"] = {
                "began": began,
                "starting_s": called_s - clock_s,
                "training_s": ended_s - called_s,
                "total_s": ended_s - clock_s,
            }
            if place.rank == 0:
                self._observe(fits=True)
        elif status == "out_of_memory":
            self._observe(fits=False)
        return outcome

    def _observe(self, fits: bool) -> None:
        """Tell the mailbox whether the function's batch fits."""
        size = fixed_size(self._assignment.tree)
        if size is not None:
            found = self._assignment.ticket, size, fits
            self._lane.tell("observe", self._lane.number, *found)


def _context(own: TrainContext, lane: Any, assignment: Assignment) -> FunctionContext:
    """Return the worker's context with what is the trial's own."""
    given = {field.name: getattr(own, field.name) for field in fields(TrainContext)}
    run = copy.copy(own.train_run_context.run_config)
    storage = copy.copy(own.storage_context)
    run.name = storage.experiment_dir_name = assignment.trial
    given["train_run_context"] = replace(
        own.train_run_context,
        run_config=run,
        train_loop_config=assignment.tree.get("train_loop_config"),
    )
    given["storage_context"] = storage
    begun = assignment.begun
    given["checkpoint"] = begun and Checkpoint(
        begun.checkpoint, storage.storage_filesystem
    )
    given["current_report_index"] = begun.number if begun else 0
    return FunctionContext(**given, lane=lane, assignment=assignment)
