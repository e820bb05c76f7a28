"""A trial that runs the user's own training function, in a worker of a lane (Ray).

The function finds Ray Train's own context of the worker, but for what belongs to one trial: reports go to the mailbox,
where Ray has a controller, and checkpoints into a directory of the trial's own.
"""

import copy
import logging
import random
import time
import traceback
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import ray
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # (before the baseline: functions import it)
from ray._private.dict import flatten_dict
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train._internal import session
from ray.train.v2._internal.execution import context as ray_context
from ray.train.v2._internal.execution.context import TrainContext, get_train_context, set_train_context
from ray.train.v2._internal.execution.storage import get_fs_and_path

from trainers.causes import failure_of
from trainers.devices.device import peak_memory_bytes, reset_peak_memory
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.launch.spec import FunctionSpec
from tune.lanes.messages import Assignment
from tune.lanes.process_state import Baseline
from tune.lanes.stopped import TrialStopped
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
    """The numbers that are being reported, as a row of the trial's curve; its step is the report's own number where the
    function has none.
    """

    def report(
        self, metrics: dict[str, Any], checkpoint: Any = None, name: Any = None, mode: Any = None, *given: Any
    ) -> None:
        """As Ray has it, but that the search hears of it, and may end the trial; no checkpoint is stored later."""
        time_s = time.perf_counter() - self.began
        known = {key: float(value) for key, value in flatten_dict(metrics).items() if _is_number(value)}
        self.row = placed({"step": self.report_call_index + 1.0, **known, "train_time_s": time_s})
        if checkpoint is not None:
            self.storage_context._create_validation_file()
        mode = CheckpointUploadMode.SYNC if mode is CheckpointUploadMode.ASYNC else mode
        super().report(metrics, checkpoint, name, mode, *given)

    def _sync_checkpoint_dir_name_across_ranks(self, checkpoint_dir_name: str | None = None) -> str:
        return checkpoint_dir_name or f"checkpoint_{self.report_call_index:06d}"  # the same on all ranks

    def _wait_then_report(self, training_report: Any, report_call_index: int) -> None:
        stored = training_report.checkpoint
        self.current_report_index, self.checkpoint = report_call_index, stored or self.checkpoint
        place = self.assignment.ticket, self.assignment.attempt, report_call_index, self.get_world_size()
        row = self.row if self.get_world_rank() == 0 else {}
        if not ray.get(self.mailbox.report_part.remote(*place, row, stored and stored.path)):
            raise TrialStopped(0)

    def get_all_reported_checkpoints(self, *args: Any, **given: Any) -> Any:
        """A sweep's trial keeps no list of them."""
        raise self._refused("get_all_reported_checkpoints", "call `ray.train.get_checkpoint` for the newest one")

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """A sweep's file can name no Ray dataset."""
        raise self._refused("get_dataset_shard", "read the data in the function, or sweep with `tune.ray`")

    def _refused(self, call: str, fix: str) -> ConfigError:
        named = self.assignment.tree["train_func"]
        return ConfigError("train_func", named, f"calls `{call}`, which a sweep from a file does not have", fix)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


class _TuneSession:
    """What `ray.tune.report` and `ray.tune.get_checkpoint` of a function reach."""

    world_rank = 0  # a number: Ray Train's own functions may be called

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        get_train_context().report(metrics, checkpoint, None, CheckpointUploadMode.SYNC)

    @property
    def loaded_checkpoint(self) -> Any:
        return get_train_context().get_checkpoint()


def make_baseline(device: torch.device) -> Baseline:
    """Take the state of this process, before it runs the first function."""
    logging.getLogger(str(ray_context.__file__)).setLevel(logging.WARNING)  # a line for each report, from each rank
    return Baseline(device, None)


def run_function(
    assignment: Assignment, path: tuple[str, ...], mailbox: Any, lane: int, group: Group
) -> dict[str, Any]:
    """Run a trial; returns its outcome as plain data, with `raised` when this process must not be used again.

    Raises RunFailedError where the cause is another rank's to tell.
    """
    taken, clock = time.time(), time.perf_counter()
    spec = FunctionSpec(assignment.tree, path, f"trial {assignment.trial}", "")
    own = get_train_context()
    context = _context(own, mailbox, assignment)
    size, status = fixed_size(assignment.tree), "done"
    reset_peak_memory(group.device)
    random.seed()  # as in a new process
    np.random.seed()
    set_train_context(context)
    of_tune: Any = session
    of_tune._session = _TuneSession()
    try:
        function = spec.load()
        called = time.perf_counter()
        context.began = called - (assignment.begun.train_time_s if assignment.begun else 0.0)
        try:
            function()
        except TrialStopped:
            status = "stopped"
        ended = time.perf_counter()
        times = {"starting_s": called - clock, "training_s": ended - called, "total_s": ended - clock}
        peak = peak_memory_bytes(group.device)
        if dist.is_initialized():
            peak = max(group.gather(peak))
        else:  # the function has destroyed the group, on all ranks
            ray.train.collective.barrier()
        if group.rank == 0 and size is not None:
            ray.get(mailbox.observe.remote(lane, assignment.ticket, size, True))
        return {"status": status, "result": {"peak_memory_bytes": peak}, "spent": {"began": taken, **times}}
    except (Exception, SystemExit) as error:
        failure = failure_of(error, group.rank)
        if failure.follows:
            raise failure from None
        outcome: dict[str, Any] = {"status": failure.status, "message": failure.message}
        if failure.status == "error":
            outcome["traceback"] = traceback.format_exc(limit=-20)
        if failure.status == "out_of_memory" and size is not None:
            ray.get(mailbox.observe.remote(lane, assignment.ticket, size, False))
        if "CUDA error" in str(error) or group.world_size > 1:  # others may wait for this rank
            outcome["raised"] = failure
        return outcome
    finally:
        own.collective_seq = context.collective_seq
        of_tune._session = None
        set_train_context(own)


def _context(own: TrainContext, mailbox: Any, assignment: Assignment) -> FunctionContext:
    """The worker's context with what is the trial's own."""
    given = {one.name: getattr(own, one.name) for one in fields(TrainContext)}
    run, storage, begun = copy.copy(own.train_run_context.run_config), copy.copy(own.storage_context), assignment.begun
    run.name = storage.experiment_dir_name = assignment.trial
    if assignment.storage is not None:  # the lane may have begun with another sweep
        run.storage_path = assignment.storage.parent.uri
        storage.storage_filesystem, storage.storage_fs_path = get_fs_and_path(run.storage_path)
    given |= {
        "train_run_context": replace(
            own.train_run_context, run_config=run, train_loop_config=assignment.tree.get("train_loop_config")
        ),
        "storage_context": storage,
        "checkpoint": begun and Checkpoint(begun.checkpoint, storage.storage_filesystem),
        "current_report_index": begun.number if begun else 0,
    }
    return FunctionContext(**given, mailbox=mailbox, assignment=assignment)
