"""Which trial starts next: what waits, which lanes are up, and what fits on them."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection

from trainers.config.function import build_run
from trainers.errors import StorageError
from trainers.storage import Storage
from tune.lanes.messages import Submission
from tune.trials.journal import read_boundary, write_boundary
from tune.trials.microbatch_bounds import Boundary
from tune.trials.record import BY_HAND
from tune.trials.steering import Steering

Bounds = tuple[int | None, int | None]
"""The largest microbatch that fitted, and the smallest that did not."""


class Microbatches:
    """What the trials of a sweep have found to fit; kept in its directory.

    `device` is the model of the lane's devices, empty where that is not known yet.
    """

    def __init__(self, sweep: Storage | None) -> None:
        """`sweep` None: nothing is kept."""
        self._sweep = sweep
        self._boundary = Boundary()
        if sweep is not None:
            self._boundary = read_boundary(sweep)
        self._writing = asyncio.Lock()

    def bounds(self, trial: Submission, device: str) -> Bounds:
        """What is known of trials like one."""
        key = trial.key(device)
        largest = self._boundary.largest_fit(key)
        return largest, self._boundary.smallest_misfit(key)

    def why_not(self, trial: Submission, device: str) -> str | None:
        """Why a trial cannot fit on a device; None when it may."""
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
    ) -> tuple[bool, str | None]:
        """Note whether a microbatch fits.

        Returns whether that is news, and what it contradicts, in words.
        """
        key = trial.key(device)
        is_news = self._boundary.fits(key, size) is not fits
        contradiction = self._boundary.observe(key, size, fits)
        if contradiction is not None:
            contradiction = f"{_label(trial, device)}: {contradiction}"
        return is_news, contradiction

    async def keep(self) -> str | None:
        """Write what is known; returns, in words, why it could not be."""
        if self._sweep is None:
            return None
        async with self._writing:
            try:
                await asyncio.to_thread(write_boundary, self._sweep, self._boundary)
            except StorageError as error:
                return f"what is known of microbatches could not be kept: {error}"
        return None


def _label(trial: Submission, device: str) -> str:
    """A key of the boundary in words."""
    config = build_run(trial.assignment.tree, "trial")
    return f"{config.precision or trial.function} on {device}"


class Roll:
    """The lanes: which are up on which device, and which are down."""

    def __init__(self) -> None:
        self._coming: dict[int, dict[int, str]] = defaultdict(dict)
        """By lane and rank, the models of device of the workers that have started."""
        self.up: dict[int, str] = {}
        """The models of device of the lanes that are up."""
        self._known: dict[int, str] = {}
        """Of those that are down, too, for as long as they come back."""
        self._leaving: set[int] = set()
        self.groups: Counter[int] = Counter()
        """How many worker groups of each lane have come or gone."""

    @property
    def devices(self) -> list[str]:
        """The models of device of all lanes that are up or come back."""
        return sorted(set(self._known.values()))

    def device(self, lane: int) -> str | None:
        """Return a lane's model of device; None where the lane does not come back."""
        return self._known.get(lane)

    def may_take(self, lane: int) -> bool:
        """Whether the node of a lane stays."""
        return lane not in self._leaving

    def has_started(self, lane: int, device: str, rank: int, num_ranks: int) -> bool:
        """Note that a worker has started; returns whether all of its lane have."""
        devices = self._coming[lane]
        devices[rank] = device
        return len(devices) == num_ranks

    def comes(self, lane: int) -> None:
        """Note that a lane is up, whose workers have all started."""
        self.groups[lane] += 1
        devices = set(self._coming.pop(lane).values())
        self._known[lane] = " and ".join(sorted(devices))
        self.up[lane] = self._known[lane]
        self._leaving.discard(lane)

    def goes(self, lane: int) -> None:
        """Note that a lane is down."""
        self.groups[lane] += 1
        self.up.pop(lane, None)

    def leaves(self, lane: int) -> None:
        """Note that the node of a lane is about to be taken away."""
        self._leaving.add(lane)
        self.goes(lane)

    def ends(self, lane: int) -> None:
        """Note that a lane does not come back."""
        self._known.pop(lane, None)


class Queue:
    """The trials that wait, in the order in which they start."""

    def __init__(self, lanes: Roll, microbatches: Microbatches) -> None:
        self._lanes = lanes
        self._microbatches = microbatches
        self._waiting: list[Submission] = []
        self.steering = Steering()

    def add(self, trial: Submission, first: bool = False) -> None:
        """Queue a trial, `first` before the others, unless it cannot start."""
        if self._is_over(trial):
            return
        if first:
            self._waiting.insert(0, trial)
        else:
            self._waiting.append(trial)
        self._sort()

    def steer(self, steering: Steering) -> None:
        """Do what a user wants: what all actions so far come to."""
        self.steering = steering
        self.drop_ended()
        self._sort()

    def drop_ended(self) -> None:
        """Drop trials that are over, or cannot start as is known by now."""
        self._waiting = [trial for trial in self._waiting if not self._is_over(trial)]

    def _sort(self) -> None:
        """Put what a user wants first before the rest."""
        first = self.steering.first

        def place(trial: Submission) -> int:
            name = trial.assignment.trial
            return first.index(name) if name in first else len(first)

        self._waiting.sort(key=place)

    def next(self, lane: int, running: Collection[str]) -> Submission | None:
        """Take the first trial out of the queue that may run and fit on a lane.

        A lane on another device may still run those that do not fit on this one.

        Args:
            lane: The number of the lane that asks.
            running: Names of the trials that run, on whatever lane.
        """
        # Since they came, lanes may have come back with another device.
        self.drop_ended()
        if self.steering.paused or not self._lanes.may_take(lane):
            return None
        device = self._lanes.up.get(lane, "")
        for trial in self._waiting:
            if trial.assignment.keeps_state and trial.assignment.trial in running:
                continue  # an earlier submission of it, which writes to the same place
            if self._microbatches.why_not(trial, device) is None:
                self._waiting.remove(trial)
                return trial
        return None

    def _is_over(self, trial: Submission) -> bool:
        """Whether a trial has ended, or ends now since it cannot start."""
        if trial.cancelled or trial.ended:
            return True
        if trial.assignment.trial in self.steering.stopped:
            trial.end("stopped", BY_HAND)
            return True
        reasons = []
        for device in self._lanes.devices:
            reasons.append(self._microbatches.why_not(trial, device))
        if not reasons or None in reasons:
            return False
        trial.end("out_of_memory", str(reasons[0]))
        return True
