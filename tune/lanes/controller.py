"""Callbacks and the scaling policy of Ray's controller of a lane (Ray).

Ray imports this file in the controller, so it must not import torch: two seconds of
processor time at every start.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray import cloudpickle
from ray.train.backend import BackendConfig

from trainers.errors import RunFailedError
from trainers.on_ray.failures import as_failure
from trainers.on_ray.vital_signs import show_life
from tune.ray_internals import (
    ControllerCallback,
    FixedScalingPolicy,
    WorkerGroupCallback,
    name_lane,
)


@dataclass
class NoGroup(BackendConfig):
    """Takes the place of Ray's TorchConfig: the processes of trials form groups of
    their own.
    """

    backend: str = "none"
    """Read by Ray's TorchTrainer."""


class LaneCallback(ControllerCallback, WorkerGroupCallback):
    """Tells the mailbox how far the lane's start is, and when its workers are gone.

    The driver learns the controller, to kill it before its workers are up, and the
    workers' reservation, to free it when the controller dies.
    """

    def __init__(self, mailbox: Any, sweep: str, lane: int) -> None:
        self._mailbox = mailbox
        self._sweep = sweep
        self._lane = lane

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray in the controller's constructor."""
        show_life()
        name_lane(f"{self._sweep}, lane {self._lane}")
        handle = cloudpickle.dumps(
            ray.get_runtime_context().current_actor
        )  # it would import Ray Train in the mailbox
        ray.get(self._mailbox.note_start.remote(self._lane, "controller", handle))

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Called by Ray when all workers are a process group."""
        group = (
            worker_group.get_worker_group_state().placement_group_handle.placement_group
        )
        ray.get(self._mailbox.note_start.remote(self._lane, "reservation", group))

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by Ray with the errors of failed ranks: the lane's trial goes to
        another lane at once.
        """
        if errors := worker_group_status.errors:
            cause = RunFailedError.first(
                [as_failure(rank, error) for rank, error in errors.items()]
            )
            with contextlib.suppress(
                ray.exceptions.ActorDiedError
            ):  # the mailbox is gone, and so is the sweep
                ray.get(self._mailbox.lost.remote(self._lane, cause))


class Unannounced(FixedScalingPolicy):
    """Ray's policy for a group of one size, without the requests for resources.

    Those serve an autoscaler and other drivers' elastic runs: an embedded cluster has
    neither. They start an actor, for which the run waits.
    """

    def _send_resource_request(self) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass
