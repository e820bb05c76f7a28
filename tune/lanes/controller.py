"""Ray's controller of a lane, which runs in the driver (Ray).

For each run, Ray starts three actors: the controller, one where the ranks
synchronize, and one that watches for drained nodes. Each is a Python process
that has to import Ray before the first trial can start. A lane's controller is
instead a thread of the driver, which lives as long as its lanes do, and the
lane's ranks synchronize in the mailbox.
"""

import asyncio
import contextlib
import secrets
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.backend import BackendConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainers.errors import RunFailedError
from trainers.launch.process import embedded
from trainers.on_ray.internals import without_cleaner
from trainers.on_ray.worker_group import SharingBackend, as_failure
from tune.ray_internals import (
    ControllerCallback,
    DatasetsCallback,
    FixedScalingPolicy,
    StateManagerCallback,
    TrainController,
    Worker,
    WorkerGroup,
    WorkerGroupCallback,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerGroupStateBuilder,
    group_module,
    named_worker,
    shutdown_workers,
    watching_in_thread,
)

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_LOOK_S = 0.2
_MAKE_S = 10.0
"""The longest that Ray takes to create a group that fits, on a busy machine."""
_NO_ROOM = ("NO_RESOURCES", "INFEASIBLE")


def beside_driver() -> dict[str, Any]:
    """Return the options of an actor without a CPU, pinned to the driver's node.

    Such an actor serves the whole sweep. By default Ray could place it on any
    node, including a spot node, and the sweep would end when that node is
    taken away.
    """
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    return {
        "num_cpus": 0,
        "max_concurrency": 10_000,
        "scheduling_strategy": here,
    }


@dataclass
class NoGroup(BackendConfig):
    """Replaces Ray's TorchConfig: trials' processes form process groups by themselves."""

    backend: str = "none"
    backend_cls = SharingBackend
    """Both are read by Ray's TorchTrainer."""


class LaneEnded(BaseException):
    """Raised in a lane that was told to end.

    It is not an Exception, because Ray's controller restarts the lane after an
    Exception.
    """


@dataclass(frozen=True)
class Stub:
    """Stands in for one of Ray's actors: forwards calls to another actor's method."""

    actor: Any
    method: str
    key: Any
    """First argument of that method: identifies the worker group or lane."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle looks these up
            raise AttributeError(name)

        def call(*args: Any, **given: Any) -> Any:
            method = getattr(self.actor, self.method)
            return method.remote(self.key, name, *args, **given)

        return SimpleNamespace(remote=call)


@dataclass
class Room:
    """The resources that a lane has reserved, and whether it must give them back."""

    mailbox: Any
    sweep: str
    lane: int
    is_over: threading.Event = field(default_factory=threading.Event)
    _group: PlacementGroup | None = None

    def __str__(self) -> str:
        return f"{self.sweep}, lane {self.lane}"

    def hold(self, group: PlacementGroup) -> None:
        """Remember the placement group that the lane has reserved.

        Raises:
            LaneEnded: The lane was told to end in the meantime.
        """
        self._group = group
        if self.is_over.is_set():
            _free(group)
            raise LaneEnded

    def give_back(self) -> None:
        """End the lane, from any thread: Ray ends the workers of a removed group."""
        self.is_over.set()
        if self._group is not None:
            _free(self._group)


def _free(group: PlacementGroup) -> None:
    """Remove a placement group; if Ray is about to create it, wait until Ray has.

    A group that is removed while Ray creates it would keep its CPUs reserved
    for as long as its node lives (ray issue 64693).
    """
    deadline = time.monotonic() + _MAKE_S
    while _is_being_made(group) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    remove_placement_group(group)


def _is_being_made(group: PlacementGroup) -> bool:
    """Return whether Ray has room for a group and is about to create it."""
    found = placement_group_table(group)
    state = found.get("state")
    waits = found.get("stats", {}).get("scheduling_state") in _NO_ROOM
    return state == "PREPARED" or (state == "PENDING" and not waits)


class LaneCallback(ControllerCallback, WorkerGroupCallback):
    """Tells the mailbox when workers of a lane have failed."""

    def __init__(self, mailbox: Any, lane: int) -> None:
        self._mailbox = mailbox
        self._lane = lane

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Report the errors of failed ranks to the mailbox; called by Ray.

        The mailbox then immediately queues the lane's trial again, for any
        lane.
        """
        if errors := worker_group_status.errors:
            cause = RunFailedError.first(
                [as_failure(rank, error) for rank, error in errors.items()]
            )
            # If the mailbox is dead, the driver ends the sweep.
            with contextlib.suppress(ray.exceptions.ActorDiedError):
                ray.get(self._mailbox.lost.remote(self._lane, cause))


class Unannounced(FixedScalingPolicy):
    """Ray's scaling policy for a group of fixed size, without its resource requests.

    The requests serve an autoscaler and the elastic runs of other drivers, and
    an embedded cluster has neither. They also start an actor, which the run
    waits for.
    """

    def _send_resource_request(self) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass


@dataclass(frozen=True)
class _LaneState(WorkerGroupState):
    def shutdown(self) -> None:
        shutdown_workers(self.workers)
        self.placement_group_handle.shutdown()


class MeetingBuilder(WorkerGroupStateBuilder):
    """Ray's builder of a group's state, with a barrier in an actor that is up already."""

    def __init__(self, meeting: Stub) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meeting = meeting

    def with_sync_actor(self, sync_actor: Any) -> "MeetingBuilder":
        """Called by Ray; sets the existing barrier instead of the one that Ray passes."""
        self.sync_actor = self._meeting
        return self


