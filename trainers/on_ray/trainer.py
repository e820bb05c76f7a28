"""Train a run or a user's function, or do another job, with Ray's TorchTrainer (Ray).

Rank 0 passes a run's records to the driver through the key-value store.
"""

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer

from trainers.causes import failure_of
from trainers.config.model import Tree
from trainers.context import RunContext
from trainers.errors import (
    PacelineError,
    PreemptedError,
    RunFailedError,
    first_line,
    printable,
)
from trainers.launch.process import StopSignals, embedded, setup_logging
from trainers.launch.spec import FunctionSpec, Job, R, RunSpec
from trainers.measure.result import RunResult
from trainers.on_ray.capacity import capacity
from trainers.on_ray.cluster import check_cluster, ray_scaling, wants_gpu
from trainers.on_ray.environment import run_environment, task_environment
from trainers.on_ray.internals import (
    COORDINATOR_LOGGER,
    STATE_LOGGER,
    ControllerCallback,
    accepted,
    actor_record,
    controller_logging,
    coordinator,
    kv_delete,
    kv_get,
    kv_list,
    kv_put,
    nodes_taken,
    quiet_failures,
    quiet_reports,
    run_register,
    starts_again,
    without_cleaner,
)
from trainers.on_ray.vital_signs import (
    VitalSigns,
    ending_with_cluster,
    show_life,
)
from trainers.on_ray.worker_group import (
    FailurePolicy,
    GroupConfig,
    RayContext,
    as_failure,
    request_stop,
)
from trainers.output import Record, Sender, Take
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_AGAIN = "the same command continues from the newest checkpoint"
_NEWEST = "newest_report.json"
"""File with the metrics that a training function last reported."""
_ANSWER_S = 10.0  # within which Ray's coordinator answers
ASK_AGAIN_S = 1.0
"""Pause of an elastic group between two looks for nodes, as long as Ray's own."""
_GONE_S = 15.0  # within which a node that is taken away is gone


def send(run: Storage, records: list[Record]) -> None:
    """Store records of a run for its driver to fetch.

    Call it in a thread: it waits for the cluster's head.
    """
    key = _prefix(run) + f"{time.time_ns():020d}".encode()
    kv_put(key, json.dumps(records, default=str).encode(), overwrite=True)


@contextlib.contextmanager
def telling(spec: RunSpec, context: RunContext) -> Iterator[None]:
    """Within the block, send the run's records to the driver if `spec` asks for them.

    Every rank calls it.
    """
    context.draws_line = spec.told == "line"
    if not spec.told or context.rank > 0:
        yield
        return
    with contextlib.closing(
        Sender(partial(send, spec.storage))
    ) as context.take:
        yield


@contextlib.contextmanager
def receiving(run: Storage, take: Take | None) -> Iterator[None]:
    """During the block, call `take` with each record that workers send."""
    if take is None:
        yield
        return
    _take(run, lambda record: None)  # records for a driver that was killed
    over = threading.Event()

    def receive() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_LOOK_S)
            # The cluster may be gone, or not answer; the run itself says so.
            with contextlib.suppress(Exception):
                _take(run, take)

    thread = threading.Thread(target=receive, name="records", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LOOK_S * 8)


def _take(run: Storage, take: Take) -> None:
    for key in sorted(kv_list(_prefix(run))):
        data = kv_get(key)
        kv_delete(key)
        for record in json.loads(data or b"[]"):
            take(record)


def _prefix(run: Storage) -> bytes:
    return f"paceline-records {run.uri} ".encode()


@dataclass(frozen=True)
class FunctionRun:
    """A completed run of a training function."""

    metrics: dict[str, Any]
    """Rank 0's last report; values that JSON cannot hold are text."""
    checkpoint: str | None
    """Where the newest checkpoint is."""
    uri: str
    """The run's directory."""

    def __str__(self) -> str:
        figures = [f"{name} {value}" for name, value in self.metrics.items()]
        words = printable("  ".join(figures)) or "nothing was reported"
        if self.checkpoint:
            words += f"\n  checkpoint {self.checkpoint}"
        return f"done\n  {words}"


class _Reports(ray.train.UserCallback):
    """Stores the newest metrics, which Ray's result has only with a checkpoint."""

    def __init__(self, storage: Storage, told: bool) -> None:
        """With `told`, each report is also sent to the driver."""
        self._storage = storage
        self._told = told

    def after_report(
        self, run_context: Any, metrics: list[Tree], checkpoint: Any
    ) -> None:
        """Called by Ray with the metrics of all ranks."""
        self._storage.write(
            _NEWEST, json.dumps(metrics[0], default=str).encode()
        )
        if self._told:
            send(self._storage, [{"record": "report", "metrics": metrics[0]}])


