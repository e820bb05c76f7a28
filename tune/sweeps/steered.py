"""Do what users want of a running sweep: its driver reads the actions (Ray)."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray

from trainers.errors import StorageError
from tune.search.space import open_trials
from tune.sweeps.progress import Progress
from tune.sweeps.spec import SweepSpec
from tune.sweeps.trial import assignment_of
from tune.trials.journal import Journal
from tune.trials.record import trial_id
from tune.trials.steering import Action, Actions, Steering


class Steered:
    """What a user has had the sweep do, as far as it is done."""

    def __init__(self, spec: SweepSpec, mailbox: Any, progress: Progress) -> None:
        self._spec = spec
        self._mailbox = mailbox
        self._progress = progress
        self._actions = Actions(spec.storage)
        self._journal = Journal(spec.storage)
        known = self._actions.read()
        self._actions.news()  # what an earlier start has said
        if known.paused:
            go_on = f"`python -m tune steer {spec.uri} go-on`"
            progress.terminal.say(f"paused by hand: lanes take no trial until {go_on}")
        self._steering = Steering(extension=known.extension)
        self._begun: set[str] = set()
        self._running: dict[str, tuple[str, float]] = {}
        """Clones that have not ended: the ticket of each, and when it was submitted."""
        self._is_alone = False
        self.is_extended = False
        """Whether the sweep goes on with another configuration once its trials have
        ended.
        """

    @property
    def has_clones(self) -> bool:
        """Whether clones run, or are about to."""
        return bool(self._running or self._steering.clones.keys() - self._begun)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Begin no clone in the block."""
        self._is_alone = True
        yield
        self._is_alone = False

    def look(self) -> None:
        """Do what is new, and record the clones that have ended."""
        steering = self._steering
        with contextlib.suppress(StorageError):
            steering = self._actions.read()
        if steering != self._steering:
            self._do(steering)
        for action in self._actions.news():
            self._progress.terminal.say(f"by hand: {action}")
        if not self._is_alone:
            for name in sorted(steering.clones.keys() - self._begun):
                self._begin(name, steering.clones[name])
        for name, (ticket, started) in list(self._running.items()):
            events = ray.get(self._mailbox.heard.remote(name))
            if events and events[-1].outcome is not None:
                del self._running[name]
                self._progress.record_clone(name, started)
                self._mailbox.forget.remote(ticket)

    def _do(self, steering: Steering) -> None:
        """Have lanes take trials as is wanted now."""
        before = self._steering
        self._steering = steering
        ray.get(self._mailbox.steer.remote(steering))
        trials = {
            trial_id(trial): trial
            for trial in open_trials(self._spec.config, self._journal.records())
        }
        for name in steering.first:
            if name in trials and name not in before.first:
                assignment = assignment_of(
                    trials[name], self._spec.train, self._spec.config.objective
                )
                ray.get(self._mailbox.submit_ahead.remote(assignment))
        self.is_extended = self.is_extended or steering.extension != before.extension

    def _begin(self, name: str, clone: Action) -> None:
        """Submit a clone that has no record yet."""
        self._begun.add(name)
        if self._journal.find(name) is not None:
            return
        self._progress.seen[name] = clone.keys
        assignment = assignment_of(
            clone.keys, self._spec.train, self._spec.config.objective, "clone"
        )
        states = self._spec.storage.child("states", clone.trial)
        has_ended = self._journal.find(clone.trial) is not None
        if clone.goes_on and has_ended and states.exists():
            assignment = replace(assignment, source=states)
        ticket = ray.get(self._mailbox.submit.remote(assignment))
        self._running[name] = ticket, time.time()
