"""The mailbox between trials and lanes: an actor that hands out trials, and keeps what
they report (Ray).

It owns what the sweep knows of which microbatches fit: running trials tell it, each
trial that starts is told, and one that is known not to fit never starts. The driver
learns from it how far the start of each lane is.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any, Literal

from trainers.errors import ConfigError, RunFailedError, StorageError
from trainers.loop.watchdog import GRACE_S
from trainers.on_ray.vital_signs import show_life
from trainers.step.ceiling import next_smaller
from trainers.storage import Storage
from tune.lanes.messages import Assignment, Begun, Event, Report, Submission
from tune.lanes.microbatches import Microbatches
from tune.objective import check_reported
from tune.trials.record import BY_HAND
from tune.trials.steering import Steering

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
MAX_LOSSES = 3
"""A trial whose lane has died under it this often is not started again: two deaths may
befall one trial by chance.
"""


class Mailbox:
    """One for each sweep; every call is short or waits without holding a thread."""

    hold_s = 60.0

    def __init__(
        self, sweep: Storage | None = None, path: tuple[str, ...] = ()
    ) -> None:
        """`sweep` is the directory that keeps the boundary; None: nothing is kept.

        `path`: the directories of the task's module.
        """
        show_life()
        self._arrived = asyncio.Condition()
        self._lanes = Roll()
        self._closed = False
        self._sweep = sweep
        self._path = path
        self._microbatches = Microbatches(sweep)
        self._trials: dict[str, Submission] = {}
        self._queue: deque[str] = deque()
        self._running: dict[int, str] = {}
        self._expected = 0
        self._steering = Steering()
        self._notes: list[str] = []
        self._broken: str | None = None
        self._reported: set[str] = set()
        """Names of all that any trial has reported."""
        self._refusal: ConfigError | None = None
        """Why the sweep ends: what it decides by is a name of nothing."""

    def __repr__(self) -> str:
        return f"{self._sweep.name}, mailbox" if self._sweep else "mailbox"

    async def note_start(self, lane: int, fact: str, value: Any = True) -> None:
        """Note a fact of a lane's start: its "controller", or the "reservation" of its
        workers.
        """
        self._lanes.starts[fact][lane] = value

    async def starts(self, fact: str) -> dict[int, Any]:
        """One fact of every lane that has got so far, by lane; the controller or the
        reservation may be gone.
        """
        return self._lanes.starts[fact]

    async def submit(self, assignment: Assignment) -> str:
        """Queue a trial, or go on with what was submitted for it by an actor that died,
        or ahead; returns the ticket of either.
        """
        if (adopted := self._adopted(assignment.ticket.rpartition("/")[0])) is not None:
            return adopted
        return await self._submit(Submission(assignment))

    async def submit_ahead(self, assignment: Assignment) -> None:
        """Queue a trial whose Tune actor still starts, and will go on with it, unless
        that has submitted it already.
        """
        if all(
            state.assignment.trial != assignment.trial
            for state in self._trials.values()
        ):
            await self._submit(Submission(assignment, orphaned=True))

    async def _submit(self, trial: Submission) -> str:
        assignment = trial.assignment
        self._trials[assignment.ticket] = trial
        await self._drop_checkpoints(trial)  # of a start that was cut off
        if self._broken is not None:
            trial.tell(Event(outcome={"status": "error", "message": self._broken}))
        elif not (self._stopped(trial) or self._refused(trial)):
            await self._enqueue(assignment.ticket)
        return assignment.ticket

    async def steer(self, steering: Steering) -> None:
        """Do what a user wants: what all actions so far come to."""
        self._steering = steering
        waiting = [self._trials[ticket] for ticket in self._queue]
        self._queue = deque(
            trial.assignment.ticket for trial in waiting if not self._stopped(trial)
        )
        self._sort()
        async with self._arrived:
            self._arrived.notify_all()

    def _stopped(self, trial: Submission) -> bool:
        """End a trial that a user has stopped, and that runs on no lane; returns
        whether it is one.
        """
        if trial.assignment.trial not in self._steering.stopped:
            return False
        trial.tell(Event(outcome={"status": "stopped", "message": BY_HAND}))
        return True

    def _sort(self) -> None:
        """Put what a user wants first before the rest of the queue."""
        first = self._steering.first

        def place(ticket: str) -> int:
            trial = self._trials[ticket].assignment.trial
            return first.index(trial) if trial in first else len(first)

        self._queue = deque(sorted(self._queue, key=place))

    async def _enqueue(self, ticket: str, first: bool = False) -> None:
        async with self._arrived:
            self._queue.insert(0 if first else len(self._queue), ticket)
            self._sort()
            self._arrived.notify_all()

    async def hello(
        self, lane: int, device: str = "", rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Note that a worker of a lane has started on a model of device ("NVIDIA A10G,
        22.5 GiB"), and once all of them have, that the lane is up; a trial that it ran
        before was lost with the old group.
        """
        devices = self._lanes.coming[lane]
        devices[rank] = device
        if len(devices) == num_ranks:
            del self._lanes.coming[lane]
            self._lanes.up.pop(lane, None)
            await self.lost(lane)
            self._lanes.comes(lane, " and ".join(sorted(set(devices.values()))))

    async def lost(self, lane: int, cause: RunFailedError | None = None) -> None:
        """Note that a lane's worker group is gone, of what is known, and queue its
        trial again, before the others.
        """
        self._lanes.goes(lane, cause.message if cause else "its workers died")
        trial = self._trials.get(self._running.pop(lane, ""))
        if trial is None or trial.ended:
            return
        why = f": {cause.message}" if cause is not None else ""
        status = (
            "node_lost" if cause is None or cause.status == "error" else cause.status
        )
        await self._start_again(trial, lane, f"its worker group died{why}", status)

    async def again(self, lane: int, ticket: str, why: str) -> None:
        """Queue a trial again, before the others, whose process somebody has killed, or
        has run out of memory.
        """
        trial = self._trials.get(ticket)
        if trial is not None and self._running.get(lane) == ticket and not trial.ended:
            del self._running[lane]
            await self._start_again(trial, lane, why, "error")

    async def _start_again(
        self, trial: Submission, lane: int, why: str, status: str
    ) -> None:
        """Queue a trial again, unless it was lost too often: then it ends with a
        status.
        """
        if not trial.restarting:
            trial.losses += 1
            if trial.losses >= MAX_LOSSES or status == "hung":
                times = f", {trial.losses} times" if trial.losses > 1 else ""
                trial.tell(
                    Event(
                        outcome={
                            "status": status,
                            "message": f"{why}{times}",
                            "lane": lane,
                        }
                    )
                )
                await self._drop_checkpoints(trial)
                return
            self.say(
                f"lane {lane}, trial {trial.assignment.trial}: {why}, and it starts again"
            )
        trial.restarting = False
        await self._enqueue(trial.assignment.ticket, first=True)

    async def runs(self, lane: int, ticket: str) -> bool:
        """Whether a lane still is to run a trial; not where it has ended on another of
        its ranks.
        """
        trial = self._trials.get(ticket)
        return (
            trial is not None
            and self._running.get(lane) == ticket
            and not (trial.ended or trial.restarting)
        )

    async def hand_back(self, lane: int, ticket: str, why: str) -> None:
        """Queue a trial again, before the others, which has kept its state because its
        lane's node is taken away.
        """
        trial = self._trials[ticket]
        await self.leave(lane)
        if (
            self._running.get(lane) != ticket
        ):  # the lane was lost in the meantime, and the trial is queued already
            return
        del self._running[lane]
        if trial.assignment.refuge is not None:
            trial.is_kept = True
            trial.assignment = replace(
                trial.assignment, source=trial.assignment.refuge.uri
            )
        if trial.ended or trial.cancelled:
            await self._drop_checkpoints(trial)
            return
        self.say(
            f"lane {lane}, trial {trial.assignment.trial}: {why}, and it goes on from there"
        )
        await self._enqueue(ticket, first=True)

    async def leave(self, lane: int) -> None:
        """Note that the node of a lane is about to be taken away: it takes no trial any
        more.
        """
        self._lanes.goes(lane, "its node is taken away")

    async def await_close(self, wait_s: float) -> bool:
        """Wait until no lane is needed any more, at most so long; returns whether that
        is so.
        """
        async with self._arrived:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._arrived.wait_for(lambda: self._closed), wait_s
                )
        return self._closed

    async def take(
        self, lane: int, wait_s: float
    ) -> Assignment | Literal["close"] | None:
        """The next trial for a lane; "close" when there will be none; None when
        `wait_s` passed without one.
        """
        deadline = time.monotonic() + wait_s
        async with self._arrived:
            while True:
                if self._closed:
                    self._lanes.ends(lane)
                    return "close"
                trial = self._next(lane)
                if trial is not None:
                    ticket = trial.assignment.ticket
                    self._trials[ticket], self._running[lane], trial.started = (
                        trial,
                        ticket,
                        time.time(),
                    )
                    attempt = trial.losses + trial.failures
                    name = "" if self._sweep is None else self._sweep.name
                    trial.assignment = replace(
                        trial.assignment, attempt=attempt, sweep=name, path=self._path
                    )
                    if trial.function is not None and self._sweep is not None:
                        own = self._sweep.child("lanes", trial.assignment.trial)
                        trial.assignment = replace(trial.assignment, storage=own)
                    elif self._sweep is not None and trial.assignment.keeps_state:
                        refuge = self._sweep.child("states", trial.assignment.trial)
                        trial.assignment = replace(trial.assignment, refuge=refuge)
                    elif self._sweep is not None:
                        # Of this submission alone: a driver that was killed may have
                        # left another's.
                        refuge = self._sweep.child("lanes", ticket.replace("/", "-"))
                        trial.assignment = replace(trial.assignment, refuge=refuge)
                    self._arrived.notify_all()
                    return trial.assignment
                try:
                    await asyncio.wait_for(
                        self._arrived.wait(), deadline - time.monotonic()
                    )
                except TimeoutError:
                    return None

    def _next(self, lane: int) -> Submission | None:
        """The first trial in the queue that may run and fit on a lane, with what is
        known of its microbatches.
        """
        device = self._lanes.up.get(lane, "")
        queued = [self._trials[ticket] for ticket in self._queue]
        # Since they came, lanes may have come back with another device.
        over = [
            one.cancelled or one.ended or self._stopped(one) or self._refused(one)
            for one in queued
        ]
        live = [
            one.assignment.ticket
            for one, is_over in zip(queued, over, strict=True)
            if not is_over
        ]
        self._queue = deque(live)
        if self._steering.paused:
            return None
        held = {
            self._trials[ticket].assignment.trial for ticket in self._running.values()
        }
        # A lane on another device may still run those that do not fit on this one.
        for ticket in live:
            trial = self._trials[ticket]
            if trial.assignment.keeps_state and trial.assignment.trial in held:
                continue  # an earlier submission of it, which writes to the same place
            if self._microbatches.why_not(trial, device) is None:
                self._queue.remove(ticket)
                if device:
                    bounds = self._microbatches.bounds(trial, device)
                    trial.assignment = replace(
                        trial.assignment, microbatch_bounds=bounds
                    )
                return trial
        return None

    def _refused(self, trial: Submission) -> bool:
        """End a trial that is known to fit on none of the lanes' devices; returns
        whether it is one.
        """
        reasons = [
            self._microbatches.why_not(trial, device) for device in self._lanes.devices
        ]
        if not reasons or None in reasons:
            return False
        trial.tell(
            Event(outcome={"status": "out_of_memory", "message": str(reasons[0])})
        )
        return True

    async def observe(self, lane: int, ticket: str, size: int, fits: bool) -> None:
        """Keep whether a microbatch fits, as a running trial has found out; returns
        when that is durable.
        """
        device = self._lanes.device(lane)
        trial = self._trials.get(ticket)
        if not device or trial is None:
            return
        is_news, contradiction = self._microbatches.observe(trial, device, size, fits)
        if contradiction is not None:
            self.say(contradiction)
        if is_news:
            self._queue = deque(
                waiting
                for waiting in self._queue
                if not self._refused(self._trials[waiting])
            )
            if (words := await self._microbatches.keep()) is not None:
                self.say(words)

    async def report(self, ticket: str, metrics: dict[str, Any]) -> bool:
        """Keep an evaluation of a running trial, but not twice where the trial was
        started again; returns whether the trial should go on.
        """
        trial = self._trials[ticket]
        if not trial.events or metrics["step"] > trial.events[-1].metrics.get(
            "step", -1
        ):
            trial.tell(Event(metrics))
        self._reported.update(metrics)
        return not self._is_unwanted(trial)

    def _is_unwanted(self, trial: Submission) -> bool:
        """Whether a trial should stop at its report."""
        return (
            trial.cancelled
            or self._closed
            or trial.assignment.trial in self._steering.stopped
        )

    async def report_part(
        self,
        ticket: str,
        attempt: int,
        number: int,
        num_ranks: int,
        row: dict[str, float],
        checkpoint: str | None,
    ) -> bool:
        """Keep a training function's report number `number`, once all of its ranks have
        brought their part; returns whether the trial should go on, the same to all.

        `row` is empty but for rank 0; `checkpoint` is the path of what a rank has
        stored, from which the trial goes on where it is started again.
        """
        trial = self._trials[ticket]
        report = trial.reports.setdefault((attempt, number), Report())
        report.num_parts += 1
        report.row = row or report.row
        report.checkpoint = checkpoint or report.checkpoint
        # A rank of an earlier attempt, whose process is about to be ended, waits for
        # others in vain.
        if report.num_parts == num_ranks and attempt == trial.assignment.attempt:
            if number > len(
                trial.events
            ):  # else it was heard before the trial was started again
                trial.tell(Event(report.row))
            self._reported.update(report.row)
            if report.checkpoint is not None:
                begun = Begun(number, report.checkpoint, report.row["train_time_s"])
                trial.assignment = replace(trial.assignment, begun=begun)
            del trial.reports[attempt, number]
            target = trial.assignment.target
            is_met = target is not None and target.is_met(report.row)
            ends = self._is_unwanted(trial) or is_met
            report.goes_on.set_result(not ends)
        return await report.goes_on

    async def too_large(self, ticket: str, microbatch_size: int) -> None:
        """Have a trial of which a rank ran out of memory start again with a smaller
        microbatch, by `again`.

        Until then the other ranks' errors about broken collectives do not end the
        trial.
        """
        trial = self._trials[ticket]
        trial.assignment = replace(
            trial.assignment, microbatch_ceiling=next_smaller(microbatch_size)
        )
        trial.restarting = True

    async def hung(
        self,
        lane: int,
        ticket: str,
        failure: RunFailedError,
        stack: str,
        num_ranks: int,
    ) -> None:
        """Note that a rank of a trial hangs, and end the trial once each of its ranks
        has said where it is; they have `GRACE_S` to do so, then the first of them
        exits.
        """
        hangs = self._trials[ticket].hangs
        hangs.append((failure, stack))
        if len(hangs) == 1:
            deadline = time.monotonic() + GRACE_S
            while len(hangs) < num_ranks and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S)
            cause = RunFailedError.first([hang for hang, _ in hangs])
            stacks = "\n".join(f"{hang.message}\n{stack}" for hang, stack in hangs)
            await self.end(
                lane,
                ticket,
                {"status": "hung", "message": cause.message, "traceback": stacks},
            )

    async def end(self, lane: int, ticket: str, outcome: dict[str, Any]) -> None:
        """Note that a trial has ended on its lane; another of its ranks may have said
        so, and its end be recorded.
        """
        trial = self._trials.get(ticket)
        if trial is None or trial.restarting:
            return
        misnamed = outcome.pop("misnamed", None)
        if trial.function is not None and outcome["status"] == "done":
            try:
                check_reported(trial.assignment.watches, self._reported)
            except ConfigError as error:
                misnamed = error
        if misnamed is not None and misnamed.value not in self._reported:
            self._refusal = (
                misnamed  # the driver ends the sweep: this trial has no result
            )
            return
        runs = self._running.get(lane) == ticket
        if runs:
            del self._running[lane]
        elif trial.function is not None:
            # another rank has said it before, or the lane was lost: the trial may be
            # about to start again
            return
        allowed = trial.assignment.tree.get("failure", {}).get(
            "max_failures", 0
        )  # of a training function
        may_fail = allowed == -1 or trial.failures < allowed
        if runs and outcome["status"] == "error" and may_fail:
            trial.failures += 1
            self.say(
                f"trial {trial.assignment.trial} has failed, and starts again: {outcome['message']}"
            )
            await self._enqueue(ticket, first=True)
            return
        if (
            outcome["status"] == "stopped"
            and trial.assignment.trial in self._steering.stopped
        ):
            outcome["message"] = BY_HAND
        trial.tell(Event(outcome={"lane": lane, **outcome}))
        await self._drop_checkpoints(trial)
        if trial.assignment.keeps_state:
            async with self._arrived:  # another submission of it may wait
                self._arrived.notify_all()

    async def _drop_checkpoints(self, trial: Submission) -> None:
        """Delete what the training function of a trial has reported, or what a task's
        has kept in its refuge; not what a longer training of it may go on from.
        """
        if self._sweep is not None and trial.function is not None:
            with contextlib.suppress(StorageError):
                await asyncio.to_thread(
                    self._sweep.delete, f"lanes/{trial.assignment.trial}"
                )
        keeps = trial.assignment.keeps_state
        if keeps and (
            not trial.ended or trial.outcome["status"] in ("done", "stopped")
        ):
            return
        if (trial.is_kept or keeps) and trial.assignment.refuge is not None:
            trial.is_kept = False
            with contextlib.suppress(StorageError):
                await asyncio.to_thread(trial.assignment.refuge.delete, "")

    async def next_event(self, ticket: str, index: int) -> Event:
        """Wait for event number `index` of a submission.

        Its end may be held back, see `expect`.
        """
        state = self._trials[ticket]
        while len(state.events) <= index:
            await state.changed.wait()
        event = state.events[index]
        if event.outcome is not None and not state.told:
            deadline = time.monotonic() + self.hold_s
            while self._open() < self._expected and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S)
            state.told = True
        return event

    def _open(self) -> int:
        """Trials whose Tune actors wait for their end."""
        return sum(
            not (trial.told or trial.cancelled) for trial in self._trials.values()
        )

    async def expect(self, count: int) -> None:
        """Hold back the end of each trial, for at most `hold_s`, until `count`
        submissions still wait for their ends.

        When a trial ends, Tune gives its actor to a trial whose own actor is still
        starting, and drops that actor; of two that end at once it drops one. With
        trials shorter than a start (3 s) it would start actor after actor and never
        have more of them.
        """
        self._expected = count

    async def cancel(self, ticket: str) -> None:
        """Stop a submission at its next report, or before its start."""
        if ticket in self._trials:
            self._trials[ticket].cancelled = True
            if self._trials[ticket].is_kept and ticket not in self._running.values():
                await self._drop_checkpoints(self._trials[ticket])

    async def restarts(self) -> list[tuple[float, str]]:
        """How long lanes that started again took no trials, s, and why they had to."""
        return self._lanes.restarts

    async def orphan(self, trial: str) -> None:
        """Note that a trial's Tune actor has died; what runs for it goes on."""
        for state in self._trials.values():
            state.orphaned = state.orphaned or (
                state.assignment.trial == trial and not state.cancelled
            )

    def _adopted(self, name: str) -> str | None:
        """The ticket of a trial whose Tune actor has died, for its next one; None where
        there is none.
        """
        for ticket, state in self._trials.items():
            if state.orphaned and ticket.rpartition("/")[0] == name:
                state.orphaned = False
                return ticket
        return None

    async def forget(self, name: str) -> None:
        """Drop a submission, or those of a trial, whose end is in the journal."""
        for ticket, state in list(self._trials.items()):
            is_meant = ticket == name or (state.told and state.assignment.trial == name)
            if is_meant and ticket not in self._running.values():
                del self._trials[ticket]

    async def close(self, broken: str | None = None) -> None:
        """Let every lane end; with `broken`, end every trial with that message."""
        if broken is not None:
            self._broken = broken
            for trial in self._trials.values():
                trial.tell(Event(outcome={"status": "error", "message": broken}))
        async with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    async def heard(self, trial: str) -> list[Event]:
        """The evaluations of a trial so far, and its end, of the submission that got
        furthest.
        """
        submissions = [
            state for state in self._trials.values() if state.assignment.trial == trial
        ]
        return max((state.events for state in submissions), key=len, default=[])

    def say(self, words: str) -> None:
        """Log a line, and keep it for the driver's terminal."""
        logger.warning("%s", words)
        self._notes.append(words)

    async def watch(self, notes: int = 0) -> dict[str, Any]:
        """For the terminal and the metrics: lanes that are up, their trials with their
        newest reports, what is known of microbatches, and the notes from number `notes`
        on.
        """
        running = {}
        for lane, ticket in self._running.items():
            trial = self._trials[ticket]
            newest = next(
                (
                    event.metrics
                    for event in reversed(trial.events)
                    if event.outcome is None
                ),
                {},
            )
            running[lane] = {
                "trial": trial.assignment.trial,
                "started": trial.started,
                "metrics": newest,
            }
        boundary = self._microbatches.shown()
        lanes = sorted(self._lanes.up)
        said = {"notes": self._notes[notes:], "refusal": self._refusal}
        return {"lanes": lanes, "running": running, "boundary": boundary, **said}


