"""Where Ray's controller of a lane runs, its callbacks and scaling policy (Ray).

Ray imports this file in the controller, so it must not import torch: two seconds of
processor time at every start.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.backend import BackendConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainers.errors import RunFailedError
from trainers.on_ray.cluster import show_life
from trainers.on_ray.worker_group import as_failure
from tune.ray_internals import (
    ControllerCallback,
    FixedScalingPolicy,
    WorkerGroupCallback,
    name_lane,
)


def beside_driver() -> dict[str, Any]:
    """Return the options of an actor without a CPU on the driver's node.

    It serves the whole sweep. Ray would put it on any node, one that may be taken back
    included, and the sweep would end with that node.
    """
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    return {"num_cpus": 0, "max_concurrency": 10_000, "scheduling_strategy": here}


@dataclass
class NoGroup(BackendConfig):
    """Takes the place of Ray's TorchConfig: trials' processes form groups themselves."""

    backend: str = "none"
    """Read by Ray's TorchTrainer."""


class LaneCallback(ControllerCallback, WorkerGroupCallback):
    """Tells the mailbox what a lane has reserved, and when its workers are gone."""

    def __init__(self, mailbox: Any, sweep: str, lane: int) -> None:
        self._mailbox = mailbox
        self._sweep = sweep
        self._lane = lane

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray in the controller's constructor."""
        show_life()
        name_lane(f"{self._sweep}, lane {self._lane}")

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Called by Ray when all workers are a process group."""
        group = (
            worker_group.get_worker_group_state().placement_group_handle.placement_group
        )
        ray.get(self._mailbox.note_reservation.remote(self._lane, group))

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by Ray with the errors of failed ranks.

        The lane's trial goes to another lane at once.
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
