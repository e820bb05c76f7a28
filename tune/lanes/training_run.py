"""A training run, or another job, in the lane that a sweep has left, in place of workers of its own, which take seconds
to start (Ray).

The lane only has to start it. Where anything befalls its workers the run is given back, and goes on from its newest
checkpoint with workers of its own, whose policies say how often.
"""

import contextlib
import logging
import time
from typing import Any, cast

import ray

from trainers.errors import RunFailedError, Status
from trainers.launch.signals import StopSignals
from trainers.launch.spec import Job, R, RunSpec
from trainers.measure.result import RunResult
from trainers.on_ray.capacity import capacity
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import wants_gpu
from trainers.on_ray.context import request_stop
from trainers.on_ray.failures import budget_of
from trainers.on_ray.records import receiving
from trainers.on_ray.vital_signs import VitalSigns
from trainers.output import Take
from tune.lanes.alone import run_alone
from tune.lanes.kept import Kept
from tune.lanes.lanes import Lanes
from tune.lanes.messages import Assignment, new_ticket

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class GivenBack(BaseException):
    """The run is to go on with workers of its own. No handler of failures may take it for one."""

    status: Status = "stopped"
    """What trackers are told, until it goes on."""


def do_in_lane(kept: Kept, job: Job[R], take: Take | None = None) -> R:
    """Train, or do another job, in a lane of its scaling; lanes of any other end, and free what they hold. `take` is
    given a run's records.

    Raises GivenBack where there is none, or where a run goes on elsewhere; RunFailedError where the task failed.
    """
    key = job.config.scaling, wants_gpu(job.config, capacity()), False
    if not isinstance(job.config.scaling.num_workers, int):  # a group of its own grows with the cluster
        kept.end()
    lanes = kept.take(key)
    if lanes is None:
        raise GivenBack
    run = job if isinstance(job, RunSpec) else None
    again = "the same command goes on from the newest checkpoint" if run else "nothing was changed"
    try:
        with ending_with_cluster(again), VitalSigns(True), receiving(job.storage, take):
            outcome = _outcome(lanes, run) if run else _outcome_of_job(lanes, job)
    except ray.exceptions.RayError as error:
        outcome = {"status": "node_lost", "message": f"the mailbox, an actor, has died: {error}"}
    except BaseException:  # a second Ctrl-C
        lanes.end()
        raise
    status, message = outcome["status"], outcome.get("message", "")
    is_over = status in ("done", "stopped")
    if not is_over and run and (status == "out_of_memory" or budget_of(run.config.failure, status) != 0):
        logger.warning("%s (%s); going on from the newest checkpoint with workers of its own", message, status)
        lanes.end()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(lanes.mailbox)
        raise GivenBack
    kept.keep_again(lanes, key)
    if not is_over:
        if trace := outcome.get("traceback"):
            logger.error("%s", trace.rstrip())
        raise RunFailedError(status, message, time.time())
    if run:
        return cast("R", run.storage.read_json("result.json", RunResult, finite=False))
    return job.read_result(outcome["answer"].encode())


def _outcome_of_job(lanes: Lanes, job: Job[Any]) -> dict[str, Any]:
    """Have a lane do it, and return how it has ended."""
    mailbox = lanes.mailbox
    ray.get(mailbox.begin.remote(None, job.path, False))
    assignment = Assignment(new_ticket(job.storage.name), job.source, job.tree, job=job)
    return run_alone(mailbox, assignment, lambda: None)[1]


def _outcome(lanes: Lanes, spec: RunSpec) -> dict[str, Any]:
    """Have a lane run it, show what it says meanwhile, and return how it has ended."""
    mailbox = lanes.mailbox
    ray.get(mailbox.begin.remote(None, spec.path, False))
    request_stop(spec.storage, False)
    run = Assignment(new_ticket(spec.storage.name), spec.source, spec.tree, run=spec)
    ended = mailbox.next_event.remote(ray.get(mailbox.submit.remote(run)), 0)
    shown, is_told, is_over = 0, False, False
    try:
        with StopSignals() as signals:
            while not is_over:
                is_over = bool(ray.wait([ended], timeout=_LOOK_S)[0])
                notes = ray.get(mailbox.watch.remote(shown))["notes"]
                shown += len(notes)
                for words in notes:
                    logger.warning("%s", words)
                if signals.asked and not is_told:
                    is_told = True
                    logger.info("asked to stop: the workers write a checkpoint first (Ctrl-C again leaves at once)")
                    request_stop(spec.storage, True)
    finally:
        request_stop(spec.storage, False)
    outcome: dict[str, Any] = ray.get(ended).outcome
    return outcome
