"""Ray's TorchTrainer without the helper actors that a lane does not need (Ray).

Each is a Python process of its own that imports Ray (2.5 s of processor time on the way
to the first trial), and the controller waits for most of them. Source:
DataParallelTrainer.fit of ray.train.v2 (Ray 2.60).
"""

from typing import Any

import ray
from ray.train.torch import TorchTrainer

from trainers.on_ray.environment import embedded
from tune.lanes.controller import Unannounced, beside_driver
from tune.ray_internals import (
    DatasetsCallback,
    FixedScalingPolicy,
    PlacementGroupCleanerCallback,
    StateManagerCallback,
    TrainController,
    get_env_vars_to_propagate,
)

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
