"""Ray's TorchTrainer, whose function runs in a lane where a trial calls `fit` (Ray)."""

import copy
import re
import uuid
from dataclasses import dataclass
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined] # (it has no stub)
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray import cloudpickle

from tune.forks.child import TrialStopped
from tune.forks.client import Zygote
from tune.lanes.controller import NoGroup
from tune.ray.controller import Answers, LaneController, own_place, ran_out_of_memory, stops, without_helpers
from tune.ray.misfits import sized
from tune.ray_internals import get_session

_NAME_BY_RAY = re.compile(r"ray_train_run-\d{4}(-\d\d){2}_\d\d(-\d\d){2}")
"""What Ray calls a run that has no name: by the second."""


@dataclass(frozen=True)
class Run:
    """A TorchTrainer that a trial's process hands to the worker that has started it."""

    function: bytes
    """Pickled: the training function with its configuration, a callable without arguments."""
    name: str
    config: dict[str, Any]
    given: dict[str, Any]
    """The other arguments of the TorchTrainer."""
    backend: str
    timeout_s: float


class TorchTrainer(ray.train.torch.TorchTrainer):
    """Takes the place of `ray.train.torch.TorchTrainer`.

    Inside a trial of `tune.ray.Tuner`, `fit` runs the training function on workers that are up; anywhere else it is
    Ray's own. A batch size that ran out of memory in another trial with the same configuration is not tried, nor is a
    larger one: `fit` raises the error that Ray would, with the reason.
    """

    def fit(self) -> Any:
        """As Ray's."""
        ask = getattr(get_session(), "ask", None)
        if ask is None or self.running_in_local_mode:  # type: ignore[attr-defined] # Ray's first version is typed
            return super().fit()
        return ask("fit", self._run())

    def _run(self) -> Run:
        own: Any = self
        function = own.train_loop_per_worker
        name = getattr(function, "__qualname__", type(function).__qualname__)
        given = {
            "scaling_config": own.scaling_config,
            "run_config": with_own_name(own.run_config),
            "datasets": own.datasets,
            "dataset_config": own.data_config,
            "validation_config": own.validation_config,
        }
        group = own.backend_config
        packed = cloudpickle.dumps(own._get_train_func())
        return Run(packed, name, own.train_loop_config or {}, given, group.backend, group.timeout_s)


def with_own_name(run_config: Any) -> Any:
    """Return a RunConfig whose run nobody else has: it would go on from the checkpoints of another trial that began in
    the same second.
    """
    if _NAME_BY_RAY.fullmatch(run_config.name):
        run_config = copy.copy(run_config)
        run_config.name += f"-{uuid.uuid4().hex[:12]}"
    return run_config


class _InLane(ray.train.torch.TorchTrainer):
    """Ray's trainer in the process of a trial, on the workers of a lane."""

    pool: Any

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        given["callbacks"] = without_helpers(given["callbacks"], self.datasets)
        return LaneController(self.pool, **given).fit()


def fit(run: Run, pool: Any, zygote: str, batch_key: str | None) -> Any:
    """Train as the TorchTrainer of a trial's process would; returns Ray's result, or raises its error."""
    size = sized(f"{run.name} on {run.given['scaling_config']}", run.config, batch_key)
    if size is not None and (why := ray.get(pool.why_not.remote(size))) is not None:
        raise ray.train.WorkerGroupError(why, {0: MemoryError(why)})
    function = ForkedFunction(run.function, zygote, run.backend, run.timeout_s)
    trainer = _InLane(function, torch_config=NoGroup(run.backend), **run.given)  # type: ignore[arg-type]
    trainer.pool = pool
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        if size is not None and ran_out_of_memory(error):
            ray.get(pool.note_misfit.remote(size))
        raise


@dataclass(frozen=True)
class ForkedFunction:
    """A training function that runs in a fork of its node's zygote; the worker that calls it answers what it asks."""

    function: bytes
    zygote: str
    backend: str
    timeout_s: float

    def __call__(self) -> Any:
        """Called by Ray in each worker."""
        place, files = own_place(self.backend, self.timeout_s)
        of_ray = [str(gpu) for gpu in ray.get_gpu_ids()], ray.train.get_context().get_experiment_name()
        storage = ray.train.get_context().get_storage()
        fork = Zygote.of_functions(self.zygote).fork(
            "tune.forks.function:run_function",
            self.function,
            place,
            *of_ray,
            storage,
            files=[file.fileno() for file in files],
        )
        try:
            outcome = fork.serve(Answers(), lambda: not stops(), look_s=0.1)
        except (InterruptedError, TrialStopped):
            return None
        finally:
            for file in files:
                file.close()
        if "raised" in outcome:
            raise outcome["raised"] from RemoteTraceback(outcome["traceback"])
        return outcome.get("returned")
