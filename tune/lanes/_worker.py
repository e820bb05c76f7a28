"""A worker of a lane: asks the zygote for a fork for each trial (Ray).

The worker answers the fork's calls. It keeps no state of a trial, and does not
import torch.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.collective import barrier, broadcast_from_rank_zero

from trainers.causes import death_of, forget_kernel_kills
from trainers.config.model import Tree
from trainers.config.sections import FailureConfig
from trainers.errors import RunFailedError
from trainers.launch.process import setup_logging
from trainers.launch.spec import FunctionSpec
from trainers.loop.watchdog import HUNG_EXIT_CODE
from trainers.on_ray.internals import is_leaving, quiet_reports
from trainers.on_ray.worker_group import (
    Gauges,
    WorkerContext,
    hide_unassigned_gpus,
    listen,
    own_gpu,
    own_ranks,
)
from tune.forks.assignment import Assignment, Place
from tune.forks.child import TrialStopped
from tune.forks.client import Fork, NoOutcomeError, Zygote
from tune.forks.zygote import Preload
from tune.ray_internals import (
    TrainContext,
    flatten_dict,
    get_train_context,
    get_train_fn_utils,
    set_train_context,
)
from tune.trials.microbatch_bounds import fixed_size
from tune.trials.record import placed

_IDLE_S = 20.0  # an idle lane's ranks meet this often
_LOOK_S = 0.5
_CAUSE_S = 10.0
"""How long a rank whose collective failed waits for another rank to report the cause."""
_RETRIED = {-signal.SIGKILL, -signal.SIGTERM}
"""Signals that come from outside: a trial that they ended is restarted."""


@dataclass
class FunctionContext(TrainContext):
    """Ray's context of a worker, for one trial of a training function.

    Reports go to the mailbox instead of Ray's controller, and checkpoints into
    the trial's own directory.
    """

    lane: Any = None
    assignment: Any = None
    began: float = 0.0
    """When the training began, by this machine's clock."""
    row: Any = None
    """The numbers that are being reported, as a row of the trial's curve.

    If the function reports no `step`, the row's `step` is the report's number.
    """

    def report(
        self,
        metrics: Tree,
        checkpoint: Any = None,
        name: Any = None,
        mode: Any = None,
        *given: Any,
    ) -> None:
        """Report as Ray does, but to the sweep, which may end the trial.

        Checkpoints are stored before this returns, even if the function asks
        for an asynchronous upload.
        """
        time_s = time.perf_counter() - self.began
        row = {"step": self.report_call_index + 1.0}
        for key, value in flatten_dict(metrics).items():
            if isinstance(value, np.ndarray) and value.ndim == 0:
                value = value[()]
            if isinstance(
                value, int | float | np.integer | np.floating | np.bool
            ):
                row[str(key)] = float(value)
        self.row = placed(row | {"train_time_s": time_s})
        if checkpoint is not None:
            self.storage_context._create_validation_file()
        if mode is CheckpointUploadMode.ASYNC:
            mode = CheckpointUploadMode.SYNC
        super().report(metrics, checkpoint, name, mode, *given)

    def _sync_checkpoint_dir_name_across_ranks(
        self, checkpoint_dir_name: str | None = None
    ) -> str:
        # The same on all ranks.
        return (
            checkpoint_dir_name or f"checkpoint_{self.report_call_index:06d}"
        )

    def _wait_then_report(
        self, training_report: Any, report_call_index: int
    ) -> None:
        stored = training_report.checkpoint
        self.current_report_index = report_call_index
        self.checkpoint = stored or self.checkpoint
        row = self.row if self.get_world_rank() == 0 else {}
        goes_on = self.lane.tell(
            "report_part",
            self.assignment.ticket,
            self.assignment.attempt,
            report_call_index,
            self.get_world_size(),
            row,
            stored and stored.path,
        )
        if goes_on is None:
            raise InterruptedError("another rank has ended the trial")
        if not goes_on:
            raise TrialStopped(0)


