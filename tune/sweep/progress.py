"""What the driver does between two of Tune's steps: heed Ctrl-C, show the sweep, let lanes and trials grow (Ray).

Sets the metrics `paceline_trials` and `paceline_lane_busy`, which Prometheus reads.
"""

import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray import tune
from ray.util.metrics import Gauge

from trainers.errors import STATUSES
from trainers.launch.signals import stop_signals
from tune.report.answer import objective_value
from tune.search.space import unwrap
from tune.sweep.plan import SweepPlan
from tune.sweep.spec import SweepSpec
from tune.sweep.terminal import Terminal, View, shown_config
from tune.trials.journal import Journal, trial_id
from tune.trials.record import TrialRecord, make_record

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
GROW_EVERY_S = 10.0


class Interrupted(Exception):  # noqa: N818 (a wish, not an error)
    """Ctrl-C, or SIGTERM from `ray job stop`."""


class Pace:
    """Sets how many trials Tune runs at a time: as many as there are lanes for them.

    Tune starts an actor for each of them (3 s), and passes it on from trial to trial.
    """

    def __init__(self, search: Any, mailbox: Any, total: int | None) -> None:
        """`total`: the trials that Tune will start, where the search proposes them whatever it hears of others; None:
        any other search has as many at a time as there are lanes, started or not.
        """
        self._search, self._mailbox, self._total = search, mailbox, total
        self._started: set[str] = set()

    def lanes_started(self, count: int) -> None:
        """Called with the number of lanes that wait for a node, come up, or are up."""
        if self._total is None:
            self._allow(count)

    def lanes_up(self, count: int) -> None:
        """Called with the number of lanes that take trials: an actor sooner than that would only slow their start."""
        if self._total is not None:
            self._allow(count)
            self._mailbox.expect.remote(self._search.max_concurrent if len(self._started) < self._total else 0)

    def trial_started(self, name: str) -> None:
        """Called when Tune has given an actor to one of its trials."""
        self._started.add(name)
        if len(self._started) == self._total:
            self._mailbox.expect.remote(0)

    def over(self) -> None:
        """Called when Tune starts no further trial."""
        self._total = None
        self._mailbox.expect.remote(0)

    def _allow(self, count: int) -> None:
        self._search.max_concurrent = max(self._search.max_concurrent, count)


