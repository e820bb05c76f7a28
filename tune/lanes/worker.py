"""A worker of a lane: trial after trial from the mailbox, in one process (Ray)."""

import contextlib
import logging
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist

import trainers.loop.fit  # noqa: F401 (all that a run imports belongs to the baseline)
from trainers.causes import failure_of
from trainers.devices.device import device_name, grow_segments, total_memory_bytes
from trainers.devices.group import Group
from trainers.errors import ConfigError, DivergedError, PacelineError, PreemptedError, RunFailedError
from trainers.launch.imports import without_collection
from trainers.launch.log import setup_logging
from trainers.launch.spec import RunSpec
from trainers.on_ray.context import Gauges, WorkerContext, own_gpu
from trainers.storage import Storage
from tune.lanes.leftovers import adopt_orphans
from tune.lanes.messages import Assignment
from tune.lanes.process_state import Baseline
from tune.objective import check_reported

_NAMES = ("objective.metric", "objective.target", "checkpoint.best", "early_stopping.metric", "schedule()")
"""What names a metric: one that no trial reports ends the sweep."""
_IDLE_S = 20.0  # an idle lane's ranks meet this often, well within the process group's timeout


class LaneContext(WorkerContext):
    """RunContext of a trial in a lane: reports to the mailbox, and keeps nothing."""

    def __init__(
        self, mailbox: Any, lane: int, assignment: Assignment, gauges: Gauges, may_drain: bool = False
    ) -> None:
        """`may_drain`: whether Ray may say that the lane's node will be taken away."""
        super().__init__(None, "lane")
        self._may_drain, self._asked_s = may_drain, 0.0  # the lane has asked before it took the trial
        self.refuge = assignment.refuge
        self._mailbox, self._lane, self._gauges = mailbox, lane, gauges
        self._ticket, self._stop, self._target = assignment.ticket, False, assignment.target
        self.microbatch_ceiling, self.microbatch_bounds = assignment.microbatch_ceiling, assignment.microbatch_bounds
        self.source = None if assignment.source is None else Storage(assignment.source)
        self.watches = assignment.watches
        self._used: dict[str, float] = {}
        """What this rank has used so far: the least that all ranks will have."""

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Rank 0 tells the mailbox of an evaluation, and hears whether the trial should go on."""
        if checkpoint is None:
            check_reported(self.watches, metrics)
        if self.rank == 0 and checkpoint is None:
            goes_on = ray.get(self._mailbox.report.remote(self._ticket, metrics | self._used))
            is_met = self._target is not None and self._target.is_met(metrics)
            self._stop = self._stop or not goes_on or is_met

    def observe(self, figures: dict[str, float]) -> None:
        """The figures of whatever trial the lane runs."""
        self._gauges.set(figures)
        found = {"peak_memory_bytes": figures.get("peak_bytes"), "energy_j": figures.get("energy_j")}
        self._used |= {name: value for name, value in found.items() if name in self.watches and value is not None}
        if disturbed_s := figures.get("disturbed_s"):
            self._used["disturbed_s"] = disturbed_s

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
    context = LaneContext(mailbox, lane, assignment, gauges, may_drain)
    spec = RunSpec(assignment.tree, assignment.path, f"trial {assignment.trial}", "")
    pressure, began, clock = Pressure(), time.time(), time.monotonic()
    try:
        result = spec.execute(context)
    except Exception as error:
        if isinstance(error, PreemptedError):
            return {"status": error.status, "message": str(error)}
        return _failed(error, context)
    total_s = time.monotonic() - clock
    spent = {
        "began": began,
        "starting_s": max(0.0, total_s - result.wall_time_s),
        "training_s": result.train_time_s,
        "total_s": total_s + result.earlier_time_s,  # with the lane whose node was taken away
        "first_step_s": result.first_step_s,
    }
    return {"status": result.status, "result": asdict(result), "spent": spent, "cpu_pressure": pressure.share()}


def _failed(error: Exception, context: LaneContext) -> dict[str, Any]:
    """Return the outcome of what an error has ended."""
    failure = failure_of(error, context.rank)
    outcome: dict[str, Any] = {"status": failure.status, "message": failure.message}
    if not isinstance(error, PacelineError) and failure.status == "error":
        outcome["traceback"] = "".join(traceback.format_exception(error, limit=-20))
    if isinstance(error, ConfigError) and error.field in _NAMES:
        outcome["misnamed"] = error
    # Divergence is agreed by all ranks; anything else may have left the others waiting in a collective.
    agreed = context.world_size == 1 or isinstance(error, DivergedError)
    if "CUDA error" in str(error) or not agreed:
        outcome["raised"] = failure
    return outcome


class Pressure:
    """Measures, from its creation on, in how much of the time work of this machine or container waited for a CPU, by
    Linux's pressure stall information (PSI).
    """

    def __init__(self) -> None:
        self._began_s, self._before_us = time.monotonic(), _waited_us()

    def share(self) -> float | None:
        """Return a share, 0 to 1; None where Linux has no such information."""
        elapsed_s, now_us = time.monotonic() - self._began_s, _waited_us()
        if self._before_us is None or now_us is None or elapsed_s <= 0:
            return None
        return min(1.0, (now_us - self._before_us) / 1e6 / elapsed_s)


def _waited_us() -> int | None:
    try:
        some, *_ = Path("/proc/pressure/cpu").read_text().splitlines()
        return int(some.rpartition("total=")[2])
    except (OSError, ValueError):
        return None