class FunctionTrial:
    """A trial of the user's own training function, in one rank of its lane.

    The trial's process calls this object's methods. Methods that are not
    defined here are Ray's own, and run in the worker with the trial's context.
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
        self._context.began = self._called_s
        if self._assignment.begun:
            self._context.began -= self._assignment.begun.train_time_s

    def run(
        self,
        zygote: Zygote,
        place: Place,
        files: list[int],
        serve: Callable[[Fork, Any], Tree],
    ) -> Tree:
        """Run the trial; `serve` answers the calls of its process.

        Returns:
            This rank's outcome as plain data.

        Raises:
            InterruptedError: Another rank has ended the trial.
            NoOutcomeError: The trial's process has died.
        """
        quiet_reports()
        clock_s = time.perf_counter()
        began = time.time()
        name = self._assignment.trial
        set_train_context(self._context)
        spec = FunctionSpec(
            self._assignment.tree, self._path, f"trial {name}", ""
        )
        try:
            fork = zygote.fork(
                "tune.forks.function:run_function",
                spec,
                place,
                list(map(str, ray.get_gpu_ids())),
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
            peak = outcome.pop("peak_memory_bytes", None)
            outcome["result"] = {"peak_memory_bytes": peak}
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
            self._lane.observe(self._assignment, size, fits)


def _context(
    own: TrainContext, lane: Any, assignment: Assignment
) -> FunctionContext:
    """Return the worker's context, with the trial's name, config and checkpoint."""
    given = {
        field.name: getattr(own, field.name) for field in fields(TrainContext)
    }
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


class Asked(WorkerContext):
    """Answers the calls of a task trial's process; reports go to the mailbox."""

    def __init__(self, lane: Lane, assignment: Assignment) -> None:
        super().__init__(None, "lane")
        # The lane asked about drained nodes just before it took the trial.
        self._asked_s = 0.0
        self._lane = lane
        self._assignment = assignment
        self._used: dict[str, float] = {}
        """What this rank has used so far: a lower bound for the whole trial."""

    def report(self, metrics: Tree) -> bool:  # type: ignore[override] # only rank 0's process calls this
        """Send an evaluation to the mailbox; return whether to continue the trial."""
        told = metrics | self._used
        goes_on: bool = self._lane.tell(
            "report", self._assignment.ticket, told
        )
        target = self._assignment.target
        if target is not None and target.is_met(metrics):
            return False
        return goes_on

    def observe(self, figures: dict[str, float]) -> None:
        """Pass the figures of this rank on to Ray's metrics."""
        self._lane.gauges.set(figures)
        is_asked = "peak_memory_bytes" in self._assignment.watches
        if is_asked and "peak_bytes" in figures:
            self._used["peak_memory_bytes"] = figures["peak_bytes"]
        if figures.get("disturbed_s"):
            self._used["disturbed_s"] = figures["disturbed_s"]

    def preempted(self, elapsed_s: float) -> bool:
        """Return whether the lane's node will be taken away.

        The trial then saves its state, and continues in another lane.
        """
        return self._lane.may_drain and super().preempted(elapsed_s)

    def fits(self, microbatch_size: int, fits: bool) -> None:
        """Tell the mailbox whether a microbatch fits; only rank 0 reports that it does."""
        if self.rank == 0 or not fits:
            self._lane.observe(self._assignment, microbatch_size, fits)

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """Tell the mailbox where this rank hangs; the trial then ends."""
        hang = self._assignment.ticket, failure, stack, self.world_size
        self._lane.tell("hung", self._lane.number, *hang)


def serve_trials(loop_config: Tree) -> None:
    """Run trials as a worker of a lane, until the mailbox closes or has died.

    If the mailbox has died, the driver ends the sweep.
    """
    with suppress(ray.exceptions.ActorDiedError):
        Lane(loop_config).serve()