class _Trainer(TorchTrainer):
    """A TorchTrainer whose cluster, if it is embedded, ends with the run."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc] # typed as in the first version of Ray Train
        return without_cleaner(callbacks) if embedded() else callbacks


def _function_worker(loop_config: Tree) -> Any:
    """Call the training function, as one worker of the TorchTrainer."""
    return FunctionSpec(**loop_config).load()()


def fit(trainer: TorchTrainer) -> ray.train.Result:
    """Run Ray's `fit`, but raise KeyboardInterrupt on Ctrl-C.

    Ray's own handler aborts the run and ends the process as if the run had
    succeeded, and would keep the run's controller alive.

    Raises RunFailedError.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        with run_environment():
            return trainer.fit()
    except SystemExit:
        raise KeyboardInterrupt from None
    except ray.train.WorkerGroupError as error:
        failures = [
            as_failure(*failed) for failed in error.worker_failures.items()
        ]
        raise RunFailedError.first(failures) from None
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    finally:
        signal.signal(signal.SIGINT, before)


def run_function(spec: FunctionSpec, take: Take | None = None) -> FunctionRun:
    """Train on the connected cluster, from the newest checkpoint if there is one.

    Args:
        spec: The run, with the training function's name and configuration.
        take: Receives what is reported.

    Raises:
        RunFailedError: A rank has failed, and no restart is left.
    """
    config = spec.config
    storage = spec.storage
    trainer = _Trainer(
        _function_worker,
        train_loop_config=asdict(spec),
        scaling_config=ray_scaling(
            config.scaling, wants_gpu(config, capacity())
        ),
        run_config=ray.train.RunConfig(
            name=storage.name,
            storage_path=storage.parent.uri,
            failure_config=ray.train.FailureConfig(
                max_failures=config.failure.max_failures
            ),
            callbacks=[_Reports(storage, bool(spec.told))],  # type: ignore[list-item]
            **controller_logging(spec.quiet),
        ),
    )
    with ending_with_cluster(_AGAIN), VitalSigns(), receiving(storage, take):
        result = fit(trainer)
    metrics = {}
    if storage.exists(_NEWEST):
        metrics = storage.read_json(_NEWEST, Tree)
    checkpoint = result.checkpoint.path if result.checkpoint else None
    return FunctionRun(metrics, checkpoint, storage.uri)


def _run_worker(loop_config: Tree) -> None:
    """Run the loop as one worker of the TorchTrainer."""
    quiet_reports()
    quiet_failures()  # printed below
    job: Job[RunResult] = loop_config["job"]
    context = RayContext(job.storage)
    setup_logging(context.rank, job.quiet)
    with telling(job, context):
        _execute(job, context)


def _execute(job: Job[RunResult], context: RayContext) -> None:
    with _failing(context.rank):
        try:
            job.execute(context)
            context.flush()
        except PreemptedError as notice:
            logger.warning(
                "%s; waiting until Ray takes the node out and starts the group again",
                notice,
            )
            context.flush()
            # returning would end the run, raising would start it again on the
            # very node that is leaving
            while True:
                time.sleep(1)


@contextlib.contextmanager
def _failing(rank: int) -> Iterator[None]:
    """Convert errors in the block to RunFailedError, which is plain data."""
    from trainers.launch.local import failing_as_run  # imports torch

    try:
        with failing_as_run(rank):
            yield
    except PacelineError as error:
        raise failure_of(error, rank) from None


def _job_worker(loop_config: Tree) -> Any:
    """Do a job as one worker of the TorchTrainer."""
    job: Job[Any] = loop_config["job"]
    context = RayContext(None)
    setup_logging(context.rank, job.quiet)
    with _failing(context.rank):
        return job.execute(context).to_json()


def run_job(job: Job[R]) -> R:
    """Do a job other than training, such as a profile, in a worker group.

    Joins the cluster.

    Files that Ray writes for the job, next to the run's directory, are
    deleted.

    Raises ConfigError if the cluster can never be large enough for the group,
    and RunFailedError if a worker failed.
    """
    gpu = check_cluster(job) == "cuda"
    with (
        job.storage.beside() as place,
        ending_with_cluster("nothing was changed"),
        VitalSigns(),
    ):
        trainer = _Trainer(
            _job_worker,
            train_loop_config={"job": job},
            torch_config=GroupConfig("nccl" if gpu else "gloo"),  # type: ignore[arg-type]
            scaling_config=ray_scaling(job.config.scaling, gpu),
            run_config=ray.train.RunConfig(
                name=place.name,
                storage_path=place.parent.uri,
                **controller_logging(job.quiet),
            ),
        )
        with task_environment():
            answer: str = fit(trainer).return_value  # type: ignore[attr-defined]
    return job.read_result(answer.encode())


