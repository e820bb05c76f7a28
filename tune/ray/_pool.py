"""The pool of lanes: an actor that lends groups of warm workers to trials (Ray).

A lane is a placement group and the worker processes in it, which keep no state
of a trial. A trial borrows a lane of the shape that it needs, and gives it
back. If one of the lane's workers does not answer when the lane is given back,
the pool ends the lane.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tune.ray._controller import LaneWorker, Shape, is_dead
from tune.ray_internals import bundle_to_remote_args, make_barrier

if TYPE_CHECKING:
    from tune.ray_internals import ActorMetadata

logger = logging.getLogger(__name__)

_SETTLE_S = 10.0
"""How long a stopped function may take until its next report, which ends it."""
_PLACE_S = 0.5
_WATCH_S = 1.0
_IDLE_S = 10.0
"""How long a lane that no trial borrows keeps its resources."""
_MAKE_S = 1.0


@dataclass(frozen=True)
class Loan:
    """A lane, as a trial that borrows it sees it."""

    lane: int
    group: PlacementGroup
    workers: list[tuple[Any, "ActorMetadata"]]
    """The handle of each worker's actor, and its metadata, such as its node."""


@dataclass
class Wish:
    """A trial that waits for a lane."""

    shape: Shape
    borrower: str
    loan: asyncio.Future[Loan]


@dataclass
class Lane:
    """A lane as the pool knows it."""

    number: int
    shape: Shape
    group: PlacementGroup
    placed: asyncio.Future[Any]
    """Done once Ray has placed the group on nodes."""
    since: float
    """When the lane began to start, came up, or was last given back."""
    actors: list[Any] = field(default_factory=list)
    """The handle of each worker's actor; empty until the workers are started."""
    workers: list[tuple[Any, "ActorMetadata"]] = field(default_factory=list)
    barrier: Any = None
    """Where the lane's ranks synchronize; each trial gets a new barrier."""
    asked: int = 0
    questions: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """Questions to the trial's controller that it has not fetched yet, by number."""
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    is_up: bool = False
    borrower: str | None = None
    """ID of the actor that has borrowed the lane; empty while the workers end
    that actor's trial; None if the lane is free or not up yet.
    """
    stopping: bool = False


def reserve(shape: Shape) -> PlacementGroup:
    """Ask Ray to reserve the resources of a lane."""
    bundles = [dict(shape.resources)] * shape.num_workers
    labels = [dict(node) for node in shape.labels] or None
    group: PlacementGroup = placement_group(
        bundles, strategy=shape.strategy, bundle_label_selector=labels
    )
    return group


def start_workers(
    shape: Shape, group: PlacementGroup, zygote: str, shown: str
) -> list[Any]:
    """Start the workers of a lane; Ray starts each once the group is placed.

    Args:
        shape: How many workers there are, and what each of them needs.
        group: The placement group of the lane.
        zygote: The name of each node's zygote, from which trials are forked.
        shown: The name that Ray displays for the lane.

    Returns:
        The handles of their actors.
    """
    options = bundle_to_remote_args(dict(shape.resources))
    env = json.loads(shape.runtime_env)
    actor: Any = ray.remote(runtime_env=env, **options)(LaneWorker)
    workers = []
    for index in range(shape.num_workers):
        place = PlacementGroupSchedulingStrategy(group, index)
        placed = actor.options(scheduling_strategy=place)
        workers.append(placed.remote(zygote, f"{shown}, worker"))
    return workers


def most_lanes(shape: Shape, resources: dict[str, float]) -> int:
    """Return how many lanes of a shape the resources of a cluster can hold."""
    fits = [
        resources.get(name, 0.0) / (each * shape.num_workers)
        for name, each in shape.resources
        if each
    ]
    return max(1, math.floor(min(fits, default=1.0)))


