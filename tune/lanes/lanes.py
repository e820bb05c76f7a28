"""Lanes: long-lived TorchTrainers whose workers run trial after trial from the mailbox
(Ray).

A lane is a thread of the driver that keeps one TorchTrainer alive. Its worker group
serves trials until the mailbox closes; after a crash Ray starts the group again and the
trial that was lost is queued again.

Ray imports this file in the controller of each lane, which does not need torch:
importing it costs two seconds of processor time at every start. So torch, and whatever
imports it, is imported in the functions that run elsewhere.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.train
from ray import cloudpickle
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainers.config.sections import ScalingConfig
from trainers.errors import last_line
from trainers.launch.imports import without_collection
from trainers.on_ray.connect import ray_scaling
from trainers.on_ray.environment import embedded
from trainers.on_ray.internals import available_resources_per_node
from trainers.on_ray.vital_signs import end_actors
from trainers.storage import Storage
from tune.forks.zygote import Preload
from tune.lanes.controller import LaneCallback, NoGroup
from tune.lanes.mailbox import Mailbox

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_START_S = 60.0
_LOOK_S = 0.2
_FIRST_S = 20.0
"""How long a lane's workers are waited for before the first trial begins: they may wait
for a node.
"""
_MAKE_S = 10.0
"""Within which Ray makes a group, also on a busy machine, unless that waits for a node.
"""
_SAY_AFTER_S = 2.0
_IN_THE_MAKING = ("PENDING", "PREPARED")


def start_mailbox(sweep: Storage, path: tuple[str, ...] = ()) -> Any:
    """The mailbox of the sweep in a directory: an actor; the arguments are a Mailbox's."""
    return ray.remote(Mailbox).options(**beside_driver()).remote(sweep, path)


def beside_driver() -> dict[str, Any]:
    """Options of an actor that serves the whole sweep: without a CPU, on the driver's
    node.

    Ray would put it on any node, one that may be taken back included, and the sweep
    would end with that node.
    """
    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    return {"num_cpus": 0, "max_concurrency": 10_000, "scheduling_strategy": here}


