"""The TorchTrainer of a lane (Ray).

Modeled on DataParallelTrainer.fit of ray.train.v2 (Ray 2.60).
"""

from typing import Any

from ray.train.torch import TorchTrainer

from tune.lanes.controller import LaneController, Room
from tune.ray_internals import (
    DatasetsCallback,
    PlacementGroupCleanerCallback,
    StateManagerCallback,
)

_NOWHERE = (
    # an actor that manages the Ray datasets of the run; a lane is given none
    DatasetsCallback,
    # what a dead controller had reserved: it dies with the driver, and Ray frees that
    PlacementGroupCleanerCallback,
    # lists the runs whose controllers are actors
    StateManagerCallback,
)


class LaneTrainer(TorchTrainer):
    """A TorchTrainer whose controller runs in the thread that calls `fit`."""

    room: Room

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()  # type: ignore[misc] # its type is that of Train's first version
        return [
            callback for callback in callbacks if not isinstance(callback, _NOWHERE)
        ]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        return LaneController(self.room, **given).fit()
