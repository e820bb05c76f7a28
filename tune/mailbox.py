"""The mailbox between trials and lanes: an actor that hands trials out, and what they report back (Ray)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

MAX_LOSSES = 2
"""A trial whose lane died under it so often is not started again."""


@dataclass(frozen=True)
class Assignment:
    """A trial as a lane gets it."""

    ticket: str
    """Names this submission: Tune may start two actors for one trial, and drop one of them."""
    trial: str
    """The trial's id."""
    tree: dict[str, Any]
    """Its whole TrainConfig."""


@dataclass(frozen=True)
class Event:
    """What a trial's Tune actor hears: a report while it runs, or (when `outcome` is set) its end."""

    metrics: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] | None = None


@dataclass
class _Trial:
    assignment: Assignment
    events: list[Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    losses: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].outcome is not None

    def tell(self, event: Event) -> None:
        if not self.ended:
            self.events.append(event)
            self.changed.set()
            self.changed = asyncio.Event()


class Mailbox:
    """One for each sweep; every call is short or waits without holding a thread."""

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}
        self._queue: deque[str] = deque()
        self._arrived = asyncio.Condition()
        self._running: dict[int, str] = {}
        self._closed = False
        self._broken: str | None = None

    async def submit(self, assignment: Assignment) -> None:
        """Queue a trial."""
        trial = self._trials[assignment.ticket] = _Trial(assignment)
        if self._broken is not None:
            trial.tell(Event(outcome={"status": "error", "message": self._broken}))
            return
        await self._enqueue(assignment.ticket)

    async def _enqueue(self, ticket: str, first: bool = False) -> None:
        async with self._arrived:
            if first:
                self._queue.appendleft(ticket)
            else:
                self._queue.append(ticket)
            self._arrived.notify_all()

    async def hello(self, lane: int) -> None:
        """A lane's worker group has started; a trial that it was running before was lost with the old group."""
        lost = self._running.pop(lane, None)
        if lost is None or self._trials[lost].ended:
            return
        trial = self._trials[lost]
        trial.losses += 1
        if trial.losses >= MAX_LOSSES:
            message = f"its worker group died {trial.losses} times under it"
            trial.tell(Event(outcome={"status": "node_lost", "message": message, "lane": lane}))
        else:
            logger.warning("lane %d died under trial %s: starting the trial again", lane, trial.assignment.trial)
            await self._enqueue(lost, first=True)

    async def take(self, lane: int, wait_s: float) -> Assignment | str | None:
        """The next trial for a lane; "close" when there will be none; None when `wait_s` passed without one."""
        async with self._arrived:
            while True:
                if self._closed:
                    return "close"
                while self._queue:
                    ticket = self._queue.popleft()
                    trial = self._trials[ticket]
                    if not trial.cancelled:
                        self._running[lane] = ticket
                        return trial.assignment
                try:
                    await asyncio.wait_for(self._arrived.wait(), wait_s)
                except TimeoutError:
                    return None

    async def report(self, ticket: str, metrics: dict[str, Any]) -> bool:
        """A running trial's evaluation; whether the trial should go on. One that is started again repeats itself."""
        trial = self._trials[ticket]
        if not trial.events or metrics["step"] > trial.events[-1].metrics.get("step", -1):
            trial.tell(Event(metrics))
        return not (trial.cancelled or self._closed)

    async def end(self, lane: int, ticket: str, outcome: dict[str, Any]) -> None:
        """A trial has ended on its lane."""
        if self._running.get(lane) == ticket:
            del self._running[lane]
        self._trials[ticket].tell(Event(outcome={"lane": lane, **outcome}))

    async def next_event(self, ticket: str, index: int) -> Event:
        """Event number `index` of a submission; waits for it."""
        state = self._trials[ticket]
        while len(state.events) <= index:
            await state.changed.wait()
        return state.events[index]

    async def cancel(self, ticket: str) -> None:
        """Nobody waits for this submission any more: it stops at its next report, or never starts."""
        state = self._trials.get(ticket)
        if state is not None:
            state.cancelled = True

    async def close(self, broken: str | None = None) -> None:
        """Send the lanes home; with `broken`, end every trial with that message."""
        if broken is not None:
            self._broken = broken
            for trial in self._trials.values():
                trial.tell(Event(outcome={"status": "error", "message": broken}))
        async with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    async def reports(self, trial: str) -> list[dict[str, Any]]:
        """The evaluations of a trial so far, of the submission that got furthest; none when it never started."""
        submissions = [state for state in self._trials.values() if state.assignment.trial == trial]
        rows = [[event.metrics for event in state.events if event.outcome is None] for state in submissions]
        return max(rows, key=len, default=[])

    async def state(self) -> dict[str, Any]:
        """For tests and the terminal: what waits and what runs."""
        return {"queued": list(self._queue), "running": dict(self._running)}