def run_on_ray(job: Job[RunResult], take: Take | None = None) -> RunResult:
    """Train on the connected cluster; call `check_cluster` first.

    `take` receives the run's records.

    Raises RunFailedError when the restarts for a kind of failure are used up.
    """
    config = job.config
    gpu = wants_gpu(config, capacity())
    if not isinstance(config.scaling.num_workers, int):
        free_dead_runs()
    # Ray's list of reported checkpoints. Ray refuses to resume the run if a
    # listed checkpoint is deleted, as Paceline deletes old checkpoints.
    job.storage.delete("checkpoint_manager_snapshot.json")
    callbacks: list[Any] = [
        FailurePolicy(config.failure, job.storage),
        NodeCount(),
    ]
    trainer = _Trainer(
        _run_worker,
        train_loop_config={"job": job},
        torch_config=GroupConfig("nccl" if gpu else "gloo"),  # type: ignore[arg-type]
        scaling_config=ray_scaling(config.scaling, gpu),
        run_config=ray.train.RunConfig(
            name=job.storage.name,
            storage_path=job.storage.parent.uri,
            failure_config=ray.train.FailureConfig(
                max_failures=-1,
                **accepted(
                    ray.train.FailureConfig,
                    max_preemption_failures=config.failure.preempted,
                ),
            ),
            callbacks=callbacks,
            **controller_logging(job.quiet),
        ),
    )
    try:
        with (
            ending_with_cluster(_AGAIN),
            VitalSigns(),
            receiving(job.storage, take),
        ):
            _fit(trainer, job.storage)
    except ray.train.ControllerError as error:
        raise as_failure(0, error.controller_failure) from None
    except ray.exceptions.RayActorError as error:
        words = f"the actor that runs Ray Train's controller for this run died: {first_line(error)}"
        raise RunFailedError("node_lost", words, time.time()) from error
    return job.storage.read_json("result.json", RunResult)


def _fit(trainer: TorchTrainer, storage: Storage) -> None:
    """Run Ray's `fit` in a thread, so that signals ask the workers to stop.

    The workers end with this process.
    """
    request_stop(storage, False)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with run_environment(), task_environment():
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
                    "asked to stop: the workers write a checkpoint first (Ctrl-C again leaves immediately)"
                )
                request_stop(storage, True)
            thread.join()
    finally:
        request_stop(storage, False)
    if failed:
        raise failed[0]


class NodeCount(ControllerCallback):
    """Makes Ray's coordinator count the nodes before a group starts again.

    The coordinator counts nodes every 20 s, and keeps a run's reservation for
    180 s, so it learns late of a node that is gone, and of a run whose driver
    was killed. An elastic group that is started before the next count waits
    for the dead node for RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S.

    Source: default_autoscaling_coordinator.py of ray.data (Ray 2.60).

    While an elastic group has too few nodes, Ray's control loop does not pause
    between two attempts, and would use a whole core. So this callback pauses.

    After a preemption notice, this callback waits until the nodes are gone,
    since Ray chooses the group's size at the deadline, seconds before it
    notices that they are missing.
    """

    def __init__(self) -> None:
        # This logger has a line for each of the controller's states.
        logging.getLogger(STATE_LOGGER).setLevel(logging.WARNING)
        # A request that a busy coordinator misses is sent again: log a line,
        # not a traceback.
        logging.getLogger(COORDINATOR_LOGGER).addFilter(_without_traceback)

    def __reduce__(self) -> tuple[Any, ...]:
        return (NodeCount, ())  # runs __init__ in the controller

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray in the controller's constructor."""
        show_life()

    def after_controller_state_update(
        self, previous_state: Any, current_state: Any
    ) -> None:
        """Called by Ray in its control loop; the states handled here have no group."""
        waits_for_nodes = previous_state is current_state
        if waits_for_nodes:
            time.sleep(ASK_AGAIN_S)
        elif not starts_again(current_state):
            return
        taken = nodes_taken(previous_state, current_state)
        deadline = time.monotonic() + _GONE_S
        while time.monotonic() < deadline:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            if not taken & alive:
                break
            time.sleep(0.2)
        count_nodes()


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def count_nodes() -> None:
    """Make Ray's coordinator count the nodes now; warn if it does not."""
    try:
        counted = coordinator().get_reserved_resources.remote(
            "", recompute=True
        )
        ray.get(counted, timeout=_ANSWER_S)
    except (ray.exceptions.RayError, ImportError, TypeError) as error:
        words = "Ray did not count the nodes again (%s): the group may wait for a dead one"
        logger.warning(words, error)


def free_dead_runs() -> None:
    """Free the reservations of runs whose controller is dead, as after `kill -9`.

    Otherwise a resumed run would have to wait for these resources, or start
    without them.
    """
    try:
        register = run_register()
        if register is None:  # this cluster has had no run
            return
        runs: Tree = ray.get(
            register.get_train_runs.remote(), timeout=_ANSWER_S
        )
        cancelled = []
        for run_id, run in runs.items():
            if actor_record(run.controller_actor_id).get("State") != "ALIVE":
                cancel = coordinator().cancel_request
                cancelled.append(cancel.remote(f"train-{run_id}"))
        ray.get(cancelled, timeout=_ANSWER_S)
    except Exception as error:
        # Perhaps a newer Ray: the run starts all the same.
        logger.warning(
            "Ray may keep the resources of killed runs for 180 s: %s", error
        )
