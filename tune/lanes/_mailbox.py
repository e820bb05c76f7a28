"""The mailbox: the actor between trials and lanes (Ray).

It hands out trials to lanes, and keeps the trials' reports. It also collects
which microbatches fit: running trials tell it what they found, each trial that
starts is told the current bounds, and a trial that is known not to fit never
starts.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from trainers.config.model import Tree
from trainers.errors import ConfigError, RunFailedError, StorageError
from trainers.loop.watchdog import GRACE_S
from trainers.on_ray.vital_signs import show_life
from trainers.storage import Storage
from tune.config import check_reported
from tune.forks.assignment import Assignment, Begun
from tune.lanes.queue import (
    Event,
    Microbatches,
    Queue,
    Report,
    Roll,
    Submission,
)
from tune.trials.record import BY_HAND
from tune.trials.steering import Steering

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
MAX_LOSSES = 3
"""A trial ends when it is lost this often: losing it twice may be chance."""


class Mailbox:
    """The mailbox of a sweep; each call is short or waits without holding a thread."""

    hold_s = 60.0

    def __init__(self, sweep: Storage | None = None) -> None:
        """`sweep` is the directory that stores the boundary; None: nothing is stored."""
        show_life()
        self._sweep = sweep
        self._arrived = asyncio.Condition()
        self._lanes = Roll()
        self._microbatches = Microbatches(sweep)
        self._queue = Queue(self._lanes, self._microbatches)
        self._trials: dict[str, Submission] = {}
        """All submissions, by ticket."""
        self._running: dict[int, Submission] = {}
        """The submission that each lane runs."""
        self._barriers: dict[str, Any] = {}
        """The barrier of each worker group, where its ranks synchronize."""
        self._closed = False
        self._broken: str | None = None
        self._expected = 0
        self._notes: list[str] = []
        self._reported: set[str] = set()
        """Names of all metrics that any trial has reported."""
        self._refusal: ConfigError | None = None
        """Why the sweep must end: it names a metric that no trial reports."""

    def __repr__(self) -> str:
        if self._sweep is None:
            return "mailbox"
        return f"{self._sweep.name}, mailbox"

    # Trials' Tune actors, and the driver

    async def submit(self, assignment: Assignment) -> str:
        """Submit a trial, and return its ticket.

        If the trial has a submission already, because an earlier actor of it
        died or because it was submitted ahead, return that ticket instead.
        """
        for ticket, trial in self._trials.items():
            if trial.orphaned and trial.assignment.trial == assignment.trial:
                trial.orphaned = False
                return ticket
        return await self._submit(Submission(assignment))

    async def submit_ahead(self, assignment: Assignment) -> None:
        """Submit a trial whose actor is still starting, unless the trial is submitted."""
        if not self._submissions(assignment.trial):
            await self._submit(Submission(assignment, orphaned=True))

    async def _submit(self, trial: Submission) -> str:
        assignment = trial.assignment
        self._trials[assignment.ticket] = trial
        trial.assignment = replace(assignment, refuge=self._refuge(trial))
        await self._drop_checkpoints(trial)  # from a start that was cut off
        if self._broken is None:
            await self._enqueue(trial)
        else:
            trial.end("error", self._broken)
        return assignment.ticket

    def _refuge(self, trial: Submission) -> Storage | None:
        """Return where a task's trial keeps its state if its node is taken away."""
        if self._sweep is None or trial.function is not None:
            return None
        if trial.assignment.keeps_state:
            return self._sweep.child("states", trial.assignment.trial)
        # Named by the ticket, because a driver that was killed may have left
        # the state of another submission.
        return self._sweep.child(
            "lanes", trial.assignment.ticket.replace("/", "-")
        )

    def _submissions(self, name: str) -> list[Submission]:
        """Return all submissions of a trial."""
        trials = self._trials.values()
        return [trial for trial in trials if trial.assignment.trial == name]

    async def next_event(self, ticket: str, index: int) -> Event:
        """Wait for event number `index` of a submission, and return it.

        The submission's end may be held back; see `expect`.
        """
        trial = self._trials[ticket]
        while len(trial.events) <= index:
            await trial.changed.wait()
        event = trial.events[index]
        if event.outcome is not None and not trial.told:
            deadline = time.monotonic() + self.hold_s
            while (
                self._open() < self._expected and time.monotonic() < deadline
            ):
                await asyncio.sleep(_LOOK_S)
            trial.told = True
        return event

    def _open(self) -> int:
        """Return how many submissions have not ended, as far as Tune knows."""
        trials = self._trials.values()
        return sum(not trial.told and not trial.cancelled for trial in trials)

    async def expect(self, count: int) -> None:
        """Hold back each trial's end until at least `count` submissions are open.

        When a trial ends, Tune gives its actor to a trial whose own actor is
        still starting, and drops the starting one; if two trials end at the
        same time, Tune drops the actor of one. If trials are shorter than the
        start of an actor (3 s), Tune would keep starting actors without ever
        having more of them. No end is held back for longer than `hold_s`.
        """
        self._expected = count

    async def cancel(self, ticket: str) -> None:
        """Stop a submission at its next report, or before its start."""
        trial = self._trials.get(ticket)
        if trial is not None:
            trial.cancelled = True
            if trial.is_kept and trial not in self._running.values():
                await self._drop_checkpoints(trial)

    async def orphan(self, name: str) -> None:
        """Note that a trial's Tune actor has died; the trial's submission continues."""
        for trial in self._submissions(name):
            trial.orphaned = trial.orphaned or not trial.cancelled

    async def heard(self, name: str) -> list[Event]:
        """Return a trial's events so far, from the submission that has the most."""
        found = [trial.events for trial in self._submissions(name)]
        return max(found, key=len, default=[])

    async def forget(self, name: str) -> None:
        """Drop the submission with ticket `name`, or all of the recorded trial `name`."""
        running = self._running.values()
        for ticket, trial in list(self._trials.items()):
            is_heard = trial.told and trial.assignment.trial == name
            if (is_heard or ticket == name) and trial not in running:
                del self._trials[ticket]

    async def steer(self, steering: Steering) -> None:
        """Apply the combined effect of all user actions so far."""
        self._queue.steer(steering)
        await self._notify()

    async def close(self, broken: str | None = None) -> None:
        """Let every lane end; with `broken`, end every trial with that message."""
        if broken is not None:
            self._broken = broken
            for trial in self._trials.values():
                trial.end("error", broken)
        self._closed = True
        await self._notify()

    async def watch(self, notes: int = 0) -> Tree:
        """Return what the terminal and the metrics show.

        Returns:
            The lanes that are up, the running trials with their newest
            reports, the notes from number `notes` on, and the refusal, if any.
        """
        running = {}
        for lane, trial in self._running.items():
            running[lane] = {
                "trial": trial.assignment.trial,
                "started": trial.started,
                "metrics": trial.newest,
            }
        return {
            "lanes": sorted(self._lanes.up),
            "running": running,
            "notes": self._notes[notes:],
            "refusal": self._refusal,
        }

    # Lanes

    async def meet(
        self, group: str, method: str, *args: Any, **given: Any
    ) -> Any:
        """Call a method of the barrier at which a worker group's ranks synchronize."""
        if group not in self._barriers:
            from tune.ray_internals import make_barrier

            self._barriers[group] = make_barrier()
        return await getattr(self._barriers[group], method)(*args, **given)

    async def hello(
        self, lane: int, device: str = "", rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Note that a worker of a lane has started; `device` names the worker's device.

        The lane is up once all of its workers have started. A trial that the
        lane's previous worker group ran is lost. `device` looks like "NVIDIA
        A10G, 22.5 GiB".
        """
        if self._lanes.has_started(lane, device, rank, num_ranks):
            await self.lost(lane)
            self._lanes.comes(lane)

    async def lost(
        self, lane: int, cause: RunFailedError | None = None
    ) -> None:
        """Record that a lane lost its workers, with the cause if known.

        The lane's trial goes to the head of the queue.
        """
        self._lanes.goes(lane)
        trial = self._running.pop(lane, None)
        if trial is None or trial.ended:
            return
        why = "its worker group died"
        status = "node_lost"
        if cause is not None:
            why += f": {cause.message}"
            if cause.status != "error":
                status = cause.status
        outcome = {"status": status, "message": why, "lane": lane}
        await self._start_again(trial, outcome)

    async def killed(self, lanes: Sequence[int]) -> None:
        """Note that lanes were killed before they were up, and do not come back."""
        for lane in lanes:
            self._lanes.ends(lane)
        self._queue.drop_ended()

    async def leave(self, lane: int) -> None:
        """Note that the node of a lane is about to be taken away.

        The lane gets no further trial on that node.
        """
        self._lanes.leaves(lane)

    async def take(
        self, lane: int, wait_s: float
    ) -> Assignment | Literal["close"] | None:
        """Take the next trial for a lane.

        Returns:
            "close" when there will be no more trials; None when `wait_s`
            passed without a trial, or when the lane has a new worker group. In
            the latter case a dead worker made this call, and Ray does not end
            such calls.
        """
        deadline = time.monotonic() + wait_s
        group = self._lanes.groups[lane]
        async with self._arrived:
            while not self._closed:
                if self._lanes.groups[lane] != group:
                    return None
                running = {
                    trial.assignment.trial for trial in self._running.values()
                }
                trial = self._queue.next(lane, running)
                if trial is not None:
                    return self._start(trial, lane)
                left_s = deadline - time.monotonic()
                try:
                    await asyncio.wait_for(self._arrived.wait(), left_s)
                except TimeoutError:
                    return None
        self._lanes.ends(lane)
        return "close"

    def _start(self, trial: Submission, lane: int) -> Assignment:
        self._trials[trial.assignment.ticket] = trial
        self._running[lane] = trial
        trial.started = time.time()
        assignment = replace(
            trial.assignment, attempt=trial.losses + trial.failures
        )
        device = self._lanes.up.get(lane)
        if device:
            bounds = self._microbatches.bounds(trial, device)
            assignment = replace(assignment, microbatch_bounds=bounds)
        trial.assignment = assignment
        return assignment

    async def runs(self, lane: int, ticket: str) -> bool:
        """Return whether a lane should run a trial on: False once a rank has ended it."""
        trial = self._runs(lane, ticket)
        return trial is not None and not trial.ended

    def _runs(self, lane: int, ticket: str) -> Submission | None:
        trial = self._running.get(lane)
        if trial is None or trial.assignment.ticket != ticket:
            return None
        return trial

    async def report(self, ticket: str, metrics: Tree) -> bool:
        """Keep an evaluation of a running trial; return whether the trial continues.

        Evaluations that a restarted trial reports a second time are not kept
        twice.
        """
        trial = self._trials[ticket]
        if metrics["step"] > trial.newest.get("step", -1.0):
            trial.tell(Event(metrics))
        self._reported.update(metrics)
        return not self._is_unwanted(trial)

    def _is_unwanted(self, trial: Submission) -> bool:
        """Return whether a trial should stop when it reports."""
        stopped = self._queue.steering.stopped
        return (
            trial.cancelled
            or self._closed
            or trial.assignment.trial in stopped
        )

    async def report_part(
        self,
        ticket: str,
        attempt: int,
        number: int,
        num_ranks: int,
        row: dict[str, float],
        checkpoint: str | None,
    ) -> bool | None:
        """Keep a training function's report, once each rank has sent its part.

        Args:
            ticket: The submission that reports.
            attempt: The number of the start that reports; reports of earlier
                starts are ignored.
            number: The number of the report, from 1 on.
            num_ranks: How many parts a report has.
            row: The metrics; empty except on rank 0.
            checkpoint: The path of the checkpoint that this rank has stored,
                if any; a restart of the trial continues from it.

        Returns:
            Whether the trial should continue, identical on all ranks; None if
            this start of the trial has ended on another rank.
        """
        trial = self._trials.get(ticket)
        if trial is None or not self._runs_start(trial, attempt):
            return None
        report = trial.reports.setdefault((attempt, number), Report())
        report.num_parts += 1
        report.row = row or report.row
        report.checkpoint = checkpoint or report.checkpoint
        # If the lane is lost, the ranks that wait here are about to be ended.
        if report.num_parts == num_ranks:
            del trial.reports[attempt, number]
            report.goes_on.set_result(self._keep(trial, number, report))
        return await report.goes_on

    def _runs_start(self, trial: Submission, attempt: int) -> bool:
        """Return whether a start of a trial is running."""
        return (
            trial in self._running.values()
            and not trial.ended
            and trial.assignment.attempt == attempt
        )

    def _keep(self, trial: Submission, number: int, report: Report) -> bool:
        """Keep a complete report; return whether the trial should continue."""
        # A lower number was kept before the trial was restarted.
        if number > len(trial.events):
            trial.tell(Event(report.row))
        self._reported.update(report.row)
        if report.checkpoint is not None:
            begun = Begun(
                number, report.checkpoint, report.row["train_time_s"]
            )
            trial.assignment = replace(trial.assignment, begun=begun)
        target = trial.assignment.target
        is_met = target is not None and target.is_met(report.row)
        return not (is_met or self._is_unwanted(trial))

    async def observe(
        self, lane: int, ticket: str, size: int, fits: bool
    ) -> None:
        """Record whether a microbatch fits; return once the record is durable."""
        device = self._lanes.known.get(lane)
        trial = self._trials.get(ticket)
        if not device or trial is None:
            return
        if not self._microbatches.observe(trial, device, size, fits):
            return
        self._queue.drop_ended()
        words = await self._microbatches.keep()
        if words is not None:
            self.say(words)

    async def hung(
        self,
        lane: int,
        ticket: str,
        failure: RunFailedError,
        stack: str,
        num_ranks: int,
    ) -> None:
        """Note that a rank of a trial hangs.

        The trial ends once every rank has reported where it hangs, or after
        `GRACE_S`, when the first of them exits.
        """
        hangs = self._trials[ticket].hangs
        hangs.append((failure, stack))
        if len(hangs) > 1:
            return
        deadline = time.monotonic() + GRACE_S
        while len(hangs) < num_ranks and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        cause = RunFailedError.first([hang for hang, _ in hangs])
        stacks = "\n".join(f"{hang.message}\n{stack}" for hang, stack in hangs)
        outcome = {
            "status": "hung",
            "message": cause.message,
            "traceback": stacks,
        }
        await self.end(lane, ticket, outcome)

    async def end(self, lane: int, ticket: str, outcome: Tree) -> None:
        """Take the outcome of a trial on its lane, from the first rank that has one.

        If the outcome has `smaller`, the trial is restarted with that
        microbatch; if `again` is true, it is restarted because its process was
        killed from outside.
        """
        trial = self._runs(lane, ticket)
        if trial is None or self._is_misnamed(trial, outcome):
            return
        del self._running[lane]
        trial.drop_reports()
        smaller = outcome.pop("smaller", None)
        if smaller is not None:
            trial.assignment = replace(
                trial.assignment, microbatch_ceiling=smaller
            )
            await self._enqueue(trial, first=True)
        elif outcome["status"] == "preempted":
            await self._hand_back(trial, lane, outcome["message"])
        elif outcome.pop("again", False):
            await self._start_again(trial, outcome | {"lane": lane})
        elif outcome["status"] == "error" and trial.may_fail:
            trial.failures += 1
            words = f"has failed, and starts again: {outcome['message']}"
            self.say(f"trial {trial.assignment.trial} {words}")
            await self._enqueue(trial, first=True)
        else:
            await self._finish(trial, {"lane": lane, **outcome})

    def _is_misnamed(self, trial: Submission, outcome: Tree) -> bool:
        """Return whether the configuration names a metric that no trial reports.

        The driver then ends the sweep, and this trial has no result.
        """
        misnamed = outcome.pop("misnamed", None)
        if trial.function is not None and outcome["status"] == "done":
            try:
                check_reported(trial.assignment.watches, self._reported)
            except ConfigError as error:
                misnamed = error
        if misnamed is None or misnamed.value in self._reported:
            return False
        self._refusal = misnamed
        return True

    async def _hand_back(self, trial: Submission, lane: int, why: str) -> None:
        """Queue a trial again that saved its state because its node is taken away."""
        refuge = trial.assignment.refuge
        if refuge is not None:
            trial.is_kept = True
            trial.assignment = replace(trial.assignment, source=refuge)
        if trial.cancelled:
            await self._drop_checkpoints(trial)
            return
        name = trial.assignment.trial
        self.say(
            f"lane {lane}, trial {name}: {why}; the trial continues from there"
        )
        await self._enqueue(trial, first=True)

    async def _start_again(self, trial: Submission, outcome: Tree) -> None:
        """Queue a lost trial again; end it with `outcome` if hung or lost too often."""
        trial.losses += 1
        why = outcome["message"]
        if trial.losses < MAX_LOSSES and outcome["status"] != "hung":
            who = f"lane {outcome['lane']}, trial {trial.assignment.trial}"
            self.say(f"{who}: {why}; the trial starts again")
            await self._enqueue(trial, first=True)
            return
        if trial.losses > 1:
            why += f", {trial.losses} times"
        await self._finish(trial, outcome | {"message": why})

    async def _finish(self, trial: Submission, outcome: Tree) -> None:
        stopped = self._queue.steering.stopped
        if (
            outcome["status"] == "stopped"
            and trial.assignment.trial in stopped
        ):
            outcome["message"] = BY_HAND
        trial.tell(Event(outcome=outcome))
        await self._drop_checkpoints(trial)
        await self._notify()  # another submission of the trial may wait

    async def _enqueue(self, trial: Submission, first: bool = False) -> None:
        self._queue.add(trial, first)
        await self._notify()

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    async def _drop_checkpoints(self, trial: Submission) -> None:
        """Delete a trial's stored state, unless a longer trial may continue from it."""
        assignment = trial.assignment
        if self._sweep is not None and trial.function is not None:
            await _delete(self._sweep.child("lanes", assignment.trial))
        if assignment.refuge is None or not (
            trial.is_kept or assignment.keeps_state
        ):
            return
        goes_on = not trial.ended or trial.outcome["status"] in (
            "done",
            "stopped",
        )
        if not (assignment.keeps_state and goes_on):
            trial.is_kept = False
            await _delete(assignment.refuge)

    def say(self, words: str) -> None:
        """Log a line, and keep it for the driver's terminal."""
        logger.warning("%s", words)
        self._notes.append(words)


async def _delete(directory: Storage) -> None:
    with contextlib.suppress(StorageError):
        await asyncio.to_thread(directory.delete, "")