class Lane:
    """A lane as one of its workers sees it."""

    def __init__(self, loop_config: Tree) -> None:
        self._mailbox = loop_config["mailbox"]
        self.number: int = loop_config["lane"]
        self.may_drain: bool = loop_config["may_drain"]
        """Whether Ray may announce that the lane's node will be taken away."""
        self._of_function = loop_config["of_function"]
        hide_unassigned_gpus()
        self._place = Place(*own_ranks(), own_gpu())
        setup_logging(1)
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        self._shown = f"{loop_config['sweep']}, lane {self.number}"
        run = f"{loop_config['sweep']}/lane-{self.number}"
        self.gauges = Gauges(run, self._place.rank)
        # If a function calls Ray, its process joins this cluster.
        os.environ.setdefault(
            "RAY_ADDRESS", ray.get_runtime_context().gcs_address
        )
        self._preload = Preload(**loop_config["preload"])
        self._zygote = Zygote(loop_config["zygote"], self._preload)

    def tell(self, method: str, *args: Any) -> Any:
        """Call a method of the mailbox."""
        return ray.get(getattr(self._mailbox, method).remote(*args))

    def observe(self, assignment: Assignment, size: int, fits: bool) -> None:
        """Tell the mailbox whether a microbatch of a trial fits."""
        self.tell("observe", self.number, assignment.ticket, size, fits)

    def serve(self) -> None:
        """Run trials until there are no more, or the lane's node will be taken away."""
        place = self._place
        fork = self._zygote.fork(
            "tune.forks.task:device_label", place.device_index
        )
        label = fork.serve(None)
        self.tell("hello", self.number, label, place.rank, place.world_size)
        while not (self.may_drain and is_leaving()):
            assignment, place, files = self._take()
            if assignment == "close":
                return
            if assignment is None:
                continue
            with ExitStack() as stack:
                for file in files:
                    stack.enter_context(file)
                numbers = [file.fileno() for file in files]
                if not self._run(assignment, place, numbers):
                    break
        self._leave_node()

    def _take(self) -> tuple[Any, Place, list[Any]]:
        """Take the next trial, once all ranks have reported the end of the last trial.

        Returns:
            The assignment, this rank's place in the trial's process group, and
            on rank 0 the listening socket at which the ranks meet.
        """
        has_others = self._place.world_size > 1
        if has_others:
            barrier()
        files: list[Any] = []
        taken: Any = None
        if self._place.rank == 0:
            assignment = self.tell("take", self.number, _IDLE_S)
            address = ("", 0)
            if isinstance(assignment, Assignment) and (
                has_others or self._of_function
            ):
                server, host, port = listen()
                files.append(server)
                address = host, port
            taken = assignment, address
        if has_others:
            taken = broadcast_from_rank_zero(taken)
        assignment, (host, port) = taken
        return assignment, replace(self._place, address=host, port=port), files

    def _run(
        self, assignment: Assignment, place: Place, files: list[int]
    ) -> bool:
        """Run one trial, and tell the mailbox how it ended on this rank.

        Returns:
            Whether the lane can continue: its node is not being taken away.
        """
        self._show(assignment.trial)
        pressure = Pressure()
        forget_kernel_kills()
        try:
            outcome = self._fork(assignment, place, files)
        except InterruptedError:  # another rank has ended the trial
            return True
        except NoOutcomeError as death:
            outcome = _death(death, place.rank)
        self._zygote.learn(outcome.pop("imported", ()))
        if outcome.pop("follows", False):  # another rank knows why
            deadline = time.monotonic() + _CAUSE_S
            while self._is_wanted(assignment) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        if place.rank == 0 or "message" in outcome:
            outcome["cpu_pressure"] = pressure.share()
            self.tell("end", self.number, assignment.ticket, outcome)
        return bool(outcome["status"] != "preempted")

    def _show(self, trial: str) -> None:
        """Show in Ray which trial this actor runs, by the name of a dummy task.

        An actor's name cannot change, but Ray shows the actor's tasks beside
        it.
        """
        own: Any = ray.get_runtime_context().current_actor
        own.execute.options(name=f"{self._shown}: trial {trial}").remote(int)

    def _fork(
        self, assignment: Assignment, place: Place, files: list[int]
    ) -> Tree:
        """Run a trial in its own process, and return its outcome."""

        def serve(fork: Fork, asked: Any) -> Tree:
            default_s = FailureConfig().hang_timeout_s
            failure = assignment.tree.get("failure", {})
            hang_timeout_s = failure.get("hang_timeout_s", default_s)
            outcome: Tree = fork.serve(
                asked,
                lambda: self._is_wanted(assignment),
                _LOOK_S,
                hang_timeout_s,
            )
            return outcome

        if self._of_function:
            trial = FunctionTrial(self, assignment, self._preload.path)
            return trial.run(self._zygote, place, files, serve)
        fork = self._zygote.fork(
            "tune.forks.task:run_trial",
            assignment,
            self._preload.path,
            place,
            files=files,
        )
        return serve(fork, Asked(self, assignment))

    def _is_wanted(self, assignment: Assignment) -> bool:
        """Return whether the trial should continue: False once a rank has ended it."""
        if self._place.world_size == 1:
            return True
        return bool(self.tell("runs", self.number, assignment.ticket))

    def _leave_node(self) -> None:
        """Wait until Ray restarts the lane elsewhere, or the sweep is over.

        Returning sooner would end the lane, and raising might restart it on
        the very node that is being taken away.
        """
        self.tell("leave", self.number)
        while self.tell("take", self.number, _IDLE_S) != "close":
            pass


def _death(death: NoOutcomeError, rank: int) -> Tree:
    """Return the outcome for a trial whose process ended without reporting one."""
    if death.code == HUNG_EXIT_CODE:
        words = f"rank {rank} made no step within `failure.hang_timeout_s`"
        return {"status": "hung", "message": words}
    if death.code == -signal.SIGSTOP:
        why = "its process was stopped (SIGSTOP) and not continued"
        return {"status": "hung", "message": f"rank {rank}: {why}"}
    failure = death_of(rank, death.code)
    status = "error" if failure.status == "node_lost" else failure.status
    again = status == "error" and death.code in _RETRIED
    return {"status": status, "message": failure.message, "again": again}


class Pressure:
    """Measures the share of time in which some work on this machine waited for a CPU.

    The time starts when this object is created; the source is Linux's pressure
    stall information (PSI).
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before_us = _waited_us()

    def share(self) -> float | None:
        """Return the share, from 0 to 1, or None if Linux does not provide PSI."""
        elapsed_s = time.monotonic() - self._began_s
        now_us = _waited_us()
        if self._before_us is None or now_us is None or elapsed_s <= 0:
            return None
        waited_s = (now_us - self._before_us) / 1e6
        return min(1.0, waited_s / elapsed_s)


def _waited_us() -> int | None:
    try:
        some, *_ = Path("/proc/pressure/cpu").read_text().splitlines()
        return int(some.rpartition("total=")[2])
    except (OSError, ValueError):
        return None
