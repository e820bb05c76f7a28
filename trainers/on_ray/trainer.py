"""Train one run, or do another job, as a Ray TorchTrainer around it."""

import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer

from trainers.causes import failure_of
from trainers.errors import PacelineError, PreemptedError, RunFailedError, first_line
from trainers.launch.log import setup_logging
from trainers.launch.signals import StopSignals
from trainers.launch.spec import Job, R, RunSpec
from trainers.measure.result import RunResult
from trainers.on_ray.capacity import capacity
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import check_cluster, ray_scaling, wants_gpu
from trainers.on_ray.context import RayContext, request_stop
from trainers.on_ray.environment import run_environment
from trainers.on_ray.failures import FailurePolicy, as_failure
from trainers.on_ray.function import fit
from trainers.on_ray.internals import (
    COORDINATOR_LOGGER,
    ControllerCallback,
    accepted,
    coordinator,
    nodes_taken,
    quiet_failures,
    quiet_reports,
    run_register,
    starts_again,
)
from trainers.on_ray.process_group import GroupConfig
from trainers.on_ray.records import receiving, telling
from trainers.on_ray.vital_signs import VitalSigns, show_life
from trainers.output import Take
from trainers.redaction import redact
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # within which Ray's coordinator answers
_GONE_S = 15.0  # within which a node that is taken away is gone
_MANY = 1000


def _worker(loop_config: dict[str, Any]) -> None:
    """Run the loop as one worker of the TorchTrainer."""
    quiet_reports()
    quiet_failures()  # printed below
    spec = RunSpec(**loop_config)
    context = RayContext(spec.storage)
    setup_logging(context.rank, spec.quiet)
    with telling(spec, context):
        _execute(spec, context)


def _execute(spec: RunSpec, context: RayContext) -> None:
    with _failing(context.rank):
        try:
            spec.execute(context)
            context.flush()
        except PreemptedError as notice:
            logger.warning(
                "%s; waiting until Ray takes the node out and starts the group again",
                notice,
            )
            context.flush()
            # returning would end the run, raising would start it again on the very node
            # that is leaving
            while True:
                time.sleep(1)


@contextlib.contextmanager
def _failing(rank: int) -> Iterator[None]:
    """Raise what fails in the block as plain data."""
    try:
        yield
    except Exception as error:
        failure = failure_of(error, rank)
        if not (isinstance(error, PacelineError) or failure.follows):
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
        raise failure from None


def _job_worker(loop_config: dict[str, Any]) -> Any:
    """Do a job as one worker of the TorchTrainer."""
    job: Job[Any] = loop_config["job"]
    context = RayContext(None)
    setup_logging(context.rank, job.quiet)
    with _failing(context.rank):
        return job.execute(context).to_json()


def run_job(job: Job[R]) -> R:
    """Do a job that is no training run, such as a profile, in a worker group.

    Joins the cluster.

    What Ray keeps of it beside the run's directory is deleted.

    Raises ConfigError where the cluster can never hold the group, RunFailedError where
    a worker failed.
    """
    gpu = check_cluster(job) == "cuda"
    with (
        job.storage.beside() as place,
        ending_with_cluster("nothing was changed"),
        VitalSigns(),
    ):
        trainer = TorchTrainer(
            _job_worker,
            train_loop_config={"job": job},
            torch_config=GroupConfig("nccl" if gpu else "gloo"),  # type: ignore[arg-type]
            scaling_config=ray_scaling(job.config.scaling, gpu),
            run_config=ray.train.RunConfig(
                name=place.name, storage_path=place.parent.uri
            ),
        )
        answer: str = fit(trainer).return_value  # type: ignore[attr-defined]
    return job.read_result(answer.encode())


