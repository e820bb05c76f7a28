"""Ray's TorchTrainer, whose function runs in a lane where a trial calls `fit` (Ray)."""

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.train
import ray.train.torch

from trainers.errors import last_line
from tune.lanes.comparison import Reports, difference
from tune.lanes.stopped import TrialStopped
from tune.ray.internals import LaneController, ran_out_of_memory, without_helpers
from tune.ray.lane import Which
from tune.ray.misfits import sized

_COMPARE_S = 20.0
"""How long a function is run for comparison; longer only until its first report."""
_END = [{"its end": "done"}]


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
        controller = LaneController(trial.pool, name, **given)
        result = controller.fit()
        if one is not None and ran_out_of_memory(result.error):
            ray.get(trial.pool.note_misfit.remote(one))
        if result.error is None and controller.ran_on("fresh") and controller.heard.reports:
            _compare(self, name, trial.pool, [*controller.heard.reports, _END])
        return result


class _Again(ray.train.torch.TorchTrainer):
    """A trainer that was run before, for comparison."""

    controller: LaneController
    lane: tuple[Any, str, Which]
    """The pool, the function's name, and the lane that is wanted."""

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        given["callbacks"] = without_helpers(given["callbacks"], self.datasets)
        self.controller = LaneController(*self.lane, _COMPARE_S, **given)
        return self.controller.fit()


def _again(trainer: Any, *lane: Any) -> Reports | None:
    """Run a trainer's function once more; returns its reports and how it ended, None where it got another lane.

    It has Ray's callbacks and none of the user's, and a directory beside the trial's, which is deleted.
    """
    again = copy.copy(trainer)
    again.__class__, again.lane = _Again, lane
    name = f"{trainer.run_config.name}-compared"
    again.run_config = replace(trainer.run_config, name=name, callbacks=[], failure_config=ray.train.FailureConfig())
    again.train_run_context = replace(trainer.train_run_context, run_config=again.run_config)
    end = [_END]
    try:
        again.fit()
    except TrialStopped:
        end = []
    except ray.train.TrainingFailedError as error:
        end = [[{"its end": last_line(error)}]]
    storage = again.run_config.storage_context
    with contextlib.suppress(OSError):
        storage.storage_filesystem.delete_dir(storage.experiment_fs_path)
    return [*again.controller.heard.reports, *end] if again.controller.ran_on(lane[-1]) else None


def _compare(trainer: TorchTrainer, name: str, pool: Any, first: Reports) -> None:
    """Have the function of a trial that ran on a fresh lane report again on a warm one, once in a sweep."""
    if not ray.get(pool.compares.remote(name, ray.get_runtime_context().get_actor_id())):
        return
    verdict: tuple[Any, ...] = (None,)
    try:
        if (warm := _again(trainer, pool, name, "warm")) is not None:
            words = difference(first, warm)
            # It may differ from itself on fresh lanes, too: then there is nothing to compare.
            other = None if words is None else _again(trainer, pool, name, "fresh")
            if words is None or (other is not None and difference(first, other) is not None):
                verdict = (True,)
            elif other is not None:
                verdict = (False, f"{name} does not give the same on a warm lane: {words}")
    finally:
        ray.get(pool.judge.remote(name, *verdict))
