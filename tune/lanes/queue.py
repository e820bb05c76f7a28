"""Trials in the mailbox: their reports, which trial comes next, and what fits where."""

import asyncio
import functools
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from trainers.config.function import build_run
from trainers.config.model import Tree
from trainers.errors import RunFailedError, Status, StorageError
from trainers.storage import Storage
from tune.forks.assignment import Assignment
from tune.trials.journal import read_boundary, write_boundary
from tune.trials.microbatch_bounds import Boundary, fixed_size, key_of
from tune.trials.record import BY_HAND, Row
from tune.trials.steering import Steering

Bounds = tuple[int | None, int | None]
"""The largest microbatch that fitted, and the smallest that did not."""


@dataclass
class Report:
    """One report of a training function, put together from one part per rank."""

    num_parts: int = 0
    row: Row = field(default_factory=dict)
    """Rank 0's metrics."""
    checkpoint: str | None = None
    """The path of the checkpoint, if any rank has stored one."""
    goes_on: asyncio.Future[bool | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set once all parts have arrived: whether the trial should continue.

    None if a rank has ended the trial before.
    """


def new_ticket(name: str) -> str:
    """Return a unique name for one submission of a trial."""
    return f"{name}/{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class Event:
    """A report of a running trial or, if `outcome` is set, the trial's end."""

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
    """Whether its state is in its refuge, because its node was taken away."""
    started: float = 0.0
    keys: dict[str, str] = field(default_factory=dict)
    """Its boundary keys, by device; cached, because they are slow to compute."""

    @property
    def ended(self) -> bool:
        """Whether the event with its outcome has arrived."""
        return bool(self.events) and self.events[-1].outcome is not None

    @property
    def outcome(self) -> Tree:
        """How the trial ended."""
        return self.events[-1].outcome or {}

    @property
    def newest(self) -> Tree:
        """The trial's newest report."""
        reports = [
            event.metrics for event in self.events if event.outcome is None
        ]
        return reports[-1] if reports else {}

    @property
    def function(self) -> str | None:
        """The training function that the trial runs, or None if it runs a task."""
        return self.assignment.tree.get("train_func")

    @property
    def may_fail(self) -> bool:
        """Whether the trial's training function may fail once more."""
        failure = self.assignment.tree.get("failure", {})
        allowed: int = failure.get("max_failures", 0)
        return allowed == -1 or self.failures < allowed

    def drop_reports(self) -> None:
        """Release the ranks that wait in vain: another rank has ended the trial."""
        for report in self.reports.values():
            if not report.goes_on.done():
                report.goes_on.set_result(None)
        self.reports.clear()

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
        """Return the trial's key in the boundary, for a kind of device."""
        if device not in self.keys:
            own = (
                "cpu"
                if self.assignment.tree.get("device") == "cpu"
                else device
            )
            self.keys[device] = key_of(self.assignment.tree, own)
        return self.keys[device]

    @functools.cached_property
    def smallest(self) -> int:
        """The smallest microbatch with which the trial can train."""
        return fixed_size(self.assignment.tree) or 1


class Microbatches:
    """The microbatch sizes known to fit or not to fit; kept in the sweep's directory.

    The methods' argument `device` is the name of a lane's devices with their
    memory, or empty if not known yet.
    """

    def __init__(self, sweep: Storage | None) -> None:
        """If `sweep` is None, nothing is kept on storage."""
        self._sweep = sweep
        self._boundary = Boundary()
        if sweep is not None:
            self._boundary = read_boundary(sweep)
        self._writing = asyncio.Lock()

    def bounds(self, trial: Submission, device: str) -> Bounds:
        """Return the bounds known for trials that need as much memory as this one."""
        key = trial.key(device)
        largest = self._boundary.largest_fit(key)
        return largest, self._boundary.smallest_misfit(key)

    def why_not(self, trial: Submission, device: str) -> str | None:
        """Return why a trial cannot fit on a device, or None if it may fit."""
        if not device:
            return None
        size = trial.smallest
        key = trial.key(device)
        if self._boundary.fits(key, size) is not False:
            return None
        failed = self._boundary.smallest_misfit(key)
        what = "microbatch" if trial.function is None else "batch"
        why = f"one of {failed} ran out of memory ({_label(trial, device)})"
        return f"a {what} of {size} is not tried: {why}"

    def observe(
        self, trial: Submission, device: str, size: int, fits: bool
    ) -> bool:
        """Record whether a microbatch fits; return whether this is news."""
        key = trial.key(device)
        is_news = self._boundary.fits(key, size) is not fits
        self._boundary.observe(key, size, fits)
        return is_news

    async def keep(self) -> str | None:
        """Store what is known; if that fails, return the reason in words."""
        if self._sweep is None:
            return None
        async with self._writing:
            try:
                await asyncio.to_thread(
                    write_boundary, self._sweep, self._boundary
                )
            except StorageError as error:
                return f"the microbatch sizes that are known to fit could not be stored: {error}"
        return None


def _label(trial: Submission, device: str) -> str:
    """Return words for a trial's key in the boundary."""
    config = build_run(trial.assignment.tree, "trial")
    return f"{config.precision or trial.function} on {device}"


class Roll:
    """The lanes: which are up on which device, and which are down."""

    def __init__(self) -> None:
        self._coming: dict[int, dict[int, str]] = defaultdict(dict)
        """The device of each worker that has started, by lane and rank."""
        self.up: dict[int, str] = {}
        """The devices of the lanes that are up, by lane."""
        self.known: dict[int, str] = {}
        """The devices of all lanes that are up or will come back, by lane."""
        self.leaving: set[int] = set()
        """Lanes whose node is about to be taken away: they take no trials."""
        self.groups: Counter[int] = Counter()
        """How often each lane has come up or gone down, to notice a new worker group."""

    @property
    def devices(self) -> list[str]:
        """The different devices of all lanes that are up or will come back."""
        return sorted(set(self.known.values()))

    def has_started(
        self, lane: int, device: str, rank: int, num_ranks: int
    ) -> bool:
        """Note that a worker has started; return whether all workers of its lane have."""
        devices = self._coming[lane]
        devices[rank] = device
        return len(devices) == num_ranks

    def comes(self, lane: int) -> None:
        """Note that a lane is up, because all of its workers have started."""
        self.groups[lane] += 1
        devices = set(self._coming.pop(lane).values())
        self.known[lane] = " and ".join(sorted(devices))
        self.up[lane] = self.known[lane]
        self.leaving.discard(lane)

    def goes(self, lane: int) -> None:
        """Note that a lane is down."""
        self.groups[lane] += 1
        self.up.pop(lane, None)

    def leaves(self, lane: int) -> None:
        """Note that the node of a lane is about to be taken away."""
        self.leaving.add(lane)
        self.goes(lane)

    def ends(self, lane: int) -> None:
        """Note that a lane will not come back."""
        self.known.pop(lane, None)


class Queue:
    """The trials that wait, in the order in which they start."""

    def __init__(self, lanes: Roll, microbatches: Microbatches) -> None:
        self._lanes = lanes
        self._microbatches = microbatches
        self._waiting: list[Submission] = []
        self.steering = Steering()

    def add(self, trial: Submission, first: bool = False) -> None:
        """Queue a trial unless it cannot start; `first` puts it ahead of all others."""
        if self._is_over(trial):
            return
        if first:
            self._waiting.insert(0, trial)
        else:
            self._waiting.append(trial)
        self._sort()

    def steer(self, steering: Steering) -> None:
        """Apply the combined effect of all user actions so far."""
        self.steering = steering
        self.drop_ended()
        self._sort()

    def drop_ended(self) -> None:
        """Drop trials that are over, or that are now known to fit on no lane."""
        self._waiting = [
            trial for trial in self._waiting if not self._is_over(trial)
        ]

    def _sort(self) -> None:
        """Move the trials that a user wants first to the front, in the user's order."""
        first = self.steering.first

        def place(trial: Submission) -> int:
            name = trial.assignment.trial
            return first.index(name) if name in first else len(first)

        self._waiting.sort(key=place)

    def next(self, lane: int, running: Collection[str]) -> Submission | None:
        """Remove and return the first queued trial that may run and fit on a lane.

        Trials that do not fit on this lane stay queued for lanes with another
        device.

        Args:
            lane: The number of the lane that asks.
            running: Names of the trials that are running, on any lane.
        """
        # Lanes may have come back with another device since the trials were
        # queued.
        self.drop_ended()
        if self.steering.paused or lane in self._lanes.leaving:
            return None
        device = self._lanes.up.get(lane, "")
        for trial in self._waiting:
            if (
                trial.assignment.keeps_state
                and trial.assignment.trial in running
            ):
                continue  # an earlier submission of the trial still runs, and writes to the same place
            if self._microbatches.why_not(trial, device) is None:
                self._waiting.remove(trial)
                return trial
        return None

    def _is_over(self, trial: Submission) -> bool:
        """Return whether a trial is over; end it if it was stopped or cannot fit."""
        if trial.cancelled or trial.ended:
            return True
        if trial.assignment.trial in self.steering.stopped:
            trial.end("stopped", BY_HAND)
            return True
        reasons = [
            self._microbatches.why_not(trial, device)
            for device in self._lanes.devices
        ]
        if not reasons or None in reasons:
            return False
        trial.end("out_of_memory", str(reasons[0]))
        return True
