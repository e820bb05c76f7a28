"""Ray's TorchTrainer, whose function runs in a lane where a trial calls `fit` (Ray)."""

from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch

from tune.ray.internals import LaneController, ran_out_of_memory, without_helpers
from tune.ray.misfits import sized


@dataclass
class _Trial:
    pool: Any
    batch_key: str | None


_trial: list[_Trial] = []


def use(pool: Any, batch_key: str | None) -> None:
    """Let `fit` in this process, which is a trial's, run in the lanes of a pool."""
    _trial[:] = [_Trial(pool, batch_key)]


class TorchTrainer(ray.train.torch.TorchTrainer):
    """Takes the place of `ray.train.torch.TorchTrainer`.

    Inside a trial of `tune.ray.Tuner`, `fit` runs the training function on warm workers; anywhere else it is Ray's own.
    A batch size that ran out of memory in another trial with the same configuration is not tried, nor is a larger one:
    `fit` raises the error that Ray would, with the reason.
    """

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        if not _trial:
            return super()._initialize_and_run_controller(**given)  # type: ignore[misc] # Ray's first version is typed
        [trial] = _trial
        own: Any = self
        function, config = own.train_loop_per_worker, own.train_loop_config or {}
        name = getattr(function, "__qualname__", type(function).__qualname__)
        one = sized(f"{name} on {self.scaling_config}", config, trial.batch_key)
        if one is not None and (why := ray.get(trial.pool.why_not.remote(one))) is not None:
            raise ray.train.WorkerGroupError(why, {0: MemoryError(why)})
        given["callbacks"] = without_helpers(given["callbacks"], self.datasets)
        result = LaneController(trial.pool, name, **given).fit()
        if one is not None and ran_out_of_memory(result.error):
            ray.get(trial.pool.note_misfit.remote(one))
        return result
