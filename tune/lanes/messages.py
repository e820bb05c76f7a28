"""A trial on its way from its Tune actor to a lane, and what comes back."""

from __future__ import annotations

import asyncio
import functools
import uuid
from dataclasses import dataclass, field
from typing import Any

from trainers.errors import RunFailedError
from trainers.storage import Storage
from tune.objective import Target
from tune.trials.microbatch_bounds import fixed_size, key_of


@dataclass(frozen=True)
class Begun:
    """The newest report of a training function with a checkpoint."""

    number: int
    """How many reports there were up to it."""
    checkpoint: str
    """Its path on the sweep's storage."""
    train_time_s: float


@dataclass
class Report:
    """A training function's report, of which each rank brings its part."""

    num_parts: int = 0
    row: dict[str, float] = field(default_factory=dict)
    """Rank 0's metrics."""
    checkpoint: str | None = None
    """The path of what any of them has stored."""
    goes_on: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done once all have come."""


@dataclass(frozen=True)
class Assignment:
    """A trial as a lane gets it."""

    ticket: str
    """Names this submission: Tune may start two actors for one trial, and drop one of
    them.
    """
    trial: str
    tree: dict[str, Any]
    """Its whole configuration: a TrainConfig, or a FunctionConfig."""
    microbatch_ceiling: int | None = None
    """The largest microbatch that may still fit, where one is known not to."""
    microbatch_bounds: tuple[int | None, int | None] = (None, None)
    """The largest microbatch that fitted in other trials like it, and the smallest that
    did not.
    """
    target: Target | None = None
    """What ends it before its last step; None where nothing does."""
    watches: tuple[str, ...] = ()
    """Metrics that the sweep decides by."""
    storage: Storage | None = None
    """Directory of what a training function stores; None: it stores nothing."""
    source: str | None = None
    """Where it has kept its state when its node was taken away, and goes on from; None:
    it begins at its start.
    """
    refuge: Storage | None = None
    """Where it keeps its state when its node is taken away, if it keeps nothing else.
    """
    sweep: str = ""
    """The sweep's name."""
    path: tuple[str, ...] = ()
    """Directories of the task's module."""
    attempt: int = 0
    """How often it was started before."""
    begun: Begun | None = None
    """Where a training function goes on that was started before."""

    @property
    def keeps_state(self) -> bool:
        """Whether its checkpoints are kept: where its configuration says when to write
        them.
        """
        chosen = self.tree.get("checkpoint", {})
        return any(value and key.startswith("every_") for key, value in chosen.items())


def new_ticket(name: str) -> str:
    """A name for one submission of a trial."""
    return f"{name}/{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Event:
    """What a trial's Tune actor is told: a report while it runs, or (when `outcome` is
    set) its end.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] | None = None

    @property
    def row(self) -> dict[str, float]:
        """The report as a row of the trial's curve."""
        return {name: float(value) for name, value in self.metrics.items()}


@dataclass
class Submission:
    """A trial in the mailbox, until its Tune actor has recorded its end."""

    assignment: Assignment
    events: list[Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    orphaned: bool = False
    """Whether its Tune actor has died, or still starts."""
    told: bool = False
    """Whether its Tune actor has been told of its end."""
    losses: int = 0
    hangs: list[tuple[RunFailedError, str]] = field(default_factory=list)
    """What its ranks have said of a hang, each with its stack."""
    failures: int = 0
    """How often its training function has failed."""
    reports: dict[tuple[int, int], Report] = field(default_factory=dict)
    """Those of its training function that ranks wait for, by attempt and number."""
    restarting: bool = False
    is_kept: bool = False
    """Whether its state lies in its refuge, because its node was taken away."""
    started: float = 0.0
    keys: dict[str, str] = field(default_factory=dict)
    """Its keys in the boundary by model of device: slow to make, and asked for often.
    """

    @property
    def ended(self) -> bool:
        """Whether its last event is there."""
        return bool(self.events) and self.events[-1].outcome is not None

    @property
    def outcome(self) -> dict[str, Any]:
        """How it ended."""
        return self.events[-1].outcome or {}

    @property
    def function(self) -> str | None:
        """The training function that it runs; None: a task."""
        return self.assignment.tree.get("train_func")

    def tell(self, event: Event) -> None:
        """Append an event and wake who waits for it; nothing follows the end."""
        if not self.ended:
            self.events.append(event)
            self.changed.set()
            self.changed = asyncio.Event()

    def key(self, device: str) -> str:
        """Its key in the boundary on a model of device."""
        if device not in self.keys:
            own = "cpu" if self.assignment.tree.get("device") == "cpu" else device
            self.keys[device] = key_of(self.assignment.tree, own)
        return self.keys[device]

    @functools.cached_property
    def smallest(self) -> int:
        """The smallest microbatch with which it can train."""
        return fixed_size(self.assignment.tree) or 1
