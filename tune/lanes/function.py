"""A trial that runs the user's own training function: what its process asks of the
worker of a lane (Ray).

It gets Ray Train's own answers of the worker, but for what belongs to one trial:
reports go to the mailbox, where Ray has a controller, and checkpoints into a directory
of the trial's own.
"""

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
from tune.forks.child import TrialStopped
from tune.forks.client import Fork, Zygote
from tune.forks.place import Place
from tune.lanes.messages import Assignment
from tune.ray_internals import (
    TrainContext,
    flatten_dict,
    get_fs_and_path,
    get_train_context,
    get_train_fn_utils,
    set_train_context,
)
from tune.trials.microbatch_bounds import fixed_size
from tune.trials.record import placed


@dataclass
class FunctionContext(TrainContext):
    """Ray's context of a worker, for one trial."""

    mailbox: Any = None
    assignment: Any = None
    began: float = 0.0
    """When the training began, by this machine's clock."""
    row: Any = None
    """The numbers that are being reported, as a row of the trial's curve; its step is
    the report's own number where the function has none.
    """

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Any = None,
        name: Any = None,
        mode: Any = None,
        *given: Any,
    ) -> None:
        """As Ray has it, but that the search hears of it, and may end the trial; no
        checkpoint is stored later.
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
        return (
            checkpoint_dir_name or f"checkpoint_{self.report_call_index:06d}"
        )  # the same on all ranks

    def _wait_then_report(self, training_report: Any, report_call_index: int) -> None:
        stored = training_report.checkpoint
        self.current_report_index = report_call_index
        self.checkpoint = stored or self.checkpoint
        place = (
            self.assignment.ticket,
            self.assignment.attempt,
            report_call_index,
            self.get_world_size(),
        )
        row = self.row if self.get_world_rank() == 0 else {}
        if not ray.get(
            self.mailbox.report_part.remote(*place, row, stored and stored.path)
        ):
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


def run_function(
    zygote: Zygote,
    assignment: Assignment,
    mailbox: Any,
    lane: int,
    place: Place,
    files: list[int],
    serve: Callable[[Fork, Any], dict[str, Any]],
) -> dict[str, Any]:
    """Run a trial; `serve` answers what its process asks.

    Returns this rank's outcome as plain data.

    Raises InterruptedError where another rank has ended the trial, NoOutcomeError where
    its process has died.
    """
    quiet_reports()
    clock = time.perf_counter()
    spec = FunctionSpec(
        assignment.tree, assignment.path, f"trial {assignment.trial}", ""
    )
    own = get_train_context()
    context = _context(own, mailbox, assignment)
    set_train_context(context)
    asked = _Asked(context, assignment.begun.train_time_s if assignment.begun else 0.0)

    size = fixed_size(assignment.tree)
    began = time.time()
    try:
        of_ray = (
            [str(gpu) for gpu in ray.get_gpu_ids()],
            assignment.trial,
            context.storage_context,
        )
        fork = zygote.fork(
            "tune.forks.function:run_function", spec, place, *of_ray, files=files
        )
        outcome = serve(fork, asked)
    except TrialStopped:
        outcome = {"status": "stopped"}
    finally:
        if hasattr(own, "collective_seq"):  # from Ray 2.60 on
            own.collective_seq = context.collective_seq
        set_train_context(own)
    if outcome["status"] in ("done", "stopped"):
        ended = time.perf_counter()
        called = asked.called or ended
        times = {
            "starting_s": called - clock,
            "training_s": ended - called,
            "total_s": ended - clock,
        }
        peak = outcome.pop("peak_memory_bytes", None)
        outcome |= {
            "result": {"peak_memory_bytes": peak},
            "spent": {"began": began, **times},
        }
    fits = {"done": True, "stopped": True, "out_of_memory": False}.get(
        outcome["status"]
    )
    if size is not None and fits is not None and (place.rank == 0 or not fits):
        ray.get(mailbox.observe.remote(lane, assignment.ticket, size, fits))
    for key in ("returned", "raised"):
        outcome.pop(key, None)
    return outcome


class _Asked:
    """What a training function asks: Ray's own implementation answers, in the worker,
    with the trial's context.
    """

    def __init__(self, context: FunctionContext, earlier_s: float) -> None:
        self._utils = get_train_fn_utils()
        self._context = context
        self._earlier_s = earlier_s
        self.called: float | None = None
        """When the function began, by this process's clock."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)

    def begins(self) -> None:
        """Its function is about to be called."""
        self.called = time.perf_counter()
        self._context.began = self.called - self._earlier_s


def _context(
    own: TrainContext, mailbox: Any, assignment: Assignment
) -> FunctionContext:
    """The worker's context with what is the trial's own."""
    given = {one.name: getattr(own, one.name) for one in fields(TrainContext)}
    run = copy.copy(own.train_run_context.run_config)
    storage = copy.copy(own.storage_context)
    begun = assignment.begun
    run.name = storage.experiment_dir_name = assignment.trial
    if assignment.storage is not None:  # the lane may have begun with another sweep
        run.storage_path = assignment.storage.parent.uri
        storage.storage_filesystem, storage.storage_fs_path = get_fs_and_path(
            run.storage_path
        )
    given |= {
        "train_run_context": replace(
            own.train_run_context,
            run_config=run,
            train_loop_config=assignment.tree.get("train_loop_config"),
        ),
        "storage_context": storage,
        "checkpoint": begun
        and Checkpoint(begun.checkpoint, storage.storage_filesystem),
        "current_report_index": begun.number if begun else 0,
    }
    return FunctionContext(**given, mailbox=mailbox, assignment=assignment)
