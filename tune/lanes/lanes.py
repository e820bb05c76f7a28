"""Lanes: long-lived TorchTrainers whose workers run trial after trial from the mailbox (Ray).

A lane is a thread of the driver that keeps one TorchTrainer alive. Its worker group serves trials until the mailbox
closes; after a crash Ray starts the group again and the trial that was lost is queued again. With `isolation: fresh`
a group serves one trial and ends, and the thread starts the next.

Ray imports this file in the controller of each lane, which has no use for torch: two seconds of processor time at every
start. So torch, and whatever imports it, is imported in the functions that run elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray import cloudpickle
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.state import list_placement_groups

from trainers.config import TrainConfig
from trainers.errors import last_line
from trainers.launch.imports import without_collection
from trainers.on_ray.connect import ray_scaling
from trainers.on_ray.process_group import GroupConfig
from trainers.storage import Storage
from tune.lanes.controller import Losses, Presence
from tune.lanes.mailbox import Mailbox

if TYPE_CHECKING:
    from tune.lanes.trainer import LaneTrainer

logger = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_START_S, _LOOK_S, _STATE_S = 60.0, 0.2, 10


def start_mailbox(sweep: Storage) -> Any:
    """The mailbox of the sweep in a directory: an actor without a CPU."""
    return ray.remote(Mailbox).options(num_cpus=0, max_concurrency=10_000).remote(sweep)


class Lanes:
    """The lanes of a sweep."""

    def __init__(
        self,
        mailbox: Any,
        count: int,
        config: TrainConfig,
        path: Sequence[str],
        gpu: bool,
        sweep: Storage,
        fresh: bool,
        at_once: int,
        patient: bool,
    ) -> None:
        """`config` gives the shape of the worker groups; Ray keeps its own records of them below `sweep`. Not more than
        `at_once` start at the same time; `patient` ones start only where the sweep lasts.
        """
        self._mailbox, self._config, self._path, self._gpu = mailbox, config, tuple(path), gpu
        self._sweep, self._fresh, self._wanted = sweep, fresh, count
        self._at_once, self._patient = at_once, patient
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def count(self) -> int:
        """Lanes that were started, whether there is a node for them by now or not."""
        return len(self._threads)

    def start(self) -> None:
        """Start all lanes; returns at once, while their workers come up."""
        self.grow(self._wanted)

    def await_first(self, cancelled: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Until a lane's workers are there, with imports before them: what starts any sooner holds up the first trial.

        Where they wait for a node, not for long.
        """
        deadline = time.monotonic() + timeout_s
        while not (cancelled() or ray.get(self._mailbox.any_started.remote())) and time.monotonic() < deadline:
            self._closing.wait(_LOOK_S)

    def grow(self, count: int) -> None:
        """Start further lanes until there are so many."""
        for lane in range(self.count, count):
            if self._wanted < count:
                logger.info("the cluster holds another lane: lane %d starts", lane)
            thread = threading.Thread(target=self._keep, args=(lane,), name=f"lane-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, timeout_s: float = 45.0) -> None:
        """Send the lanes home. One that still starts comes up, and finds that there is nothing to do: ended before, it
        would leave what it has reserved with Ray. One that waits for a node longer than that is ended.
        """
        self._closing.set()
        ray.get(self._mailbox.close.remote())
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.end():
            self._free()

    def end(self, timeout_s: float = 20.0) -> bool:
        """End every lane where it stands; whether some had to be. After this no thread calls Ray, which would end the
        process where the connection is closed. What they had reserved is free when this process ends.
        """
        self._closing.set()
        deadline, ended = time.monotonic() + timeout_s, False
        while (alive := [thread.is_alive() for thread in self._threads]) and any(alive):
            if time.monotonic() > deadline:
                logger.warning("lanes %s do not end", [lane for lane, is_alive in enumerate(alive) if is_alive])
                break
            try:
                controllers = ray.get(self._mailbox.controllers.remote(), timeout=timeout_s)
            except ray.exceptions.RayError:  # the cluster is gone, and the controllers with it
                controllers = {}
            for lane, controller in controllers.items():
                if alive[lane]:
                    ray.kill(cloudpickle.loads(controller))
                    ended = True
            self._threads[alive.index(True)].join(_LOOK_S)
        return ended

    def _free(self) -> None:
        """Give back what ended controllers had reserved: Ray frees it with the job, and this one may go on."""
        here = ray.get_runtime_context()
        own = {"CPU": float(self._config.scaling.cpus_per_worker)}
        try:
            filters: Any = [("creator_job_id", "=", here.get_job_id())]
            groups = list_placement_groups(here.gcs_address, filters, detail=True, timeout=_STATE_S)
            for group in groups:
                bundles = group.bundles or []
                if group.state != "REMOVED" and all(own.items() <= one["unit_resources"].items() for one in bundles):
                    remove_placement_group(
                        PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.placement_group_id)))
                    )
        except Exception as error:  # a cluster without dashboard, or one that is gone: the sweep is over all the same
            logger.warning("what lanes had reserved is free when this process ends: %s", error)

    def _keep(self, lane: int) -> None:
        """Keep one worker group alive until the sweep closes."""
        failed = 0
        self._wait_for_turn(lane)
        while not self._closing.is_set():
            try:
                self._trainer(lane).fit()
                failed = 0
            except Exception as error:
                if self._closing.is_set():
                    return
                failed += 1
                logger.warning("lane %d ended: %s", lane, last_line(error))
                ray.get(self._mailbox.lost.remote(lane))
                reservations = ray.get(self._mailbox.reservations.remote())
                if lane in reservations:  # of a controller that died; any other has given it back
                    remove_placement_group(reservations[lane])
                if failed == _MAX_FAILED_STARTS:
                    if not ray.get(self._mailbox.watch.remote())["lanes"]:
                        ray.get(self._mailbox.close.remote(f"lane {lane} failed {failed} times: {error}"))
                    return

    def _wait_for_turn(self, lane: int) -> None:
        """Until all but so many of the lanes before it are up; if `patient`, for as long again as that took.

        A start costs as much as many short trials. Who waits for as long as it takes loses at most half of the time,
        and loses nothing with a sweep that is over by then. No lane waits for ever for those before it.
        """
        began = time.monotonic()
        deadline = began + _START_S * (lane // self._at_once)
        while lane >= self._at_once and time.monotonic() < deadline and not self._closing.wait(_LOOK_S):
            up = ray.get(self._mailbox.watch.remote())["lanes"]
            if lane < self._at_once + sum(one < lane for one in up):
                if self._patient:
                    self._closing.wait(min(time.monotonic() - began, deadline - time.monotonic()))
                return

    def _trainer(self, lane: int) -> LaneTrainer:
        from tune.lanes.trainer import LaneTrainer

        loop_config = {
            "lane": lane,
            "mailbox": self._mailbox,
            "path": list(self._path),
            "fresh": self._fresh,
            "name": self._sweep.name,
        }
        return LaneTrainer(
            serve,
            train_loop_config=loop_config,
            torch_config=GroupConfig("nccl" if self._gpu else "gloo"),  # type: ignore[arg-type]
            scaling_config=ray_scaling(self._config.scaling, self._gpu),
            run_config=ray.train.RunConfig(
                name=f"lane-{lane}",
                storage_path=self._sweep.child("lanes").uri,
                failure_config=ray.train.FailureConfig(max_failures=-1),
                callbacks=[Losses(self._mailbox, lane), Presence(self._mailbox, lane)],  # type: ignore[list-item]
            ),
        )


def serve(loop_config: Mapping[str, Any]) -> None:
    """What each worker of a lane runs."""
    with without_collection(own_process=True):
        from tune.lanes.worker import serve_trials

    serve_trials(loop_config)
