"""A lane: a placement group and the workers in it, and who has them (Ray)."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tune.ray.controller import LaneWorker, worker_options
from tune.ray.shape import Shape

if TYPE_CHECKING:
    from tune.ray_internals import ActorMetadata


@dataclass(frozen=True)
class Loan:
    """A lane as a trial gets it."""

    lane: int
    group: PlacementGroup
    workers: list[tuple[Any, "ActorMetadata"]]
    """The handle of each worker's actor, and where it is."""


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
    """Done once the group has its place."""
    actors: list[Any]
    """The handle of each worker's actor; empty until it is started."""
    workers: list[tuple[Any, "ActorMetadata"]] = field(default_factory=list)
    barrier: Any = None
    """What its ranks meet at, one for each trial."""
    asked: int = 0
    questions: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """What workers ask the controller of their trial, and it has not heard."""
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    is_up: bool = False
    borrower: str | None = None
    """The actor that has it; empty while it settles; None: it is free, or not up yet.
    """
    stopping: bool = False
    since: float = 0.0
    """When it began to start, or was free last."""


def reserve(shape: Shape) -> PlacementGroup:
    """Ask Ray for the room of a lane."""
    bundles = [dict(shape.resources)] * shape.num_workers
    labels = [dict(one) for one in shape.labels] or None
    group: PlacementGroup = placement_group(
        bundles, strategy=shape.strategy, bundle_label_selector=labels
    )
    return group


def start_workers(
    shape: Shape, group: PlacementGroup, zygote: str, shown: str
) -> list[Any]:
    """Start the workers of a lane, each once the group has its place.

    Args:
        shape: How many workers there are, and what each of them needs.
        group: The room that Ray was asked for.
        zygote: The name of the process on each node that trials are forks of.
        shown: What Ray shows for the lane.

    Returns:
        The handles of their actors.
    """
    make: Any = ray.remote(**worker_options(shape.resources, shape.runtime_env))(
        LaneWorker
    )
    places = [
        PlacementGroupSchedulingStrategy(group, index)
        for index in range(shape.num_workers)
    ]
    return [
        make.options(scheduling_strategy=place).remote(zygote, f"{shown}, worker")
        for place in places
    ]


def most_lanes(shape: Shape, resources: dict[str, float]) -> int:
    """How many lanes of a shape the resources of a cluster hold at most."""
    fits = [
        resources.get(name, 0.0) / (each * shape.num_workers)
        for name, each in shape.resources
        if each
    ]
    return max(1, math.floor(min(fits, default=1.0)))