class _StateBuilder(MeetingBuilder):
    def build(self) -> WorkerGroupState:
        return _LaneState(**vars(super().build()))

    def shutdown(self) -> None:
        self.sync_actor = None  # the mailbox owns it
        super().shutdown()  # type: ignore[no-untyped-call]


class _Nobody:
    """Replaces the SynchronizationActor that Ray would start for each group."""

    @classmethod
    def options(cls, **options: Any) -> Any:
        return SimpleNamespace(remote=lambda **given: cls)


class OwnGroup(WorkerGroup):
    """Ray's worker group, except that its ranks meet in an actor that is up already."""

    meeting: Stub
    """Where the ranks synchronize."""
    controller: Stub | None = None
    """Answers the questions of the training function."""
    shown = ""
    """The name that Ray displays for the call that sets a worker's context."""

    def _start_with(self, builder: WorkerGroupStateBuilder) -> None:
        module: Any = group_module
        module.SynchronizationActor = _Nobody
        self._start_impl(builder)

    def _init_train_context_on_workers(
        self, workers: list[Worker], sync_actor: Any, given: dict[str, Any]
    ) -> None:
        calls = [
            worker.actor.init_train_context.options(name=self.shown).remote(
                train_run_context=self._train_run_context,
                distributed_context=worker.distributed_context,
                synchronization_actor=self.meeting,
                storage_context=self._storage_context,
                worker_callbacks=self._worker_callbacks_to_propagate,
                controller_actor=self.controller,
                **{name: values[index] for name, values in given.items()},
            )
            for index, worker in enumerate(workers)
        ]
        ray.get(calls)


class LaneGroup(OwnGroup):
    """The worker group of a lane, whose ranks meet in the mailbox."""

    room: Room
    """Set, like `_worker_cls`, in the subclass that each controller creates."""

    def _start(self) -> None:
        self.meeting = Stub(self.room.mailbox, "meet", secrets.token_hex(8))
        builder = _StateBuilder(self.meeting)
        try:
            self._start_with(builder)
        except BaseException:
            if not self.has_started():
                builder.shutdown()
            raise

    def _create_placement_group(
        self, scaling_config: Any, worker_group_context: Any
    ) -> Any:
        handle = super()._create_placement_group(
            scaling_config, worker_group_context
        )
        self.room.hold(handle.placement_group)
        return handle

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        # In an embedded cluster, all workers have the driver's environment. So
        # Ray may use a process that it has started in advance.
        if embedded():
            return {}
        return WorkerGroup._get_worker_runtime_env(custom_runtime_env)


class OwnController(TrainController):
    """Ray's controller, in a thread of this process."""

    def __init__(
        self, group: type[WorkerGroup], announces: bool, **given: Any
    ) -> None:
        """`announces` says whether a group of fixed size requests its resources."""
        self.worker_group_cls = group
        policy = given["scaling_policy"]
        if isinstance(policy, FixedScalingPolicy) and not announces:
            given["scaling_policy"] = Unannounced(policy.scaling_config)
        super().__init__(**given)
        self._worker_group_callbacks_to_propagate = [
            watching_in_thread(callback)
            for callback in self._worker_group_callbacks_to_propagate
        ]

    def fit(self) -> Any:
        """Run to the end in this thread, and return Ray's result."""
        try:
            asyncio.run(self.run())  # type: ignore[no-untyped-call]
        except BaseException:
            if (group := self.get_worker_group()) is not None:
                group.abort()
            # Otherwise Ray believes for 180 s that the group still needs its
            # resources.
            with contextlib.suppress(ray.exceptions.RayError):
                self._scaling_policy._cancel_resource_request()
            raise
        return self.get_result()


class LaneController(OwnController):
    """The controller of a lane, in the driver."""

    def __init__(self, room: Room, **given: Any) -> None:
        class RoomGroup(LaneGroup):
            _worker_cls = named_worker(f"{room}, worker")

        RoomGroup.room = room
        self._room = room
        # An embedded cluster needs no resource requests: Ray would start an
        # actor for them.
        super().__init__(RoomGroup, not embedded(), **given)

    def _start_worker_group(self, *args: Any, **given: Any) -> Any:
        self._go_on()
        return super()._start_worker_group(*args, **given)

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        self._go_on()
        status: WorkerGroupPollStatus = await super()._poll_workers()
        return status

    def _go_on(self) -> None:
        if self._room.is_over.is_set():
            raise LaneEnded


def lane_trainer(room: Room) -> "type[TorchTrainer]":
    """Return a class of TorchTrainer whose controller runs in the thread of `fit`.

    Modeled on DataParallelTrainer.fit of ray.train.v2 (Ray 2.60).
    """
    # TorchTrainer imports torch. The lanes' workers import this file, and do
    # not need torch.
    from ray.train.torch import TorchTrainer

    class LaneTrainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()  # type: ignore[misc] # typed as in the first version of Ray Train
            # A lane's controller dies with the driver, and then Ray frees the
            # lane's resources.
            return without_cleaner(
                callbacks,
                DatasetsCallback,  # starts an actor; a lane has no datasets
                StateManagerCallback,  # lists runs whose controllers are actors
            )

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            return LaneController(room, **given).fit()

    return LaneTrainer
