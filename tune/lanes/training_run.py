"""A training run in the lane that a sweep has left, in place of workers of its own, which take seconds to start (Ray).

The lane only has to start it. Where anything befalls its workers the run is given back, and goes on from its newest
checkpoint with workers of its own, whose policies say how often.
"""

import contextlib
import logging
import time
from typing import Any

import ray

from trainers.errors import RunFailedError, Status
from trainers.launch.signals import StopSignals
from trainers.launch.spec import RunSpec
from trainers.measure.result import RunResult
from trainers.on_ray.capacity import capacity
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import wants_gpu
from trainers.on_ray.context import request_stop
from trainers.on_ray.failures import budget_of
from trainers.on_ray.records import receiving
from trainers.on_ray.vital_signs import VitalSigns
from trainers.output import Take
from tune.lanes.kept import Kept
from tune.lanes.lanes import Lanes
from tune.lanes.messages import Assignment, new_ticket

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class GivenBack(BaseException):
    """The run is to go on with workers of its own. No handler of failures may take it for one."""

    status: Status = "stopped"
    """What trackers are told, until it goes on."""


def run_in_lane(kept: Kept, spec: RunSpec, take: Take | None) -> RunResult:
    """Train in a lane of the run's scaling; lanes of any other end, and free what they hold. `take` is given the run's
    records.

    Raises GivenBack where there is none, or where the run goes on elsewhere; RunFailedError where the task failed.
    """
    key = spec.config.scaling, wants_gpu(spec.config, capacity()), False
    if not isinstance(spec.config.scaling.num_workers, int):  # a group of its own grows with the cluster
        kept.end()
    lanes = kept.take(key)
    if lanes is None:
        raise GivenBack
    try:
        again = "the same command goes on from the newest checkpoint"
        with ending_with_cluster(again), VitalSigns(True), receiving(spec.storage, take):
            outcome = _outcome(lanes, spec)
    except ray.exceptions.RayError as error:
        outcome = {"status": "node_lost", "message": f"the mailbox, an actor, has died: {error}"}
    except BaseException:  # a second Ctrl-C
        lanes.end()
        raise
    status, message = outcome["status"], outcome.get("message", "")
    is_over = status in ("done", "stopped")
    if not is_over and (status == "out_of_memory" or budget_of(spec.config.failure, status) != 0):
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
    return spec.storage.read_json("result.json", RunResult, finite=False)


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
