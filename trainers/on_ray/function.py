"""Train with a user's own training function, as Ray's TorchTrainer does."""

from dataclasses import asdict
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

from trainers.errors import RunFailedError, printable
from trainers.launch.spec import FunctionSpec
from trainers.on_ray.capacity import capacity
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import ray_scaling, wants_gpu
from trainers.on_ray.failures import as_failure
from trainers.on_ray.vital_signs import VitalSigns
from trainers.storage import Storage


class _Reports(ray.train.UserCallback):
    """Keeps the newest report's metrics, which Ray's result has only beside a checkpoint."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Called by Ray with the metrics of all ranks."""
        words = printable("  ".join(f"{name} {value}" for name, value in metrics[0].items()))
        self._storage.write("newest_report.txt", words.encode())


def _worker(loop_config: dict[str, Any]) -> Any:
    """Call the function as one worker of the TorchTrainer."""
    return FunctionSpec(**loop_config).load()()


def run_function(spec: FunctionSpec) -> str:
    """Train on the connected cluster, from the newest checkpoint where there is one; returns the result in words.

    Raises RunFailedError.
    """
    config, storage = spec.config, spec.storage
    trainer = TorchTrainer(
        _worker,
        train_loop_config=asdict(spec),
        scaling_config=ray_scaling(config.scaling, wants_gpu(config, capacity())),
        run_config=ray.train.RunConfig(
            name=storage.name,
            storage_path=storage.parent.uri,
            failure_config=ray.train.FailureConfig(max_failures=config.failure.max_failures),
            callbacks=[_Reports(storage)],  # type: ignore[list-item]
        ),
    )
    try:
        with ending_with_cluster("the same command goes on from the newest checkpoint"), VitalSigns():
            result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        raise RunFailedError.first([as_failure(rank, one) for rank, one in error.worker_failures.items()]) from None
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    name = "newest_report.txt"
    lines = ["done", storage.read(name).decode() if storage.exists(name) else "nothing was reported"]
    if result.checkpoint is not None:
        lines.append(f"checkpoint {result.checkpoint.path}")
    return "\n  ".join(lines)
