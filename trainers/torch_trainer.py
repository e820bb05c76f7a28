"""A Ray TorchTrainer around the loop: scaling, failures, storage, and the loop's context inside a Ray worker.

Environment read: RAY_ADDRESS names the cluster; without it an embedded one starts on this machine.
"""

from __future__ import annotations

import logging
import math
import os
import time
import traceback
from collections import Counter
from dataclasses import asdict
from typing import Any

import trainers.ray_env  # noqa: F401 (before Ray, which reads it at import)

# isort: split
import ray
import ray.train
import ray.train.v2._internal.execution.context
import torch
from ray.train import Checkpoint, CheckpointUploadMode, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer

from trainers.config import FailureConfig, ScalingConfig, TrainConfig
from trainers.errors import POLICIES, ConfigError, RunFailedError, classify
from trainers.launch import TIMEOUT_S, setup_logging
from trainers.metrics import RunResult
from trainers.run import RunSpec
from trainers.storage import Storage

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 20.0
"""Between two reports to Ray's controller; each blocks for up to its polling interval of 0.5 s."""


def connect(show_workers: bool = True) -> None:
    """Join the cluster that RAY_ADDRESS names, or start an embedded one on this machine.

    `show_workers`: what workers print comes to this terminal.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    context = ray.init(address=address, log_to_driver=show_workers, logging_level=logging.WARNING)
    if context.dashboard_url:
        logger.info(
            "dashboard: http://%s (it asks for the token that `ray get-auth-token` prints)", context.dashboard_url
        )


def capacity() -> dict[str, float]:
    """All resources that the cluster has or may grow to, by its cluster file."""
    from ray._private.state import state

    now = {name: float(amount) for name, amount in ray.cluster_resources().items()}
    grown = state.get_max_resources_from_cluster_config() or {}
    return {name: max(now.get(name, 0.0), float(grown.get(name, 0))) for name in now | grown}


def check_cluster(spec: RunSpec) -> str:
    """Connect, and refuse a run that the cluster can never hold; returns the device type of its workers."""
    config = spec.config
    connect()
    most = capacity()
    scaling = config.scaling
    gpu = wants_gpu(config, most)
    needs = {"CPU": float(scaling.cpus_per_worker)} | ({"GPU": scaling.gpus_per_worker} if gpu else {})
    for resource, each in needs.items():
        fits = math.floor(most.get(resource, 0.0) / each)
        if fits < scaling.min_workers:
            raise ConfigError(
                "scaling.num_workers",
                scaling.num_workers,
                f"must fit on what the cluster can grow to, {most.get(resource, 0.0):g} {resource}s at "
                f"{each:g} a worker",
                f"set it to at most {fits}" if fits else f"add nodes with a {resource}",
                spec.source,
            )
    return "cuda" if gpu else "cpu"


def wants_gpu(config: TrainConfig, most: dict[str, float]) -> bool:
    """Whether workers get GPUs: as configured, or for auto when the cluster has or may get any."""
    use_gpu = config.scaling.use_gpu
    if use_gpu == "auto":
        return config.device in ("auto", "cuda") and most.get("GPU", 0.0) > 0
    return use_gpu


def ray_scaling(scaling: ScalingConfig, gpu: bool) -> ray.train.ScalingConfig:
    """Our scaling section as Ray's."""
    workers = scaling.num_workers
    resources = {"CPU": float(scaling.cpus_per_worker)} | ({"GPU": scaling.gpus_per_worker} if gpu else {})
    return ray.train.ScalingConfig(
        num_workers=workers if isinstance(workers, int) else (workers[0], workers[1]),  # type: ignore[arg-type]
        use_gpu=gpu,
        resources_per_worker=resources,
        placement_strategy=scaling.placement_strategy,
    )