def run_on_ray(spec: RunSpec, take: Take | None = None) -> RunResult:
    """Train on the connected cluster; needs `check_cluster` before it.

    `take` is given the run's records.

    Raises RunFailedError when the budget for a kind of failure is used up.
    """
    config = spec.config
    gpu = wants_gpu(config, capacity())
    if not isinstance(config.scaling.num_workers, int):
        free_dead_runs()
    # Ray's list of the checkpoints that it was told of: with one of them deleted, as
    # ours are once newer ones are complete, it refuses to go on with the run.
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
                **accepted(
                    ray.train.FailureConfig,
                    max_preemption_failures=config.failure.preempted,
                ),
            ),
            callbacks=[FailurePolicy(config.failure, spec.storage), NodeCount()],  # type: ignore[list-item]
        ),
    )
    try:
        again = "the same command goes on from the newest checkpoint"
        with ending_with_cluster(again), VitalSigns(), receiving(spec.storage, take):
            _fit(trainer, spec.storage)
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    except ray.exceptions.RayActorError as error:
        words = f"Ray's controller of the run, an actor, died: {first_line(error)}"
        raise RunFailedError("node_lost", words, time.time()) from error
    return spec.storage.read_json("result.json", RunResult, finite=False)


def _fit(trainer: TorchTrainer, storage: Storage) -> None:
    """Run Ray's `fit` in a thread, so that signals ask the workers to stop.

    They die with this process.
    """
    request_stop(storage, False)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with run_environment():
                trainer.fit()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="ray-train", daemon=True)
    try:
        with StopSignals() as signals:
            thread.start()
            while thread.is_alive() and not signals.asked:
                thread.join(0.2)
            if signals.asked:
                logger.info(
                    "asked to stop: the workers write a checkpoint first (Ctrl-C again leaves at once)"
                )
                request_stop(storage, True)
            thread.join()
    finally:
        request_stop(storage, False)
    if failed:
        raise failed[0]


class NodeCount(ControllerCallback):
    """Lets Ray's coordinator count the nodes before a group starts again.

    An elastic group that is started before the next count waits for the dead node until
    RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S. The coordinator counts nodes every 20 s, and
    keeps what a run has reserved for 180 s: it learns late of a node that is gone, and
    of a run whose driver was killed.

    Source: default_autoscaling_coordinator.py of ray.data (Ray 2.60).

    After a preemption notice it waits until the nodes are gone, since Ray chooses the
    group's size at the deadline, seconds before it misses them.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray in the controller's constructor."""
        show_life()
        # A busy coordinator misses a request, which is sent again: a line, not a
        # traceback.
        logging.getLogger(COORDINATOR_LOGGER).addFilter(_without_traceback)

    def after_controller_state_update(
        self, previous_state: Any, current_state: Any
    ) -> None:
        """Called by Ray in its control loop, with no other group to look after."""
        if not starts_again(current_state):
            return
        taken = nodes_taken(previous_state, current_state)
        deadline = time.monotonic() + _GONE_S
        while (
            taken & {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        count_nodes()


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def count_nodes() -> None:
    """Let Ray's coordinator count the nodes now; warns where it does not."""
    try:
        ray.get(
            coordinator().get_reserved_resources.remote("", recompute=True),
            timeout=_ANSWER_S,
        )
    except (ray.exceptions.RayError, ImportError, TypeError) as error:
        logger.warning(
            "Ray did not count the nodes again (%s): the group may wait for a dead one",
            error,
        )


def free_dead_runs() -> None:
    """Free what runs reserved whose controller is dead, as after `kill -9`.

    A resumed run would have to wait for it, or start with what is left.
    """
    try:
        from ray.util.state import list_actors

        register = run_register()
        if register is None:  # this cluster has had no run
            return
        runs: dict[str, Any] = ray.get(
            register.get_train_runs.remote(), timeout=_ANSWER_S
        )
        filters: Any = [("class_name", "=", "TrainController"), ("state", "=", "ALIVE")]
        address = ray.get_runtime_context().gcs_address
        alive = {
            actor.actor_id
            for actor in list_actors(
                address, filters, limit=_MANY, timeout=int(_ANSWER_S)
            )
        }
        dead = [
            run_id
            for run_id, run in runs.items()
            if run.controller_actor_id not in alive
        ]
        ray.get(
            [coordinator().cancel_request.remote(f"train-{run_id}") for run_id in dead],
            timeout=_ANSWER_S,
        )
    except (
        Exception
    ) as error:  # a cluster without dashboard, a newer Ray: the run starts all the same
        logger.warning("Ray may hold workers of killed runs for 180 s: %s", error)