@dataclass
class Lanes:
    """The lanes of a sweep."""

    mailbox: Any
    scaling: ScalingConfig
    """The shape of the worker group."""
    use_gpu: bool
    zygote: str
    """The name of the sweep's zygotes, one a node."""
    preload: Preload
    """What they import."""
    sweep: Storage
    """The sweep's directory; Ray keeps its own records of the lanes below it."""
    num_at_once: int
    """Lanes that may start at the same time."""
    is_patient: bool
    """Whether the others start only where the sweep is likely to last."""
    of_function: bool = False
    """Whether trials are runs of a training function, not of a task."""

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._begun: set[int] = set()
        self._threads: list[threading.Thread] = []

    @property
    def count(self) -> int:
        """Lanes that were started, whether there is a node for them by now or not."""
        return len(self._threads)

    def grow(self, count: int) -> None:
        """Start lanes until there are `count`; returns at once, while their workers
        come up.
        """
        for lane in range(self.count, count):
            thread = threading.Thread(
                target=self._keep, args=(lane,), name=f"lane-{lane}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def settle(self) -> list[int]:
        """Let no further lane begin to start; returns those that are about to come up."""
        self._settled.set()
        alive = {lane for lane in self._begun if self._threads[lane].is_alive()}
        up = set(ray.get(self.mailbox.watch.remote())["lanes"])
        starting = sorted(alive - up)
        return starting if starting and self._may_come_up(len(up)) else []

    def close(self, timeout_s: float = 45.0) -> None:
        """Let the lanes end.

        One that is still starting comes up first and finds nothing to do, since killing
        it would leave its reservation with Ray; one for which there is no room, or that
        is not up after `timeout_s`, is killed.
        """
        self._closing.set()
        self._settled.set()
        up = set(ray.get(self.mailbox.watch.remote())["lanes"])
        if any(
            thread.is_alive()
            for lane, thread in enumerate(self._threads)
            if lane not in up
        ):
            self._end_waiting(up)
        ray.get(self.mailbox.close.remote())
        began = time.monotonic()
        is_said = False
        while alive := [
            lane for lane, thread in enumerate(self._threads) if thread.is_alive()
        ]:
            waited_s = time.monotonic() - began
            if waited_s > timeout_s or (
                waited_s > _SAY_AFTER_S and not self._may_come_up(0)
            ):
                self.end()
                return
            if waited_s > _SAY_AFTER_S and not is_said:
                is_said = True
                logger.info(
                    "waiting for lanes %s to end, %.0f s at most", alive, timeout_s
                )
            self._threads[alive[0]].join(_LOOK_S)

    def _end_waiting(self, up: set[int]) -> None:
        """End the lanes that have no place yet, before those that are up leave them
        theirs.
        """
        if self._may_come_up(len(up)):
            return
        for lane, controller in ray.get(
            self.mailbox.starts.remote("controller")
        ).items():
            if lane not in up and self._threads[lane].is_alive():
                ray.kill(cloudpickle.loads(controller))
        for name, state in self._reserved().items():
            if state != "CREATED":
                remove_placement_group(
                    PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name)))
                )

    def _may_come_up(self, num_up: int) -> bool:
        """Whether a lane beside those that are up has its place, or finds room for a
        worker on some node.
        """
        if sum(state == "CREATED" for state in self._reserved().values()) > num_up:
            return True
        worker = {"CPU": float(self.scaling.cpus_per_worker)}
        if self.use_gpu:
            worker["GPU"] = self.scaling.gpus_per_worker
        nodes = available_resources_per_node().values()
        return any(
            all(node.get(name, 0.0) >= amount for name, amount in worker.items())
            for node in nodes
        )

    def end(self, timeout_s: float = 20.0) -> None:
        """Kill the controllers of all lanes that still run, and free what they had
        reserved.

        After this no thread calls Ray, which would end the process once the connection
        is closed.

        Where the mailbox has died, a lane may have ended by itself, and have left what
        it had reserved.
        """
        self._closing.set()
        self._settled.set()
        deadline = time.monotonic() + timeout_s
        while any(alive := [thread.is_alive() for thread in self._threads]):
            if time.monotonic() > deadline:
                logger.warning(
                    "lanes %s do not end",
                    [lane for lane, is_alive in enumerate(alive) if is_alive],
                )
                break
            try:
                controllers = ray.get(
                    self.mailbox.starts.remote("controller"), timeout=timeout_s
                )
            except (
                ray.exceptions.RayError
            ):  # the mailbox has died, or all of the cluster
                controllers = {}
                end_actors()
            for lane, controller in controllers.items():
                if alive[lane]:
                    ray.kill(cloudpickle.loads(controller))
            self._threads[alive.index(True)].join(_LOOK_S)
        self._free()

    def _free(self) -> None:
        """Free what killed controllers had reserved: Ray does so when the job ends, and
        this one may go on.

        A group that Ray is just making is freed once it is made: removed before, it
        would keep its node's processors from everybody for as long as the node lives
        (ray issue 64693).
        """
        try:
            deadline = time.monotonic() + _MAKE_S
            while (
                any(state in _IN_THE_MAKING for state in self._reserved().values())
                and time.monotonic() < deadline
            ):
                if not self._may_come_up(0):
                    break  # Ray makes none of them
                time.sleep(_LOOK_S)
            for name in self._reserved():
                remove_placement_group(
                    PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name)))
                )
        except (
            Exception
        ) as error:  # the cluster is gone: the sweep is over all the same
            logger.warning(
                "what lanes had reserved is free when this process ends: %s", error
            )

    def _reserved(self) -> dict[str, str]:
        """The states of the groups that lanes have reserved, by their ids.

        The GCS has all that there ever was; the state API of Ray's dashboard lists any
        hundred of them.
        """
        job = ray.get_runtime_context().get_job_id()
        own = {"CPU": float(self.scaling.cpus_per_worker)}
        return {
            name: group["state"]
            for name, group in placement_group_table().items()
            if group["state"] != "REMOVED" and name.endswith(job)
            if all(own.items() <= one.items() for one in group["bundles"].values())
        }

    def _keep(self, lane: int) -> None:
        """Keep one worker group alive until the sweep closes; the body of a lane's
        thread.
        """
        with contextlib.suppress(
            ray.exceptions.ActorDiedError
        ):  # the mailbox is gone, and the driver says so
            self._keep_up(lane)

    def _keep_up(self, lane: int) -> None:
        failed = 0
        self._wait_for_turn(lane)
        self._begun.add(lane)
        if self._settled.is_set():
            self._begun.discard(lane)
            return
        while not self._closing.is_set():
            try:
                self._fit(lane)
                return
            except Exception as error:
                if self._closing.is_set():
                    return
                failed += 1
                logger.warning("lane %d ended: %s", lane, last_line(error))
                ray.get(self.mailbox.lost.remote(lane))
                reservations = ray.get(self.mailbox.starts.remote("reservation"))
                if (
                    lane in reservations
                ):  # of a controller that died; any other has given it back
                    remove_placement_group(reservations[lane])
                if failed == _MAX_FAILED_STARTS:
                    if not ray.get(self.mailbox.watch.remote())["lanes"]:
                        ray.get(
                            self.mailbox.close.remote(
                                f"lane {lane} failed {failed} times: {error}"
                            )
                        )
                    return

    def _wait_for_turn(self, lane: int) -> None:
        """Wait until fewer than `num_at_once` of the lanes before it are still
        starting; if patient, as long again.

        A start costs as much as many short trials. A lane that waits for as long as a
        start takes loses at most half of the time, and costs nothing where the sweep is
        over by then. No lane waits forever for those before it.
        """
        began = time.monotonic()
        deadline = began + _START_S * (lane // self.num_at_once)
        while (
            lane >= self.num_at_once
            and time.monotonic() < deadline
            and not self._settled.wait(_LOOK_S)
        ):
            up = ray.get(self.mailbox.watch.remote())["lanes"]
            if lane < self.num_at_once + sum(one < lane for one in up):
                if self.is_patient:
                    self._settled.wait(
                        min(time.monotonic() - began, deadline - time.monotonic())
                    )
                return

    def _fit(self, lane: int) -> None:
        """Run a worker group of a lane to its end."""
        from tune.lanes.trainer import LaneTrainer

        # A training function asks by itself, and its ranks may have asked Ray unequally
        # often.
        may_drain = not (embedded() or self.of_function)
        of_sweep = {"of_function": self.of_function, "may_drain": may_drain}
        forks = {"zygote": self.zygote, "preload": asdict(self.preload)}
        LaneTrainer(
            serve,
            train_loop_config={
                "lane": lane,
                "mailbox": self.mailbox,
                **of_sweep,
                **forks,
            },
            torch_config=NoGroup(),  # type: ignore[arg-type]
            scaling_config=ray_scaling(self.scaling, self.use_gpu),
            run_config=ray.train.RunConfig(
                name=f"lane-{lane}",
                storage_path=self.sweep.child("lanes").uri,
                failure_config=ray.train.FailureConfig(max_failures=-1),
                callbacks=[LaneCallback(self.mailbox, self.sweep.name, lane)],  # type: ignore[list-item]
            ),
        ).fit()


def serve(loop_config: Mapping[str, Any]) -> None:
    """Run trials as a worker of a lane; Ray calls it in each."""
    with without_collection(own_process=True):
        from tune.lanes.worker import serve_trials

    serve_trials(loop_config)
