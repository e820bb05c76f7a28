"""Ray Train's controller on workers that outlive a trial.

A trial's actor runs Ray's own TrainController in its process, with all of
Ray's callbacks, policies and files. Only the worker group differs: it borrows
the workers of a lane instead of starting an actor for each worker, and returns
them instead of killing them. The ranks' barrier and their questions to the
controller go through the pool. So a trial starts no actors, and its function
runs in a fork.
"""

import asyncio
import json
import os
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import ray
import ray.train.collective
from ray.util.queue import Empty

from trainers.on_ray.internals import accepted, actor_record
from trainers.on_ray.worker_group import listen, own_gpu, own_ranks
from tune.forks.assignment import Place
from tune.forks.child import TrialStopped
from tune.forks.client import Zygote
from tune.lanes.controller import MeetingBuilder, OwnController, OwnGroup, Stub
from tune.ray_internals import (
    DefaultPlacementGroupHandle,
    RayTrainWorker,
    ThreadRunner,
    TrainContext,
    Worker,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerStatus,
    get_session,
    get_train_context,
    get_train_fn_utils,
    set_train_context,
    set_train_fn_utils,
)

_HEAR_S = 0.25
"""How long a worker with nothing to report waits before it answers a poll."""
_LOOK_S = 0.002
_ANSWER_S = 5.0
"""How long a healthy worker may take to answer a poll."""


@dataclass(frozen=True)
class Shape:
    """What defines a lane's workers; trials of the same shape may share a lane."""

    num_workers: int
    resources: tuple[tuple[str, float], ...]
    """Resources of each worker."""
    strategy: str
    """Placement strategy of the lane's placement group."""
    labels: tuple[tuple[tuple[str, str], ...], ...]
    """Labels that each worker's node must have; empty if there are none."""
    runtime_env: str
    """The workers' runtime environment, as JSON."""


@dataclass
class LaneContext(TrainContext):
    """Ray's context of a worker, extended so that all ranks stop at the same report."""

    stopped: threading.Event = field(default_factory=threading.Event)

    def _sync_checkpoint_dir_name_across_ranks(
        self, checkpoint_dir_name: str | None = None
    ) -> str:
        name: Any = super()._sync_checkpoint_dir_name_across_ranks(
            checkpoint_dir_name
        )
        if name is None:
            raise TrialStopped(0)
        return str(name)


class LaneWorker(RayTrainWorker):
    """Ray's worker, for many trials: each trial runs in a fork of the node's zygote."""

    def __init__(self, zygote: str, shown: str) -> None:
        """`shown` is the name that Ray displays for this actor."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._shown = shown
        self._zygote = Zygote.of_functions(zygote)
        self._zygote.hold()

    def __repr__(self) -> str:
        return self._shown

    def init_train_context(self, **given: Any) -> None:  # type: ignore[override]
        """Set the context of a new trial; called by Ray before the function runs."""
        super().init_train_context(**given)
        # If a function calls Ray, its process joins this cluster.
        os.environ.setdefault(
            "RAY_ADDRESS", ray.get_runtime_context().gcs_address
        )
        ray_context = get_train_context()
        own = {
            taken.name: getattr(ray_context, taken.name)
            for taken in fields(TrainContext)
        }
        # Ray has one of each per process, but each trial needs its own.
        own["report_order_condition"] = threading.Condition()
        own["checkpoint_upload_threadpool"] = ThreadPoolExecutor(max_workers=1)
        set_train_context(LaneContext(**own))

    def poll_status(self) -> WorkerStatus:
        """Return the status once there is something new, or after a short wait.

        Ray calls this repeatedly.
        """
        deadline = time.monotonic() + _HEAR_S
        execution = get_train_context().execution_context
        runner: ThreadRunner = execution.training_thread_runner
        while (
            execution.result_queue.empty()
            and runner.is_running()
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_S)
        return super().poll_status()

    def settle(self, within_s: float) -> None:
        """End the trial's function if it still runs, and clear the trial's context.

        Raises:
            TimeoutError: The function did not end within `within_s`.
        """
        context: Any = get_train_context()
        context.stopped.set()
        execution = context.execution_context
        deadline = time.monotonic() + within_s
        while (
            execution.training_thread_runner.is_running()
            and time.monotonic() < deadline
        ):
            with suppress(queue.Empty):  # so that a waiting report can return
                execution.result_queue.get(timeout=_LOOK_S)
        if execution.training_thread_runner.is_running():
            raise TimeoutError("the training function is still running")
        context.checkpoint_upload_threadpool.shutdown()
        set_train_context(None)
        set_train_fn_utils(None)


class Answers:
    """Answers a training function's calls with Ray's implementation, in the worker."""

    def __getattr__(self, name: str) -> Any:
        return getattr(get_train_fn_utils(), name)

    def begins(self) -> None:
        """Do nothing; the forked process calls this before it calls its function."""


def stops() -> bool:
    """Return whether the trial of this worker was stopped."""
    context: Any = get_train_context()
    return bool(context.stopped.is_set())


def own_place(
    backend: str, timeout_s: float
) -> tuple[Place, list[socket.socket]]:
    """Return this worker's place in its trial; on rank 0, also the listening socket."""
    ranks = own_ranks()
    files: list[socket.socket] = []
    address = ("", 0)
    if ranks[0] == 0:
        server, host, port = listen()
        files.append(server)
        address = host, port
    host, port = ray.train.collective.broadcast_from_rank_zero(address)
    return Place(*ranks, own_gpu(), host, port, backend, timeout_s), files


def is_dead(actor: str) -> bool:
    """Return whether an actor is dead and will not be restarted."""
    return actor_record(actor).get("State") == "DEAD"


class _BorrowedGroup(DefaultPlacementGroupHandle):
    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True)