class Progress(tune.Callback):
    """The sweep as its driver sees it; records the trials that the search stopped."""

    def __init__(
        self, spec: SweepSpec, plan: SweepPlan, mailbox: Any, pace: Pace, grow: Callable[[], None] | None
    ) -> None:
        """`grow` is called every ten seconds."""
        self._config, self._plan, self._mailbox, self._pace, self._grow = spec.config, plan, mailbox, pace, grow
        self._journal = Journal(spec.storage)
        self.signal_name: str | None = None
        """What asked to stop, once it has come."""
        self.terminal = Terminal()
        self.seen: dict[str, dict[str, Any]] = {}
        self._started: dict[str, float] = {}
        self._purposes: dict[str, Any] = {}
        self._statuses: Counter[str] = Counter()
        self._best: tuple[float, TrialRecord] | None = None
        self._notes = 0
        self._busy: set[int] = set()
        self._began = self._grew = time.monotonic()
        self._looked = 0.0
        self._trials = Gauge("paceline_trials", tag_keys=("run", "status"))
        self._lane_busy = Gauge("paceline_lane_busy", tag_keys=("run", "lane"))

    def __reduce__(self) -> tuple[Any, ...]:
        return (tune.Callback, ())  # Tune pickles its callbacks for a restore that the journal replaces

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Note what asks to stop, to act on it between two of Tune's steps; a second Ctrl-C raises at once.

        Raising from the handler itself would be lost in whatever `except` happens to be running.
        """

        def note(number: int, frame: FrameType | None) -> None:
            if self.signal_name is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal_name = signal.Signals(number).name

        before = {number: signal.signal(number, note) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Called by Tune in its loop, several times a second."""
        self.tick()

    def tick(self) -> None:
        """Do what is due: raise Interrupted after Ctrl-C, let the lanes grow, show how things are."""
        if self.signal_name is not None:
            raise Interrupted(self.signal_name)
        now = time.monotonic()
        if self._grow is not None and now - self._grew >= GROW_EVERY_S:
            self._grew = now
            self._grow()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        state = ray.get(self._mailbox.watch.remote(self._notes))
        self._pace.lanes_up(len(state["lanes"]))
        self._notes += len(state["notes"])
        for words in state["notes"]:
            self.terminal.say(words)
        run = self._config.name
        counts = {**self._statuses, "running": len(state["running"])}
        for status in ("running", *STATUSES):
            self._trials.set(counts.get(status, 0), {"run": run, "status": status})
        self._busy |= set(state["lanes"])
        for lane in self._busy:
            self._lane_busy.set(float(lane in state["running"]), {"run": run, "lane": str(lane)})
        spent_s = time.monotonic() - self._began
        view = View(self._config, self._plan.total, self._statuses, state, self.seen, self._best, spent_s)
        self.terminal.update(view)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial gets its actor."""
        self._pace.trial_started(trial.trial_id)
        name = self._name(trial)
        suggestion = unwrap(trial.config)
        self.seen[name], self._purposes[name] = suggestion.trial, suggestion.purpose or "trial"
        self._started.setdefault(name, time.time())

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Tune when a trial has ended, or was stopped: a line on the terminal."""
        name = self._name(trial)
        record = self._journal.find(name) or self._stopped(name)
        if record is None:
            return
        self._statuses[record.status] += 1
        value = objective_value(self._config.objective, record)
        sign = 1 if self._config.objective.direction == "min" else -1
        if value is not None and (self._best is None or sign * value < sign * self._best[0]):
            self._best = (value, record)
        figures = "  ".join(f"{key} {value:.4f}" for key, value in record.metrics.items() if key.startswith("val_"))
        parts = [
            f"trial {self._statuses.total()}/{self._plan.total or '?'}",
            shown_config(record.config),
            record.status if record.purpose == "trial" else f"{record.purpose} {record.status}",
            f"{record.samples_per_s:,.0f} samples/s" if record.samples_per_s else "",
            figures,
            record.message,
        ]
        self.terminal.say("  ".join(part for part in parts if part))

    def _stopped(self, name: str) -> TrialRecord | None:
        """Record a trial that the search has stopped; None for one without an evaluation."""
        reports = ray.get(self._mailbox.reports.remote(name))
        stage = self._journal.newest_stage(name) if self._config.scheduler == "pbt" else None
        if stage is not None:
            begun = len(stage.curve) and stage.curve[-1]["step"]
            reports = [*stage.curve, *(row for row in reports if row["step"] > begun)]
        if not reports:
            return None
        config, started = (self.seen[name], self._started[name]) if stage is None else (stage.config, stage.started)
        objective, price = self._config.objective, self._plan.lane_usd_per_hour
        outcome = {"status": "stopped", "message": "stopped by the search"}
        record = make_record(name, config, objective, started, reports, outcome, price, self._purposes[name])
        record = record if stage is None else replace(record, schedule=stage.schedule)
        self._journal.append(record)
        return record

    def record_stopped(self) -> None:
        """Record the trials that the end of a budget has cut off."""
        for name in self._started:
            if self._journal.find(name) is None:
                self._stopped(name)

    def _name(self, trial: Any) -> str:
        """Our id of one of Tune's trials; Tune keeps that of a population's trial, whose configuration changes."""
        if self._config.scheduler == "pbt":
            return str(trial)
        suggestion = unwrap(trial.config)
        return trial_id(suggestion.trial, suggestion.purpose or "trial")
