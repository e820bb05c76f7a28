"""A Ray TorchTrainer around the loop: scaling, failures, storage, and the loop's context inside a Ray worker.

Environment read: RAY_ADDRESS names the cluster; without it an embedded one starts on this machine.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict
from types import FrameType
from typing import Any

import trainers.on_ray.environment  # noqa: F401 (before Ray, which reads it at import)

# isort: split
import ray
import ray.train
import ray.train.v2._internal.execution.context
from ray.train import UserCallback
from ray.train.torch import TorchTrainer

from trainers.config import TrainConfig
from trainers.config.sections import FailureConfig, ScalingConfig
from trainers.errors import POLICIES, ConfigError, PreemptedError, RunFailedError, classify
from trainers.launch.local import setup_logging
from trainers.launch.spec import RunSpec
from trainers.loop.watchdog import count_hangs
from trainers.measure.result import RunResult
from trainers.on_ray.capacity import nodes_at_most
from trainers.on_ray.context import RayContext, request_stop
from trainers.on_ray.coordinator import TakenNodes, count_nodes, free_dead_runs
from trainers.on_ray.process_group import GroupConfig
from trainers.storage import Storage

logger = logging.getLogger(__name__)


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
    now = {name: float(amount) for name, amount in ray.cluster_resources().items()}
    grown = Counter[str]()
    for resources in nodes_at_most():
        grown.update(resources)
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
        label_selector=scaling.label_selector or None,  # type: ignore[call-arg]
    )


class FailurePolicy(UserCallback):
    """Decides in Ray's controller whether a failed worker group starts again: by kind, each with its own budget.

    Ray itself is told to retry for ever (`max_failures=-1`); an exception raised here ends the run.
    """

    def __init__(self, budgets: FailureConfig, storage: Storage) -> None:
        self._budgets = budgets.model_dump()
        self._met: Counter[str] = Counter()
        self._uri, self._hangs = storage.uri, count_hangs(storage)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray with the exception of each failed rank."""
        cause = RunFailedError.first([as_failure(rank, error) for rank, error in worker_exceptions.items()])
        hangs = count_hangs(Storage(self._uri))
        if cause.status == "node_lost" and hangs > self._hangs:
            cause = RunFailedError("hung", f"no step was made; see {Storage(self._uri).locate('hangs')}", cause.when)
        self._hangs = hangs
        self._met[cause.status] += 1
        budget = 0 if cause.config else self._budgets.get(cause.status, POLICIES[cause.status].restarts)
        if cause.smaller:  # sizes halve: this ends by itself
            budget = -1
        if budget != -1 and self._met[cause.status] > budget:
            raise cause
        if cause.status in ("node_lost", "preempted"):
            count_nodes()
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
    spec = RunSpec(**loop_config)
    context = RayContext(spec.storage)
    setup_logging(context.rank)
    try:
        spec.execute(context)
        context.flush()
    except PreemptedError as notice:
        logger.warning("%s; waiting until Ray takes the node out and starts the group again", notice)
        context.flush()
        while True:  # returning would end the run, raising would start it again on the very node that is leaving
            time.sleep(1)
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
    if not isinstance(config.scaling.num_workers, int):
        free_dead_runs()
    # Ray's list of the checkpoints that it was told of: with one of them deleted, as ours are once newer ones are
    # complete, it refuses to go on with the run.
    spec.storage.delete("checkpoint_manager_snapshot.json")
    trainer = TorchTrainer(
        _worker,
        train_loop_config=asdict(spec),
        torch_config=GroupConfig("nccl" if gpu else "gloo"),  # type: ignore[arg-type]
        scaling_config=ray_scaling(config.scaling, gpu),
        run_config=ray.train.RunConfig(
            name=spec.storage.name,
            storage_path=spec.storage.parent.uri,
            failure_config=ray.train.FailureConfig(
                max_failures=-1,
                max_preemption_failures=config.failure.preempted,  # type: ignore[call-arg]
            ),
            callbacks=[FailurePolicy(config.failure, spec.storage), TakenNodes()],  # type: ignore[list-item]
        ),
    )
    try:
        _fit(trainer, spec.storage)
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    return RunResult.from_json(spec.storage.read("result.json"))


def _fit(trainer: TorchTrainer, storage: Storage) -> None:
    """Ray's `fit` in a thread of its own, so that SIGTERM and the first Ctrl-C ask the workers to stop.

    A second signal leaves at once; the workers die with this process.
    """
    request_stop(storage, False)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failed.append(error)

    asked = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    thread = threading.Thread(target=run, name="ray-train", daemon=True)
    thread.start()
    told = False
    try:
        while thread.is_alive():
            thread.join(0.2)
            if asked.is_set() and not told:
                told = True
                logger.info("asked to stop: the workers write a checkpoint first (Ctrl-C again leaves at once)")
                request_stop(storage, True)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        request_stop(storage, False)
    if failed:
        raise failed[0]