class _BorrowedState(WorkerGroupState):
    def shutdown(self) -> None:
        pass


class _StateBuilder(MeetingBuilder):
    def build(self) -> WorkerGroupState:
        return _BorrowedState(**vars(super().build()))

    def shutdown(self) -> None:
        pass


class LaneGroup(OwnGroup):
    """Ray's worker group, on workers that it borrows from a lane."""

    pool: Any
    """Set in the subclass that each trial creates."""

    def _start(self) -> None:
        wanted = self._worker_group_context
        run = self._train_run_context
        scaling: Any = run.scaling_config
        env = self._get_worker_runtime_env(
            run.run_config.worker_runtime_env or {}
        )
        labels = wanted.label_selector or []
        shape = Shape(
            wanted.num_workers,
            tuple(sorted(scaling._resources_per_worker_not_none.items())),
            scaling.placement_strategy,
            tuple(tuple(sorted(label.items())) for label in labels),
            json.dumps(dict(env), sort_keys=True),
        )
        borrower = ray.get_runtime_context().get_actor_id()
        self.loan = ray.get(self.pool.borrow.remote(shape, borrower))
        lane = self.loan.lane
        session = _session()
        self.shown = f"{session.experiment_name}, lane {lane}: trial {session.trial_name}"
        self.meeting = Stub(self.pool, "meet", lane)
        self.controller = Stub(self.pool, "ask", lane)
        try:
            self._start_with(_StateBuilder(self.meeting))
        except BaseException:
            self._give_back(stop=False)
            raise

    def _create_placement_group(
        self, scaling_config: Any, worker_group_context: Any
    ) -> _BorrowedGroup:
        return _BorrowedGroup(self.loan.group)

    def _create_workers(  # type: ignore[override]
        self,
        num_workers: int,
        placement_group: Any,
        resources: Any,
        **given: Any,
    ) -> list[Worker]:
        workers = [
            Worker(
                actor,
                place,
                resources,
                **accepted(Worker, placement_group_bundle_index=index),
            )
            for index, (actor, place) in enumerate(self.loan.workers)
        ]
        return list(self._assign_worker_ranks(workers))

    def poll_status(
        self, timeout: float | None = None
    ) -> WorkerGroupPollStatus:
        """Poll as Ray does, but with this file's timeout for the workers' answers."""
        return super().poll_status(_ANSWER_S)

    def _clear_state(self) -> None:
        status = self._latest_poll_status
        runs = status is None or any(
            worker.running for worker in status.worker_statuses.values()
        )
        super()._clear_state()  # type: ignore[no-untyped-call]
        self._give_back(stop=runs)

    def _give_back(self, stop: bool) -> None:
        ray.get(self.pool.give_back.remote(self.loan.lane, stop))


class LaneController(OwnController):
    """The controller of a trial; it runs in the same process as the trial's actor."""

    def __init__(self, pool: Any, **given: Any) -> None:
        class TrialGroup(LaneGroup):
            pass

        TrialGroup.pool = pool
        self._answering: set[asyncio.Task[None]] = set()
        # No resource requests: the lane holds the resources already.
        super().__init__(TrialGroup, False, **given)

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        """Poll without a pause: workers answer when they have something to report."""
        group: Any = self.get_worker_group()
        questions = await group.pool.questions.remote(group.loan.lane)
        for number, question in questions.items():
            # In a separate task, since the answer may depend on the result of
            # a poll.
            task = asyncio.create_task(self._answer(group, number, *question))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        if is_stopped():
            raise TrialStopped(0)
        await asyncio.sleep(0)
        status: WorkerGroupPollStatus = group.poll_status()
        return status

    async def _answer(
        self, group: LaneGroup, number: int, method: str, *args: Any
    ) -> None:
        answer = await getattr(self, method)(*args)
        await group.pool.answer.remote(group.loan.lane, number, answer)


def is_stopped() -> bool:
    """Return whether Tune has stopped or ended the trial of this process."""
    session = _session()
    return session is None or bool(session.stop_event.is_set())


def _session() -> Any:
    """Return Tune's session of this process's trial; None before and after it."""
    return get_session()


class _Reports(queue.Queue[Any]):
    """Replaces the actor between Ray's TuneReportCallback and the trial.

    Through this queue, the callback passes metrics to the trial's main thread.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._num_taken = self._num_passed_on = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the callback goes to every worker, where nothing calls it.
        return (
            _Reports,
            (),
        )

    def put(
        self, item: Any, block: bool = True, timeout: float | None = None
    ) -> None:
        """Add a report, and wait until Tune has it, so that no later one overtakes it.

        Raises:
            TrialStopped: Tune takes no more reports of this trial.
        """
        number = self._num_taken + 1
        super().put(item)
        while self._num_passed_on < number:
            if is_stopped():
                raise TrialStopped(0)
            time.sleep(_LOOK_S)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Get the next report; a further call means that Tune has the previous one."""
        self._num_passed_on = self._num_taken
        deadline = time.monotonic() + (timeout or 0.0)
        # What the trial itself has reported comes first.
        while _session().result_queue.empty():
            with suppress(queue.Empty):
                item = super().get(block, _LOOK_S)
                self._num_taken += 1
                return item
            if time.monotonic() > deadline:
                break
        raise Empty


def reports_of_trial() -> Any:
    """Return the queue for the reports of this process's TuneReportCallback."""
    found = _session()
    if found is None:  # Ray's own trainer has made this process
        raise RuntimeError("import TorchTrainer from tune.ray, not from Ray")
    return found._inter_actor_queue


def report_in_process() -> None:
    """Let Ray's TuneReportCallback report to this process without an actor in between."""
    _session()._inter_actor_queue = _Reports()
