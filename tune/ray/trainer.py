"""Ray's TorchTrainer, whose function runs in a lane where a trial calls `fit` (Ray)."""

from typing import Any

import ray.train.torch

from tune.ray.internals import LaneController, without_helpers

_pool: list[Any] = []


def use(pool: Any) -> None:
    """Let `fit` in this process, which is a trial's, run in the lanes of a pool."""
    _pool[:] = [pool]


class TorchTrainer(ray.train.torch.TorchTrainer):
    """Takes the place of `ray.train.torch.TorchTrainer`.

    Inside a trial of `tune.ray.Tuner`, `fit` runs the training function on warm workers; anywhere else it is Ray's own.
    """

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        if not _pool:
            return super()._initialize_and_run_controller(**given)  # type: ignore[misc] # Ray's first version is typed
        given["callbacks"] = without_helpers(given["callbacks"], self.datasets)
        return LaneController(_pool[0], **given).fit()