class Roll:
    """The lanes: which are up on which device, and which are down and why."""

    def __init__(self) -> None:
        self.coming: dict[int, dict[int, str]] = defaultdict(dict)
        """The models of device of the workers that have started, by rank, of lanes that
        are not up yet.
        """
        self.starts: dict[str, dict[int, Any]] = defaultdict(dict)
        """Facts of the lanes' starts, each by lane."""
        self.up: dict[int, str] = {}
        """The models of device of the lanes that are up."""
        self._known: dict[int, str] = {}
        """Of those that are down, too, for as long as they come back."""
        self._down: dict[int, tuple[float, str]] = {}
        self.restarts: list[tuple[float, str]] = []
        """How long lanes that started again took no trials, s, and why they had to."""

    @property
    def devices(self) -> list[str]:
        """The models of device of all lanes that are up or come back."""
        return sorted(set(self._known.values()))

    def device(self, lane: int) -> str | None:
        """Return a lane's model of device; None of a lane that there is none of any
        more.
        """
        return self._known.get(lane)

    def comes(self, lane: int, device: str) -> None:
        """Note that a lane is up."""
        self.up[lane] = self._known[lane] = device
        if lane in self._down:
            since, why = self._down.pop(lane)
            self.restarts.append((time.monotonic() - since, why))

    def goes(self, lane: int, why: str) -> None:
        """Note that a lane is up no more, if it was; where it is down for another
        reason already, that one stays.
        """
        if self.up.pop(lane, None) is not None:
            self._down.setdefault(lane, (time.monotonic(), why))

    def ends(self, lane: int) -> None:
        """Note that a lane does not come back."""
        self._known.pop(lane, None)