class Pool:
    """The pool of a driver; each call is short or waits without holding a thread."""

    def __init__(self, zygote: str, sweep: str) -> None:
        """`zygote` names the sweep's zygotes; `sweep` is the name that Ray displays."""
        self._zygote = zygote
        self._sweep = sweep
        self._lanes: dict[int, Lane] = {}
        self._count = 0
        self._waiting: list[Wish] = []
        self._watching = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._restarts: list[str] = []
        self._start_s = 0.0
        """How long the last start of a lane took."""
        self._first_lent: float | None = None
        self._last_up = 0.0
        self._inside: set[str] = set()
        """IDs of the actors that are running a trial's driver."""
        self._expected = 0

    def __repr__(self) -> str:
        return f"{self._sweep}, pool"

    async def borrow(self, shape: Shape, borrower: str) -> Loan:
        """Lend an actor a lane of this shape: a free one, or the next that is free."""
        if not self._watching:
            self._watching = True
            self._do(self._watch())
        wish = Wish(
            shape, borrower, asyncio.get_running_loop().create_future()
        )
        if (lane := self._free(wish)) is not None:
            return self._lend(lane, wish)
        self._waiting.append(wish)
        self._start_wanted()
        return await wish.loan

    async def give_back(self, number: int, stop: bool) -> None:
        """Take a lane back; `stop` ends its running function at the next report."""
        self._take_back(self._lanes[number], stop)

    async def meet(
        self, number: int, method: str, *args: Any, **given: Any
    ) -> Any:
        """Call a method of the barrier at which a lane's ranks synchronize.

        For a report, the result is None on all ranks if their trial is to
        stop.
        """
        lane = self._lanes[number]
        is_report = given.get("caller_method_name") == "ray.train.report"
        if is_report:
            given["data"] = given["data"], lane.stopping
        answer = await getattr(lane.barrier, method)(*args, **given)
        if not is_report:
            return answer
        data, stops = answer
        return None if stops else data

    async def ask(self, number: int, *question: Any) -> Any:
        """Ask the controller of a lane's trial, and wait for its answer."""
        future: asyncio.Future[Any] = (
            asyncio.get_running_loop().create_future()
        )
        lane = self._lanes[number]
        lane.asked += 1
        lane.questions[lane.asked] = question
        lane.answers[lane.asked] = future
        return await future

    async def questions(self, number: int) -> dict[int, tuple[Any, ...]]:
        """Return the lane's questions since the last call, by number."""
        lane = self._lanes[number]
        asked = lane.questions
        lane.questions = {}
        return asked

    async def answer(self, number: int, question: int, answer: Any) -> None:
        """Pass the controller's answer to the worker that asked a question."""
        self._lanes[number].answers.pop(question).set_result(answer)

    async def enter(self, actor: str) -> None:
        """Note that the actor with this ID is running a trial's driver."""
        self._inside.add(actor)

    async def may_leave(self, actor: str) -> bool:
        """Return whether a trial may end now that its driver has ended.

        Tune gives an ended trial's actor to a trial whose own actor is still
        starting, and drops the starting one. If trials are shorter than the
        start of an actor, Tune would keep starting actors without ever having
        more of them. So an ended trial waits until as many drivers are running
        as `expect` was told.
        """
        if len(self._inside) < self._expected:
            return False
        self._inside.discard(actor)
        return True

    async def expect(self, count: int) -> None:
        """Let a trial end only while at least `count` drivers are running."""
        self._expected = count

    async def state(self) -> dict[str, Any]:
        """Return the state of the lanes.

        Returns:
            How many lanes are up (`up`) and how many the cluster can hold
            (`most`). In seconds: how long the last start took (`start_s`), how
            long ago the first lane was lent (`serving_s`), and how long ago
            the last lane came up (`last_up_s`).
        """
        shapes = [lane.shape for lane in self._lanes.values()]
        most = 1
        if shapes:
            most = most_lanes(shapes[-1], ray.cluster_resources())
        up = sum(lane.is_up for lane in self._lanes.values())
        now = time.monotonic()
        serving_s = 0.0 if self._first_lent is None else now - self._first_lent
        last_up_s = now - self._last_up
        return {
            "up": up,
            "most": most,
            "start_s": self._start_s,
            "serving_s": serving_s,
            "last_up_s": last_up_s,
        }

    async def close(self) -> list[str]:
        """End all lanes; return the reasons why some had to restart earlier.

        Lanes that are not placed yet end first: otherwise Ray would place one
        of them as soon as another lane frees its resources.
        """
        for lane in sorted(
            self._lanes.values(), key=lambda lane: lane.placed.done()
        ):
            await self._end(lane)
        return self._restarts

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _free(self, wish: Wish) -> Lane | None:
        for lane in self._lanes.values():
            if (
                lane.is_up
                and lane.borrower is None
                and lane.shape == wish.shape
            ):
                return lane
        return None

    def _is_in_the_way(self, other: Lane, lane: Lane) -> bool:
        """Return whether `other` is unused and may block `lane`, which is wanted."""
        wanted = {wish.shape for wish in self._waiting}
        if lane.shape not in wanted or other.borrower is not None:
            return False
        if other.shape == lane.shape:
            return False
        return other.is_up or other.shape not in wanted

    def _lend(self, lane: Lane, wish: Wish) -> Loan:
        self._first_lent = self._first_lent or time.monotonic()
        lane.borrower = wish.borrower
        lane.stopping = False
        lane.barrier = make_barrier()
        return Loan(lane.number, lane.group, lane.workers)

    def _start_wanted(self) -> None:
        """Start lanes for waiting trials that no starting or settling lane covers."""
        coming = Counter(
            lane.shape
            for lane in self._lanes.values()
            if not lane.is_up or lane.borrower == ""
        )
        for wish in self._waiting:
            if coming[wish.shape] > 0:
                coming[wish.shape] -= 1
            else:
                self._begin(wish.shape)

    def _begin(self, shape: Shape) -> None:
        """Reserve a lane's resources, and start it in the background."""
        group = reserve(shape)
        placed = asyncio.ensure_future(group.ready())
        lane = Lane(self._count, shape, group, placed, time.monotonic())
        self._count += 1
        self._lanes[lane.number] = lane
        self._do(self._start(lane))

    async def _start(self, lane: Lane) -> None:
        """Start the workers of a lane, and lend it to a trial that waits for one."""
        try:
            await self._placed(lane)
            if lane.number not in self._lanes:
                return
            shown = f"{self._sweep}, lane {lane.number}"
            lane.actors = start_workers(
                lane.shape, lane.group, self._zygote, shown
            )
            calls = [actor.get_metadata.remote() for actor in lane.actors]
            places = await asyncio.gather(*calls)
        except Exception as error:
            if lane.number in self._lanes:
                await self._end(lane)
                self._fail(lane.shape, error)
            return
        lane.workers = list(zip(lane.actors, places, strict=True))
        now = time.monotonic()
        self._last_up = now
        self._start_s = now - lane.since
        lane.is_up = True
        lane.since = now
        self._serve()

    async def _placed(self, lane: Lane) -> None:
        """Wait until Ray has placed a lane; end unused lanes of other shapes for it."""
        while not (await asyncio.wait([lane.placed], timeout=_PLACE_S))[0]:
            for other in list(self._lanes.values()):
                if self._is_in_the_way(other, lane):
                    await self._end(other)
        await lane.placed

    async def _watch(self) -> None:
        """Take back the lanes of dead actors, and end idle lanes; runs forever."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for lane in list(self._lanes.values()):
                borrower = lane.borrower
                is_free = lane.is_up and borrower is None
                if is_free and time.monotonic() > lane.since + _IDLE_S:
                    await self._end(lane)
                if not borrower or not await asyncio.to_thread(
                    is_dead, borrower
                ):
                    continue
                if lane.borrower == borrower:
                    self._take_back(lane, stop=True)
            for actor in list(self._inside):
                if await asyncio.to_thread(is_dead, actor):
                    self._inside.discard(actor)

    def _serve(self) -> None:
        """Lend free lanes to waiting trials of the same shape, the longest wait first."""
        for wish in list(self._waiting):
            if (lane := self._free(wish)) is not None:
                self._waiting.remove(wish)
                wish.loan.set_result(self._lend(lane, wish))

    def _fail(self, shape: Shape, error: Exception) -> None:
        for wish in list(self._waiting):
            if wish.shape == shape:
                self._waiting.remove(wish)
                wish.loan.set_exception(error)

    def _take_back(self, lane: Lane, stop: bool) -> None:
        lane.borrower = ""
        lane.stopping = stop
        self._do(self._settle(lane))

    async def _settle(self, lane: Lane) -> None:
        """Have each worker end the trial's function; end the lane if one fails to."""
        try:
            calls = [
                actor.settle.remote(_SETTLE_S) for actor, _ in lane.workers
            ]
            await asyncio.wait_for(asyncio.gather(*calls), 2 * _SETTLE_S)
        except Exception as error:
            # If the lane is not listed, all lanes were ended in the meantime.
            if lane.number in self._lanes:
                why = (
                    f"a worker died or did not answer: {type(error).__name__}"
                )
                logger.warning("lane %d starts again: %s", lane.number, why)
                self._restarts.append(why)
                await self._end(lane)
        if lane.number in self._lanes:
            lane.borrower = None
            lane.since = time.monotonic()
        self._serve()
        self._start_wanted()

    async def _end(self, lane: Lane) -> None:
        if self._lanes.pop(lane.number, None) is None:
            return
        for future in lane.answers.values():
            future.cancel()
        for actor in lane.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        # A group that is removed while Ray creates it would keep its CPUs
        # reserved for as long as the node lives (ray issue 64693).
        await asyncio.wait([lane.placed], timeout=_MAKE_S)
        remove_placement_group(lane.group)
