"""A worker of a lane: trial after trial from the mailbox, in one process (Ray)."""

import contextlib
import logging
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist

import trainers.loop.fit  # noqa: F401 (all that a run imports belongs to the baseline)
from trainers.causes import failure_of
from trainers.config.yaml import dump_yaml
from trainers.devices.cpu_pressure import Pressure
from trainers.devices.device import device_name, grow_segments, total_memory_bytes
from trainers.devices.group import Group
from trainers.errors import DivergedError, PacelineError, PreemptedError, RunFailedError
from trainers.launch.imports import without_collection
from trainers.launch.log import setup_logging
from trainers.launch.spec import RunSpec
from trainers.on_ray.context import Gauges, WorkerContext, own_gpu
from trainers.storage import Storage
from tune.lanes.leftovers import adopt_orphans
from tune.lanes.messages import Assignment
from tune.lanes.process_state import Baseline
from tune.trials.record import CPU_PRESSURE

_IDLE_S = 20.0  # an idle lane's ranks meet this often, well within the process group's timeout


class LaneContext(WorkerContext):
    """RunContext of a trial in a lane: reports to the mailbox, and keeps nothing but a population's stages."""

    def __init__(
        self, mailbox: Any, lane: int, assignment: Assignment, gauges: Gauges, may_drain: bool = False
    ) -> None:
        """`may_drain`: whether Ray may say that the lane's node will be taken away."""
        super().__init__(assignment.storage, "lane")
        self._may_drain, self._asked_s = may_drain, 0.0  # the lane has asked before it took the trial
        self.refuge = assignment.refuge
        self._mailbox, self._lane, self._gauges = mailbox, lane, gauges
        self._ticket, self._stop, self._until = assignment.ticket, False, assignment.until
        self.microbatch_ceiling, self.microbatch_bounds = assignment.microbatch_ceiling, assignment.microbatch_bounds
        self.microbatch_hint = assignment.microbatch_hint
        self.source = None if assignment.source is None else Storage(assignment.source)
        self.until_epoch, self.watches = assignment.until_epoch, assignment.watches
        self._used: dict[str, float] = {}
        """What this rank has used so far: the least that all ranks will have."""
        self._pressure = Pressure() if CPU_PRESSURE in assignment.watches else None

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Rank 0 tells the mailbox of an evaluation, and hears whether the trial should go on."""
        if self.rank == 0 and checkpoint is None:
            share = None if self._pressure is None else self._pressure.share()
            used = self._used if share is None else {**self._used, CPU_PRESSURE: share}
            goes_on = ray.get(self._mailbox.report.remote(self._ticket, metrics | used))
            self._stop = self._stop or not goes_on or self._until.reached(metrics)

    def observe(self, figures: dict[str, float]) -> None:
        """The figures of whatever trial the lane runs."""
        self._gauges.set(figures)
        found = {"peak_memory_bytes": figures.get("peak_bytes"), "energy_j": figures.get("energy_j")}
        self._used |= {name: value for name, value in found.items() if name in self.watches and value is not None}
        if self.rank == 0:
            self._stop = self._stop or self._until.measured(figures)

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether the search has stopped the trial."""
        return self._stop

    def preempted(self, elapsed_s: float) -> bool:
        """Whether the lane's node will be taken away: the trial keeps its state, and goes on in another lane."""
        return self._may_drain and super().preempted(elapsed_s)

    def fits(self, microbatch_size: int, fits: bool) -> None:
        """All other trials shall know it: rank 0 says what was agreed, any rank what did not fit."""
        low, high = self.microbatch_bounds
        if not fits:
            self.microbatch_bounds = (low, min(microbatch_size, high or microbatch_size))
        if self.rank == 0 or not fits:
            ray.get(self._mailbox.observe.remote(self._lane, self._ticket, microbatch_size, fits))

    def too_large(self, microbatch_size: int) -> None:
        """The mailbox gives the trial out again with a smaller microbatch; a single worker goes on by itself."""
        if self.world_size > 1:
            ray.get(self._mailbox.too_large.remote(self._ticket, microbatch_size))

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """The trial ends here; the lane starts again."""
        ray.get(self._mailbox.hung.remote(self._lane, self._ticket, failure, stack, self.world_size))


def serve_trials(loop_config: Mapping[str, Any]) -> None:
    """Run trials as a worker of a lane, until the mailbox closes, or is gone: the driver ends the sweep then."""
    with contextlib.suppress(ray.exceptions.ActorDiedError):
        _serve(loop_config)


