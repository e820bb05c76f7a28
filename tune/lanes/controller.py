"""Where Ray's controller of a lane runs, its callbacks and scaling policy (Ray).

Ray imports this file in the controller, so it must not import torch: two seconds of
processor time at every start.

Ray's TorchTrainer without the helper actors that a lane does not need (Ray).

Each is a Python process of its own that imports Ray (2.5 s of processor time on the way
to the first trial), and the controller waits for most of them. Source:
DataParallelTrainer.fit of ray.train.v2 (Ray 2.60).
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.backend import BackendConfig
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainers.errors import RunFailedError
from trainers.on_ray.connect import show_life
from trainers.on_ray.environment import embedded
from trainers.on_ray.worker import as_failure
from tune.ray_internals import (
    ControllerCallback,
    DatasetsCallback,
    FixedScalingPolicy,
    PlacementGroupCleanerCallback,
    StateManagerCallback,
    TrainController,
    WorkerGroupCallback,
    get_env_vars_to_propagate,
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


_NOWHERE = (
    # an actor that manages the Ray datasets of the run; a lane is given none
    DatasetsCallback,
    # gives back what a dead controller had reserved: tune/lanes/lanes.py does
    PlacementGroupCleanerCallback,
)
_NOT_EMBEDDED = (
    StateManagerCallback,
)  # for `/api/train/v2/runs`, where the cluster outlives the sweep


class LaneTrainer(TorchTrainer):
    """A TorchTrainer whose group starts as soon as its controller is there."""

    controller: Any = None
    """The actor, once it starts."""

    def _create_default_callbacks(self) -> list[Any]:
        without = _NOWHERE + (_NOT_EMBEDDED if embedded() else ())
        callbacks = super()._create_default_callbacks()  # type: ignore[misc] # its type is that of Train's first version
        return [callback for callback in callbacks if not isinstance(callback, without)]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        options = beside_driver()
        if not embedded():
            options["runtime_env"] = {"env_vars": get_env_vars_to_propagate()}
        # Without one where all share the driver's: Ray would start a process for it.
        elif type(given["scaling_policy"]) is FixedScalingPolicy:
            given["scaling_policy"] = Unannounced(self.scaling_config)  # type: ignore[arg-type]
        make: Any = ray.remote(TrainController)
        self.controller = make.options(**options).remote(**given)
        try:
            ray.get(self.controller.run.remote())
            return ray.get(self.controller.get_result.remote())
        finally:
            self.controller = None  # its process ends with its last handle
