"""Train with a user's own training function, as Ray's TorchTrainer does."""

import json
import signal
from dataclasses import asdict, dataclass
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

from trainers.errors import RunFailedError, printable
from trainers.launch.spec import FunctionSpec
from trainers.on_ray.capacity import capacity
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import ray_scaling, wants_gpu
from trainers.on_ray.environment import run_environment
from trainers.on_ray.failures import as_failure
from trainers.on_ray.records import receiving, send
from trainers.on_ray.vital_signs import VitalSigns
from trainers.output import Take
from trainers.storage import Storage

_NEWEST = "newest_report.json"


@dataclass(frozen=True)
class FunctionRun:
    """A run of a training function that is done."""

    metrics: dict[str, Any]
    """What rank 0 reported last; what JSON cannot hold is text."""
    checkpoint: str | None
    """Where the newest checkpoint is."""
    uri: str
    """The run's directory."""

    def __str__(self) -> str:
        words = printable(
            "  ".join(f"{name} {value}" for name, value in self.metrics.items())
        )
        lines = [
            "done",
            words or "nothing was reported",
            *([f"checkpoint {self.checkpoint}"] if self.checkpoint else []),
        ]
        return "\n  ".join(lines)


class _Reports(ray.train.UserCallback):
    """Keeps the newest report's metrics: Ray's result has them only with a checkpoint."""

    def __init__(self, storage: Storage, told: bool) -> None:
        """`told`: the driver hears of each."""
        self._storage = storage
        self._told = told

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        """Called by Ray with the metrics of all ranks."""
        self._storage.write(_NEWEST, json.dumps(metrics[0], default=str).encode())
        if self._told:
            send(self._storage, [{"record": "report", "metrics": metrics[0]}])


def _worker(loop_config: dict[str, Any]) -> Any:
    """Call the function as one worker of the TorchTrainer."""
    return FunctionSpec(**loop_config).load()()


def fit(trainer: TorchTrainer) -> ray.train.Result:
    """Run Ray's `fit` without its handler of Ctrl-C.

    That aborts the run and ends the process as if all were well, and would keep the
    run's controller, too.

    Raises RunFailedError.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        with run_environment():
            return trainer.fit()
    except SystemExit:
        raise KeyboardInterrupt from None
    except ray.train.WorkerGroupError as error:
        raise RunFailedError.first(
            [as_failure(rank, one) for rank, one in error.worker_failures.items()]
        ) from None
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    finally:
        signal.signal(signal.SIGINT, before)


def run_function(spec: FunctionSpec, take: Take | None = None) -> FunctionRun:
    """Train on the connected cluster, from the newest checkpoint where there is one.

    Args:
        spec: The run, with the training function's name and configuration.
        take: Is given what is reported.

    Raises:
        RunFailedError: A rank has failed, and no restart is left.
    """
    config = spec.config
    storage = spec.storage
    trainer = TorchTrainer(
        _worker,
        train_loop_config=asdict(spec),
        scaling_config=ray_scaling(config.scaling, wants_gpu(config, capacity())),
        run_config=ray.train.RunConfig(
            name=storage.name,
            storage_path=storage.parent.uri,
            failure_config=ray.train.FailureConfig(
                max_failures=config.failure.max_failures
            ),
            callbacks=[_Reports(storage, bool(spec.told))],  # type: ignore[list-item]
        ),
    )
    again = "the same command goes on from the newest checkpoint"
    with ending_with_cluster(again), VitalSigns(), receiving(storage, take):
        result = fit(trainer)
    metrics = (
        storage.read_json(_NEWEST, dict[str, Any], finite=False)
        if storage.exists(_NEWEST)
        else {}
    )
    return FunctionRun(
        metrics, result.checkpoint.path if result.checkpoint else None, storage.uri
    )