def _serve(loop_config: Mapping[str, Any]) -> None:
    mailbox, lane = loop_config["mailbox"], loop_config["lane"]
    context = ray.train.get_context()
    setup_logging(1)  # trials of many lanes would talk at once: warnings only
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    gauges = Gauges("", context.get_world_rank())
    grow_segments()
    device = torch.device("cuda", own_gpu()) if torch.cuda.is_available() else torch.device("cpu")
    group = Group(context.get_world_rank(), context.get_world_size(), device)
    adopt_orphans()
    baseline = _function().make_baseline(device) if loop_config["of_function"] else Baseline(device, ())
    # What decides how much fits: the GPU's model and memory.
    label = f"{device_name(group.device)}, {total_memory_bytes(group.device) / 2**30:.1f} GiB"
    devices = sorted(set(group.gather(label)))
    if group.rank == 0:
        ray.get(mailbox.hello.remote(lane, " and ".join(devices)))
    while True:
        if loop_config["may_drain"] and ray.train.get_preemption_info() is not None:
            _leave(mailbox, lane)
            return
        assignment = group.first(ray.get(mailbox.take.remote(lane, _IDLE_S)) if group.rank == 0 else None)
        if assignment == "close":
            return
        if assignment == "anew":
            raise RunFailedError("error", "the lane starts again")
        if assignment is None:
            continue
        path, gauges.run = assignment.path, f"{assignment.sweep}/lane-{lane}"
        if loop_config["of_function"]:
            pressure = Pressure()
            outcome = _function().run_function(assignment, path, mailbox, lane, group)
            outcome |= {"cpu_pressure": pressure.share()}
        else:
            outcome = _run(assignment, mailbox, lane, gauges, loop_config["may_drain"])
            if outcome["status"] == "preempted":
                if group.rank == 0:
                    ray.get(mailbox.hand_back.remote(lane, assignment.ticket, outcome["message"]))
                _leave(mailbox, lane)
                return
        if group.rank == 0 or "raised" in outcome:
            raised = outcome.pop("raised", None)
            ray.get(mailbox.end.remote(lane, assignment.ticket, outcome))
            if raised is not None:
                raise raised
        if loop_config["fresh"]:
            return
        if not loop_config["of_function"]:
            baseline.follow(path)
        own = baseline.restore()
        is_whole = group.world_size == 1 or dist.is_initialized()  # a function may have destroyed it, on all ranks
        left = [words for rank in (group.gather(own) if is_whole else [own]) for words in rank]
        if left:
            words = "; ".join(left)
            if group.rank == 0:
                ray.get(mailbox.starts_again.remote(lane, words, assignment.trial))
            raise RunFailedError("error", f"trial {assignment.trial} has left behind: {words}")


def _leave(mailbox: Any, lane: int) -> None:
    """Wait until Ray takes the node out and starts the lane again elsewhere, or the sweep is over.

    To return sooner would end the lane, and to raise might start it again on the very node that is leaving.
    """
    ray.get(mailbox.leave.remote(lane))
    while not ray.get(mailbox.await_close.remote(_IDLE_S)):
        pass


def _function() -> Any:
    """The part that only sweeps of training functions need: it imports more of Ray and torch."""
    with without_collection():
        from tune.lanes import function

    return function


def _run(assignment: Assignment, mailbox: Any, lane: int, gauges: Gauges, may_drain: bool) -> dict[str, Any]:
    """Run one trial; returns its outcome as plain data, with `raised` when this process must not be used again."""
    path, source = assignment.path, assignment.trial
    context = LaneContext(mailbox, lane, assignment, gauges, may_drain)
    if (job := assignment.job) is not None:
        try:
            return {"status": "done", "answer": job.execute(context).to_json()}
        except Exception as error:
            return _failed(error, context)
    if context.storage is not None and context.rank == 0:  # so that `python -m trainers evaluate` finds its way
        found = {"task_dir": path[0]} if path else {}
        context.storage.write("config.yaml", dump_yaml({**assignment.tree, **found}).encode())
    return _outcome(RunSpec(assignment.tree, path, f"trial {source}", ""), context)


def _outcome(spec: RunSpec, context: LaneContext) -> dict[str, Any]:
    """Train as one worker; returns how it has ended."""
    pressure, began, clock = Pressure(), time.time(), time.monotonic()
    try:
        result = spec.execute(context)
    except Exception as error:
        if isinstance(error, PreemptedError):
            return {"status": error.status, "message": str(error)}
        return _failed(error, context)
    total_s = time.monotonic() - clock
    # On the lane whose node was taken away; of a population's stage, which has storage, it is the stage's before.
    elsewhere_s = result.earlier_time_s if context.storage is None else 0.0
    spent = {
        "began": began,
        "starting_s": max(0.0, total_s - result.wall_time_s),
        "training_s": result.train_time_s - result.earlier_time_s + elsewhere_s,
        "total_s": total_s + elsewhere_s,
        "first_step_s": result.first_step_s,
    }
    return {"status": result.status, "result": asdict(result), "spent": spent, "cpu_pressure": pressure.share()}


def _failed(error: Exception, context: LaneContext) -> dict[str, Any]:
    """Return the outcome of what an error has ended."""
    failure = failure_of(error, context.rank)
    outcome: dict[str, Any] = {"status": failure.status, "message": failure.message}
    if not isinstance(error, PacelineError) and failure.status == "error":
        outcome["traceback"] = "".join(traceback.format_exception(error, limit=-20))
    # Divergence is agreed by all ranks; anything else may have left the others waiting in a collective.
    agreed = context.world_size == 1 or isinstance(error, DivergedError)
    if "CUDA error" in str(error) or not agreed:
        outcome["raised"] = failure
    return outcome
