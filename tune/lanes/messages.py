"""What a trial's Tune actor is told, and what the mailbox keeps about a trial."""

import asyncio
import functools
import uuid
from dataclasses import dataclass, field

from trainers.config.model import Tree
from trainers.errors import RunFailedError, Status
from tune.forks.assignment import Assignment
from tune.trials.microbatch_bounds import fixed_size, key_of
from tune.trials.record import Row


@dataclass
class Report:
    """One report of a training function, put together from a part of each rank."""

    num_parts: int = 0
    row: Row = field(default_factory=dict)
    """Rank 0's metrics."""
    checkpoint: str | None = None
    """The path of the checkpoint, if any rank has stored one."""
    goes_on: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set once all parts have arrived: whether the trial should go on."""


def new_ticket(name: str) -> str:
    """Return a unique name for one submission of a trial."""
    return f"{name}/{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Event:
    """A report of a running trial or, where `outcome` is set, its end."""

    metrics: Tree = field(default_factory=dict)
    outcome: Tree | None = None

    @property
    def row(self) -> Row:
        """The report as a row of the trial's curve."""
        return {name: float(value) for name, value in self.metrics.items()}


@dataclass(eq=False)
class Submission:
    """A trial in the mailbox, until its Tune actor has recorded its end."""

    assignment: Assignment
    events: list[Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    orphaned: bool = False
    """Whether its Tune actor has died or is still starting."""
    told: bool = False
    """Whether its Tune actor has been told of its end."""
    losses: int = 0
    hangs: list[tuple[RunFailedError, str]] = field(default_factory=list)
    """The hang that each rank has reported, with that rank's stack."""
    failures: int = 0
    """How often its training function has failed."""
    reports: dict[tuple[int, int], Report] = field(default_factory=dict)
    """Incomplete reports, on which ranks wait, by attempt and report number."""
    is_kept: bool = False
    """Whether its state lies in its refuge, because its node was taken away."""
    started: float = 0.0
    keys: dict[str, str] = field(default_factory=dict)
    """Its boundary keys by device model, cached: slow to compute, and needed often."""

    @property
    def ended(self) -> bool:
        """Whether the event with its outcome has arrived."""
        return bool(self.events) and self.events[-1].outcome is not None

    @property
    def outcome(self) -> Tree:
        """How it ended."""
        return self.events[-1].outcome or {}

    @property
    def newest(self) -> Tree:
        """Its newest report."""
        reports = [event.metrics for event in self.events if event.outcome is None]
        return reports[-1] if reports else {}

    @property
    def function(self) -> str | None:
        """The training function that it runs, or None if it runs a task."""
        return self.assignment.tree.get("train_func")

    @property
    def may_fail(self) -> bool:
        """Whether its training function may fail once more."""
        failure = self.assignment.tree.get("failure", {})
        allowed: int = failure.get("max_failures", 0)
        return allowed == -1 or self.failures < allowed

    def tell(self, event: Event) -> None:
        """Append an event, and wake its waiters; ignored once the trial has ended."""
        if not self.ended:
            self.events.append(event)
            self.changed.set()
            self.changed = asyncio.Event()

    def end(self, status: Status, message: str) -> None:
        """End the trial, without a result, with this status and message."""
        self.tell(Event(outcome={"status": status, "message": message}))

    def key(self, device: str) -> str:
        """Return its key in the boundary for a device model."""
        if device not in self.keys:
            own = "cpu" if self.assignment.tree.get("device") == "cpu" else device
            self.keys[device] = key_of(self.assignment.tree, own)
        return self.keys[device]

    @functools.cached_property
    def smallest(self) -> int:
        """The smallest microbatch with which it can train."""
        return fixed_size(self.assignment.tree) or 1