class RayContext:
    """RunContext of a worker of a Ray TorchTrainer."""

    launcher = "ray"

    def __init__(self, storage: Storage | None) -> None:
        context = ray.train.get_context()
        self.storage = storage
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.local_rank, self.local_world_size = context.get_local_rank(), context.get_local_world_size()
        self.device_index = own_gpu()
        self._told_s = -math.inf
        self._untold: tuple[dict[str, Any], str | None] | None = None

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Give Ray the metrics, and a reference to a checkpoint that is on storage already; not more often than
        every 20 s, because Ray's report waits for its controller's next look, and `flush` gives the last.
        """
        known = self._untold[1] if self._untold else None
        self._untold = (metrics, checkpoint or known)
        if elapsed_s - self._told_s >= REPORT_EVERY_S:
            self._told_s = elapsed_s
            self.flush()

    def flush(self) -> None:
        """Tell Ray what it has not been told. Every rank calls it."""
        if self._untold is None:
            return
        (metrics, checkpoint), self._untold = self._untold, None
        reference = None
        if checkpoint is not None and self.rank == 0:
            where = Storage(checkpoint)
            reference = Checkpoint(where.path, filesystem=where.filesystem)
        ray.train.report(metrics, checkpoint=reference, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def should_stop(self) -> bool:
        """Ray ends a run by ending its workers."""
        return False


def own_gpu() -> int:
    """Index of this worker's GPU among those it sees; 0 without any."""
    if not torch.cuda.is_available():
        return 0
    return int(ray.train.torch.get_device().index or 0)


class FailurePolicy(UserCallback):
    """Decides in Ray's controller whether a failed worker group starts again: by kind, each with its own budget.

    Ray itself is told to retry for ever (`max_failures=-1`); an exception raised here ends the run.
    """

    def __init__(self, budgets: FailureConfig) -> None:
        self._budgets = budgets.model_dump()
        self._met: Counter[str] = Counter()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray with the exception of each failed rank."""
        cause = RunFailedError.first([as_failure(rank, error) for rank, error in worker_exceptions.items()])
        self._met[cause.status] += 1
        budget = 0 if cause.config else self._budgets.get(cause.status, POLICIES[cause.status].restarts)
        if budget != -1 and self._met[cause.status] > budget:
            raise cause
        logger.warning(
            "worker group failed as %s (%s); restart %d of %s from the newest checkpoint",
            cause.status,
            cause.message,
            self._met[cause.status],
            "no limit" if budget == -1 else budget,
        )


def as_failure(rank: int, error: BaseException) -> RunFailedError:
    """A rank's exception, freed of the wrappers that Ray and we put around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RunFailedError):
            return seen
        error = seen
        # A worker that died is reported as a failed health check, whose cause Ray keeps in an attribute.
        inner = getattr(seen, "health_check_failure", None) or getattr(seen, "cause", None) or seen.__cause__
        seen = inner if isinstance(inner, BaseException) and inner is not seen else None
    words = (str(error).strip().splitlines() or [""])[0]
    return RunFailedError(classify(error), f"rank {rank}: {type(error).__name__}: {words}", time.time())


def _worker(loop_config: dict[str, Any]) -> None:
    """What each worker of the TorchTrainer runs."""
    # A long line for every report, from every rank; the logger is named by its file.
    logging.getLogger(str(ray.train.v2._internal.execution.context.__file__)).setLevel(logging.WARNING)
    context = RayContext(None)
    setup_logging(context.rank)
    spec = RunSpec(**loop_config)
    context.storage = spec.storage
    try:
        spec.execute(context)
        context.flush()
    except Exception as error:
        failure = RunFailedError.of(error, context.rank)
        if not failure.config:
            traceback.print_exc()
        raise failure from None


def run_on_ray(spec: RunSpec) -> RunResult:
    """The run as a TorchTrainer on the connected cluster; needs `check_cluster` before it.

    Raises RunFailedError when the budget for a kind of failure is used up.
    """
    config = spec.config
    gpu = wants_gpu(config, capacity())
    trainer = TorchTrainer(
        _worker,
        train_loop_config=asdict(spec),
        torch_config=TorchConfig(backend="nccl" if gpu and torch.cuda.is_available() else None, timeout_s=TIMEOUT_S),
        scaling_config=ray_scaling(config.scaling, gpu),
        run_config=ray.train.RunConfig(
            name=spec.storage.name,
            storage_path=spec.storage.parent.uri,
            failure_config=ray.train.FailureConfig(
                max_failures=-1,
                max_preemption_failures=config.failure.preempted,  # type: ignore[call-arg]
            ),
            callbacks=[FailurePolicy(config.failure)],  # type: ignore[list-item]
        ),
    )
    try:
        trainer.fit()
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    except SystemExit:  # what Ray's handler of Ctrl-C raises once its controller has aborted
        raise RunFailedError("stopped", "aborted before its last step") from None
    if not spec.storage.exists("result.json"):  # Ray takes Ctrl-C as the wish to abort, and returns
        raise RunFailedError("stopped", "aborted before its last step")
    return RunResult.from_json(spec.storage.read("result.json"))
