"""Lanes: long-lived TorchTrainers whose workers run trial after trial (Ray).

A lane is a thread of the driver that keeps one TorchTrainer alive. Its worker
group serves trials until the mailbox closes; after a crash, Ray restarts the
group and the lost trial is queued again.

Ray imports this file in the workers, which do not need torch. So this file
must not import torch, which costs two seconds of CPU time at every start.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.train

from trainers.config.model import Tree
from trainers.config.sections import ScalingConfig
from trainers.errors import last_line
from trainers.launch.process import embedded, without_collection
from trainers.on_ray.cluster import ray_scaling
from trainers.on_ray.vital_signs import is_alive
from trainers.storage import Storage
from tune.forks.zygote import Preload
from tune.lanes._mailbox import Mailbox
from tune.lanes.controller import (
    LaneCallback,
    LaneEnded,
    NoGroup,
    Room,
    beside_driver,
    lane_trainer,
)

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_START_S = 60.0
_LOOK_S = 0.2
_END_S = 20.0
"""How long a lane that was told to end may take to do so."""
_SAY_AFTER_S = 2.0


def start_mailbox(sweep: Storage) -> Any:
    """Start the mailbox of the sweep in this directory, and return its actor."""
    return ray.remote(Mailbox).options(**beside_driver()).remote(sweep)


@dataclass
class Lanes:
    """The lanes of a sweep."""

    mailbox: Any
    scaling: ScalingConfig
    """The shape of the worker group."""
    use_gpu: bool
    zygote: str
    """The name that the sweep's zygotes share; there is one zygote per node."""
    preload: Preload
    """What the zygotes import."""
    sweep: Storage
    """The sweep's directory, in which Ray also keeps its records of the lanes."""
    num_at_once: int
    """How many lanes may start at the same time."""
    is_patient: bool
    """Whether later lanes double their wait before they start (`_wait_for_turn`)."""
    of_function: bool = False
    """Whether trials are runs of a training function, not of a task."""

    def __post_init__(self) -> None:
        self._settled = threading.Event()
        self._ended: set[int] = set()
        """Lanes that were told to end."""
        self._threads: list[threading.Thread] = []
        self._rooms: list[Room] = []

    @property
    def count(self) -> int:
        """The number of lanes that were started, even if they still wait for a node."""
        return len(self._threads)

    def grow(self, count: int) -> None:
        """Start lanes until there are `count`; return before their workers are up."""
        for lane in range(self.count, count):
            thread = threading.Thread(
                target=self._keep,
                args=(lane,),
                name=f"lane-{lane}",
                daemon=True,
            )
            self._rooms.append(Room(self.mailbox, self.sweep.name, lane))
            self._threads.append(thread)
            thread.start()

    def settle(self) -> list[int]:
        """Start no further lane, and end those that are not up yet.

        Returns:
            A list of the one lane that may continue to start because no lane
            is up; otherwise an empty list.
        """
        self._settled.set()
        up = self._up()
        starting = [lane for lane in self._alive() if lane not in up]
        kept = [] if up else starting[:1]
        killed = [lane for lane in starting if lane not in kept]
        self._end(killed)
        ray.get(self.mailbox.killed.remote(killed))
        return kept

    def close(self, timeout_s: float = 45.0) -> None:
        """End the lanes that are not up, and let the others finish.

        A lane that has not ended after `timeout_s` is ended by force.
        """
        self._settled.set()
        up = self._up()
        # These end first: they could otherwise take the resources that the
        # other lanes free.
        self._end([lane for lane in self._alive() if lane not in up])
        ray.get(self.mailbox.close.remote())
        self._ended.update(up)
        self._await(timeout_s)
        self.end()

    def end(self) -> None:
        """End all lanes that still run, and free what they have reserved.

        Afterwards no lane's thread calls Ray: such a call would end the
        process once the connection to Ray is closed.
        """
        self._settled.set()
        self._end(self._alive())

    def _up(self) -> list[int]:
        lanes: list[int] = ray.get(self.mailbox.watch.remote())["lanes"]
        return lanes

    def _alive(self) -> list[int]:
        return [
            lane
            for lane, thread in enumerate(self._threads)
            if thread.is_alive()
        ]

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
                    "waiting for lanes %s to end, %.0f s at most",
                    alive,
                    timeout_s,
                )
            self._threads[alive[0]].join(_LOOK_S)

    def _end(self, lanes: Sequence[int]) -> None:
        """Tell lanes to end, and wait until their threads have ended."""
        self._ended.update(lanes)
        deadline = time.monotonic() + _END_S
        while alive := [lane for lane in self._alive() if lane in lanes]:
            if time.monotonic() > deadline:
                logger.warning(
                    "lanes %s have not ended after %.0f s", alive, _END_S
                )
                return
            if is_alive():
                for lane in alive:
                    self._rooms[lane].give_back()
            self._threads[alive[0]].join(_LOOK_S)

    def _keep(self, lane: int) -> None:
        """Keep a worker group alive until the sweep closes; the lane's thread."""
        # If the mailbox has died, the driver reports that.
        with contextlib.suppress(ray.exceptions.ActorDiedError):
            self._wait_for_turn(lane)
            if self._settled.is_set():
                return
            for failed in range(1, _MAX_FAILED_STARTS + 1):
                try:
                    self._fit(lane)
                    return
                except LaneEnded:
                    return
                except Exception as error:
                    if lane in self._ended:
                        return
                    logger.warning("lane %d ended: %s", lane, last_line(error))
                    ray.get(self.mailbox.lost.remote(lane))
                    if failed == _MAX_FAILED_STARTS and not self._up():
                        why = f"lane {lane} failed {failed} times: {error}"
                        ray.get(self.mailbox.close.remote(why))

    def _wait_for_turn(self, lane: int) -> None:
        """Wait until fewer than `num_at_once` of the earlier lanes are starting.

        If `is_patient`, then wait the same time once more: a start costs as
        much as many short trials. A lane that waits as long as a start takes
        loses at most half of its time, and costs nothing if the sweep ends
        during the wait. No lane waits forever for the earlier lanes.
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
                        min(
                            time.monotonic() - began,
                            deadline - time.monotonic(),
                        )
                    )
                return

    def _fit(self, lane: int) -> None:
        """Run one worker group for a lane until that group ends."""
        config = {
            "lane": lane,
            "mailbox": self.mailbox,
            "sweep": self.sweep.name,
            "of_function": self.of_function,
            # All ranks must ask Ray for drains equally often. A training
            # function asks by itself, and not always equally often.
            "may_drain": not (embedded() or self.of_function),
            "zygote": self.zygote,
            "preload": asdict(self.preload),
        }
        trainer = lane_trainer(self._rooms[lane])(
            serve,
            train_loop_config=config,
            torch_config=NoGroup(),  # type: ignore[arg-type]
            scaling_config=ray_scaling(self.scaling, self.use_gpu),
            run_config=ray.train.RunConfig(
                name=f"lane-{lane}",
                storage_path=self.sweep.child("lanes").uri,
                failure_config=ray.train.FailureConfig(max_failures=-1),
                callbacks=[LaneCallback(self.mailbox, lane)],  # type: ignore[list-item]
            ),
        )
        trainer.fit()


def serve(loop_config: Tree) -> None:
    """Run trials as a worker of a lane; Ray calls this in each worker."""
    with without_collection(own_process=True):
        from tune.lanes._worker import serve_trials

    serve_trials(loop_config)
