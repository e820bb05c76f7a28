"""Lanes: long-lived TorchTrainers whose workers run trial after trial (Ray).

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)

from trainers.config.sections import ScalingConfig
from trainers.errors import last_line
from trainers.launch.process import without_collection
from trainers.on_ray.cluster import is_alive, ray_scaling
from trainers.on_ray.environment import embedded
from trainers.storage import Storage
from tune.forks.zygote import Preload
from tune.lanes.controller import LaneCallback, NoGroup, beside_driver
from tune.lanes.mailbox import Mailbox

if TYPE_CHECKING:
    from tune.lanes.trainer import LaneTrainer

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_START_S = 60.0
_LOOK_S = 0.2
_END_S = 20.0
"""Within which a controller that was killed is gone."""
_MAKE_S = 10.0
"""Within which Ray makes a group for which there is room, also on a busy machine."""
_SAY_AFTER_S = 2.0
_NO_ROOM = ("NO_RESOURCES", "INFEASIBLE")


def start_mailbox(sweep: Storage) -> Any:
    """Start the mailbox of the sweep in a directory; returns the actor."""
    return ray.remote(Mailbox).options(**beside_driver()).remote(sweep)


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
        self._settled = threading.Event()
        self._ended: set[int] = set()
        """Lanes that were told to end."""
        self._threads: list[threading.Thread] = []
        self._trainers: dict[int, LaneTrainer] = {}
        self._others: set[str] = set()
        """Groups that the user's own program has reserved."""

    @property
    def count(self) -> int:
        """Lanes that were started, whether there is a node for them by now or not."""
        return len(self._threads)

    def grow(self, count: int) -> None:
        """Start lanes until there are `count`; returns before their workers are up."""
        if self.count == 0:
            self._others = set(self._reserved())
        for lane in range(self.count, count):
            thread = threading.Thread(
                target=self._keep, args=(lane,), name=f"lane-{lane}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def settle(self) -> list[int]:
        """Start no further lane, and end those that are not up yet.

        Returns:
            The lane that still starts: one stays where none is up.
        """
        self._settled.set()
        up = self._up()
        starting = [lane for lane in self._alive() if lane not in up]
        kept = [] if up else starting[:1]
        killed = [lane for lane in starting if lane not in kept]
        self._end(killed)
        ray.get(self.mailbox.killed.remote(killed))
        if up:
            self._free(up)
        return kept

    def close(self, timeout_s: float = 45.0) -> None:
        """End the lanes that are not up, and let the others end by themselves.

        One that has not ended after `timeout_s` is killed.
        """
        self._settled.set()
        up = self._up()
        self._end([lane for lane in self._alive() if lane not in up])
        # Before the others leave their places to what these have reserved.
        self._free(up)
        ray.get(self.mailbox.close.remote())
        self._ended.update(up)
        self._await(timeout_s)
        self.end()

    def end(self) -> None:
        """Kill the controllers of all lanes that still run, and free what they reserved.

        After this no thread calls Ray, which would end the process once the connection
        is closed. Where the mailbox has died, lanes have ended by themselves, and may
        have left what they had reserved.
        """
        self._settled.set()
        self._end(self._alive())
        try:
            self._free([])
        except Exception as error:  # the cluster is gone, and the sweep is over
            logger.warning(
                "what lanes had reserved is free when this process ends: %s", error
            )

    def _up(self) -> list[int]:
        lanes: list[int] = ray.get(self.mailbox.watch.remote())["lanes"]
        return lanes

    def _alive(self) -> list[int]:
        return [lane for lane, thread in enumerate(self._threads) if thread.is_alive()]

    def _await(self, timeout_s: float) -> None:
        """Wait until all lanes have ended."""
        began = time.monotonic()
        is_said = False
        while alive := self._alive():
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                return
            if waited_s > _SAY_AFTER_S and not is_said:
                is_said = True
                logger.info(
                    "waiting for lanes %s to end, %.0f s at most", alive, timeout_s
                )
            self._threads[alive[0]].join(_LOOK_S)

    def _end(self, lanes: Sequence[int]) -> None:
        """Kill the controllers of lanes, and wait for the ends of their threads."""
        self._ended.update(lanes)
        deadline = time.monotonic() + _END_S
        while alive := [lane for lane in self._alive() if lane in lanes]:
            if time.monotonic() > deadline:
                logger.warning("lanes %s do not end", alive)
                return
            if is_alive():
                for lane in alive:
                    self._kill(lane)
            self._threads[alive[0]].join(_LOOK_S)

    def _kill(self, lane: int) -> None:
        trainer = self._trainers.get(lane)
        controller = None if trainer is None else trainer.controller
        if controller is not None:
            ray.kill(controller)

    def _free(self, kept: Sequence[int]) -> None:
        """Free what the controllers of all lanes but some have reserved.

        Ray does so when the job ends, and this one may go on. A group that Ray is just
        making is freed once it is made: removed before, it would keep its node's
        processors from everybody for as long as the node lives (ray issue 64693).
        """
        groups = ray.get(self.mailbox.reservations.remote()) if kept else {}
        own = {groups[lane].id.hex() for lane in kept if lane in groups}
        deadline = time.monotonic() + _MAKE_S
        while any(_is_being_made(group) for group in self._reserved().values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        for name in self._reserved().keys() - own:
            remove_placement_group(
                PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name)))
            )

    def _reserved(self) -> dict[str, dict[str, Any]]:
        """Return the groups that lanes have reserved, by their ids.

        The GCS has all that there ever was; the state API of Ray's dashboard lists any
        hundred of them.
        """
        job = ray.get_runtime_context().get_job_id()
        own = {"CPU": float(self.scaling.cpus_per_worker)}
        return {
            name: group
            for name, group in placement_group_table().items()
            if group["state"] != "REMOVED" and name.endswith(job)
            if name not in self._others
            if all(
                own.items() <= bundle.items() for bundle in group["bundles"].values()
            )
        }

    def _keep(self, lane: int) -> None:
        """Keep a worker group alive until the sweep closes, as the thread of a lane."""
        with contextlib.suppress(
            ray.exceptions.ActorDiedError
        ):  # the mailbox is gone, and the driver says so
            self._wait_for_turn(lane)
            if not self._settled.is_set():
                self._keep_up(lane)

    def _keep_up(self, lane: int) -> None:
        for failed in range(1, _MAX_FAILED_STARTS + 1):
            try:
                self._fit(lane)
                return
            except Exception as error:
                if lane in self._ended:
                    return
                logger.warning("lane %d ended: %s", lane, last_line(error))
                ray.get(self.mailbox.lost.remote(lane))
                reservations = ray.get(self.mailbox.reservations.remote())
                # Of a controller that died; any other has given it back.
                if lane in reservations:
                    remove_placement_group(reservations[lane])
                if failed == _MAX_FAILED_STARTS and not self._up():
                    why = f"lane {lane} failed {failed} times: {error}"
                    ray.get(self.mailbox.close.remote(why))

    def _wait_for_turn(self, lane: int) -> None:
        """Wait until fewer than `num_at_once` of the lanes before it still start.

        If patient, wait as long again. A start costs as much as many short trials. A
        lane that waits for as long as a start takes loses at most half of the time, and
        costs nothing where the sweep is over by then. No lane waits forever for those
        before it.
        """
        began = time.monotonic()
        deadline = began + _START_S * (lane // self.num_at_once)
        while (
            lane >= self.num_at_once
            and time.monotonic() < deadline
            and not self._settled.wait(_LOOK_S)
        ):
            num_before = sum(other < lane for other in self._up())
            if lane < self.num_at_once + num_before:
                if self.is_patient:
                    self._settled.wait(
                        min(time.monotonic() - began, deadline - time.monotonic())
                    )
                return

    def _fit(self, lane: int) -> None:
        """Run a worker group of a lane to its end."""
        from tune.lanes.trainer import LaneTrainer

        config = {
            "lane": lane,
            "mailbox": self.mailbox,
            "sweep": self.sweep.name,
            "of_function": self.of_function,
            # A training function asks by itself, and its ranks may have asked Ray
            # unequally often.
            "may_drain": not (embedded() or self.of_function),
            "zygote": self.zygote,
            "preload": asdict(self.preload),
        }
        self._trainers[lane] = LaneTrainer(
            serve,
            train_loop_config=config,
            torch_config=NoGroup(),  # type: ignore[arg-type]
            scaling_config=ray_scaling(self.scaling, self.use_gpu),
            run_config=ray.train.RunConfig(
                name=f"lane-{lane}",
                storage_path=self.sweep.child("lanes").uri,
                failure_config=ray.train.FailureConfig(max_failures=-1),
                callbacks=[LaneCallback(self.mailbox, self.sweep.name, lane)],  # type: ignore[list-item]
            ),
        )
        self._trainers[lane].fit()


def _is_being_made(group: Mapping[str, Any]) -> bool:
    """Whether Ray has room for a group, and is about to make it."""
    waits = group["stats"]["scheduling_state"] in _NO_ROOM
    return group["state"] == "PREPARED" or (group["state"] == "PENDING" and not waits)


def serve(loop_config: Mapping[str, Any]) -> None:
    """Run trials as a worker of a lane; Ray calls it in each."""
    with without_collection(own_process=True):
        from tune.lanes.worker import serve_trials

    serve_trials(loop_config)
