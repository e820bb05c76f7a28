"""The driver's work between Tune's steps: signals, the live table, new lanes (Ray).

This module sets the metrics `paceline_trials` and `paceline_lane_busy`, which
Prometheus reads.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import ray
from ray import tune
from ray.util.metrics import Gauge
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainers.config.model import Tree
from trainers.errors import STATUSES, PacelineError, in_digits, redact
from trainers.launch.process import StopSignals
from trainers.on_ray.internals import tell_of_job
from trainers.output import Output
from trainers.storage import Storage
from trainers.terminal import TerminalConsole, live
from tune.config import SweepConfig
from tune.lanes.queue import Event
from tune.report.table import as_html
from tune.report.words import duration, in_a_line, newest
from tune.search.space import unwrap
from tune.sweeps._trial import assignment_of
from tune.sweeps.plan import SweepPlan
from tune.sweeps.spec import Interrupted, SweepSpec
from tune.trials.journal import (
    WRITE_EVERY_S,
    Journal,
    Live,
    Running,
    write_live,
)
from tune.trials.record import (
    BY_BUDGET,
    BY_HAND,
    Purpose,
    TrialRecord,
    dollars,
    make_record,
    trial_id,
    value_of,
)

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
GROW_EVERY_S = 10.0
_PAYS_S = 6.0
"""Twice the time that one of Tune's actors takes to start."""


@dataclass(frozen=True)
class View:
    """Everything that the live table shows."""

    config: SweepConfig
    live: Live
    statuses: Mapping[str, int]
    """The number of trials that have ended, by status."""
    best: tuple[float, TrialRecord] | None
    """The objective's best value so far, and the record of its trial."""
    spent_s: float


def render(view: View) -> RenderableType:
    """Return the live table."""
    ended = sum(view.statuses.values())
    counts = [
        f"{count} {status}" for status, count in view.statuses.items() if count
    ]
    head = f"{view.config.name}   {ended}/{view.live.total} trials"
    if counts:
        head += f": {', '.join(counts)}"
    lines = []
    if view.best is not None:
        lines.append(f"best so far   {_best_so_far(view.config, view.best)}")
    lines.append(_spent(view))
    shown = [Text(redact(line)) for line in lines]
    return Group(Text(head, style="bold"), _running(view.live.running), *shown)


def _best_so_far(
    config: SweepConfig, best: tuple[float, TrialRecord] | None
) -> str:
    """Return the best value and its configuration in words; empty if there is none."""
    if best is None:
        return ""
    value, record = best
    return (
        f"{config.objective.metric} {value:.4g}   {in_a_line(record.config)}"
    )


def _running(running: Sequence[Running]) -> Table:
    """Return a table with a row for each trial on a lane."""
    table = Table(box=None, pad_edge=False, show_header=bool(running))
    columns = {
        "lane": "right",
        "trial": "left",
        "step": "right",
        "newest": "left",
    }
    for header, justify in {**columns, "for": "right"}.items():
        table.add_column(header, justify=justify)  # type: ignore[arg-type]
    for trial in running:
        words = in_a_line(trial.config)
        age = duration(time.time() - trial.started)
        cells = (str(trial.lane), words, *newest(trial.metrics), age)
        table.add_row(*(Text(redact(cell)) for cell in cells))
    return table


def _spent(view: View) -> str:
    config = view.config
    busy = len(view.live.running)
    lanes = view.live.num_lanes
    words = (
        f"time          {duration(view.spent_s)}, {busy} of {lanes} lanes busy"
    )
    if config.usd_per_hour is not None:
        words += f", {dollars(view.spent_s, config.usd_per_hour):.2f} USD"
    if config.time_budget_s is not None:
        left_s = max(0.0, config.time_budget_s - view.spent_s)
        words += f"; {duration(left_s)} of the budget left"
    return words


class Terminal:
    """Shows the live table on a terminal or in a notebook, below the lines of the log."""

    def __init__(
        self, console: Console | None = None, is_live: bool = True
    ) -> None:
        """`is_live` says whether to show the live table."""
        self._console = console or TerminalConsole()
        self._is_live = is_live
        self._draw: Callable[[RenderableType], None] | None = None
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if not self._is_live:
            return self
        if self._console.is_jupyter:
            from IPython.display import HTML, display

            # rich's live display needs ipywidgets and, in the notebook, their
            # extension.
            cell = display(HTML(""), display_id=True)
            self._draw = lambda shown: cell.update(HTML(as_html(shown)))
            self._undo.callback(cell.update, HTML(""))
        if self._console.is_terminal:
            region = self._undo.enter_context(live(self._console))
            self._draw = lambda shown: region.update(shown, refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live table."""
        self._undo.close()
        self._draw = None

    def update(self, view: View) -> None:
        """Redraw the live table, if there is one."""
        if self._draw is not None:
            self._draw(render(view))


class Pace:
    """Sets how many trials Tune runs at a time, by the number of lanes.

    Tune starts an actor for each of these trials, which takes 3 s, and later
    gives the actor to another trial.
    """

    def __init__(self, search: Any, mailbox: Any, total: int | None) -> None:
        """`total` is how many trials Tune will start, if the search ignores results.

        For other searches it is None: as many trials run at a time as there
        are lanes.
        """
        self._search = search
        self._mailbox = mailbox
        self._total = total
        self._started: set[str] = set()
        self._num_ended = 0
        self._num_known = 0
        self._began = 0.0
        """When the first trial got its actor, by this machine's clock."""

    def lanes_started(self, count: int) -> None:
        """Allow `count` trials at a time: one for each started lane, up or not."""
        if self._total is None:
            self._allow(count)

    def lanes_up(self, count: int) -> None:
        """Allow `count` trials at a time: one for each lane that is up.

        Actors that start before their lanes are up would only slow the lanes'
        start.
        """
        if self._total is None:
            return
        if count == 1 or self._left_s(self._total) >= _PAYS_S:
            self._allow(count)
        is_all = len(self._started) >= self._total
        self._mailbox.expect.remote(
            0 if is_all else self._search.max_concurrent
        )

    def _left_s(self, total: int) -> float:
        """Estimate how long the remaining trials will take at the pace so far, s.

        Another actor does not pay off if the trials end before the actor is up.
        Tune would also wait for that actor at the end (5 s).
        """
        if not self._started:
            return 0.0
        each_s = (time.monotonic() - self._began) / max(1, self._num_ended)
        return (total - self._num_ended - self._num_known) * each_s

    def trial_started(self, name: str) -> None:
        """Note that one of Tune's trials has got its actor."""
        if not self._started:
            self._began = time.monotonic()
        self._started.add(name)
        if len(self._started) == self._total:
            self._mailbox.expect.remote(0)

    def trial_ended(self, was_known: bool) -> None:
        """Note that a trial of Tune's has ended; `was_known`: in an earlier start."""
        if was_known:
            self._num_known += 1
        else:
            self._num_ended += 1

    def over(self) -> None:
        """Note that Tune starts no further trial."""
        self._total = None
        self._mailbox.expect.remote(0)

    def _allow(self, count: int) -> None:
        self._search.max_concurrent = max(self._search.max_concurrent, count)


@dataclass(frozen=True)
class Extra:
    """A trial that the driver submits: a clone, a repeat, or one that Tune will start."""

    config: Tree
    purpose: Purpose = "trial"
    seed: int | None = None
    ticket: str = ""
    started: float = field(default_factory=time.time)

    @property
    def shown(self) -> Tree:
        """Its configuration, including the seed if it is a repeat."""
        if self.seed is None:
            return self.config
        return self.config | {"seed": self.seed}


class Progress(tune.Callback):
    """Tune's callback in the driver: records ended trials, and shows progress."""

    def __init__(
        self,
        spec: SweepSpec,
        plan: SweepPlan,
        mailbox: Any,
        pace: Pace,
        grow: Callable[[], None] | None,
        output: Output,
    ) -> None:
        """`grow`, if given, is called every `GROW_EVERY_S`."""
        self._output = output
        self._config = spec.config
        self._plan = plan
        self._mailbox = mailbox
        self._pace = pace
        self._grow = grow
        self._storage = spec.storage
        self._journal = Journal(spec.storage)
        self.signal_name: str | None = None
        """The name of the signal that asked the sweep to stop, once it has arrived."""
        self.terminal = Terminal(is_live=not (output.quiet or output.as_json))
        self.failure: Exception | None = None
        """The error that ends the sweep. It is raised between two of Tune's
        steps: inside a step, Tune would attribute it to a trial.
        """
        self.seen: dict[str, Tree] = {}
        """Configurations of the trials that have started, by ID."""
        self.extras: dict[str, Extra] = {}
        """Trials that the driver has submitted and that have not ended, by ID.
        A trial of Tune's is among them only until Tune starts that trial.
        """
        self.records: dict[str, TrialRecord] = {}
        """Records of all trials that have ended, as they were stored then."""
        self.steer: Callable[[], None] | None = None
        """Called every second to carry out the actions of users."""
        self.reasons: dict[str, str] = {}
        """Why a scheduler has stopped trials, by Tune's IDs."""
        self._started: dict[str, float] = {}
        # Tune's trials whose end was reported before Tune learned of it.
        self._told: set[str] = set()
        self._num_clones = 0
        self._train = spec.train
        self._source = spec.source
        self._statuses: Counter[str] = Counter()
        self._best: tuple[float, TrialRecord] | None = None
        self._num_notes = 0
        self._lanes_seen: set[int] = set()
        self._began = self._grew = time.monotonic()
        self._looked = self._written = 0.0
        self._begun_at = time.time()
        self._trials = Gauge("paceline_trials", tag_keys=("run", "status"))
        self._lane_busy = Gauge("paceline_lane_busy", tag_keys=("run", "lane"))

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune pickles its callbacks for its own restore; a sweep resumes from
        # the journal instead.
        return tune.Callback, ()

    def heeding_signals(self) -> StopSignals:
        """Return a context in which stop signals are noted, for `tick` to act on.

        An exception that the signal handler itself raised could be swallowed
        by any `except` in the code that happens to be running.
        """

        def note(name: str) -> None:
            self.signal_name = name

        return StopSignals(note)

    def on_step_begin(
        self, iteration: int, trials: list[Any], **info: Any
    ) -> None:
        """Call `tick`; called by Tune in its loop, several times a second."""
        self.tick()

    def on_step_end(
        self, iteration: int, trials: list[Any], **info: Any
    ) -> None:
        """Submit the first trials while their actors start; called by Tune."""
        if self._started:
            return
        for trial in trials:
            if self._journal.find(_name(trial)) is None:
                self.hurry(unwrap(trial.config))

    def hurry(self, config: Tree) -> None:
        """Submit one of Tune's trials, unless it is submitted already.

        Tune may start it much later, so the driver records its end.
        """
        assignment = assignment_of(config, self._train, self._config.objective)
        name = assignment.trial
        if name not in self._started and name not in self.extras:
            self.extras[name] = Extra(config)
            self._mailbox.submit_ahead.remote(assignment)

    def tick(self) -> None:
        """Do all regular work that is due by now.

        Raises:
            Interrupted: The user has asked the sweep to stop.
            PacelineError: A failure ends the sweep.
        """
        if self.signal_name is not None:
            raise Interrupted(self.signal_name)
        if self.failure is not None:
            raise self.failure
        now = time.monotonic()
        if self._grow is not None and now - self._grew >= GROW_EVERY_S:
            self._grew = now
            self._grow()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._look()

    def _look(self) -> None:
        """Carry out user actions, and show the state of the lanes."""
        if self.steer is not None:
            self.steer()
        state = ray.get(self._mailbox.watch.remote(self._num_notes))
        if state["refusal"] is not None:
            raise state["refusal"].at(self._source)
        self._pace.lanes_up(len(state["lanes"]))
        self._num_notes += len(state["notes"])
        for words in state["notes"]:
            logger.info("%s", words)
        self._set_gauges(state)
        shown = self._live(state)
        spent_s = time.monotonic() - self._began
        best = self._best
        view = View(self._config, shown, self._statuses, best, spent_s)
        self.terminal.update(view)
        if self._looked - self._written >= WRITE_EVERY_S:
            self._written = self._looked
            write_live(self._storage, shown)

    def _live(self, state: Tree) -> Live:
        """Return the sweep's progress, from the result of the mailbox's `watch`."""
        running = []
        for lane, trial in sorted(state["running"].items()):
            name = trial["trial"]
            config = self.seen.get(name, {})
            if name in self.extras:
                config = self.extras[name].shown
            row = Event(trial["metrics"]).row
            running.append(Running(name, lane, trial["started"], config, row))
        return Live("running", self._total, len(state["lanes"]), running)

    def _set_gauges(self, state: Tree) -> None:
        run = self._config.name
        counts = {**self._statuses, "running": len(state["running"])}
        for status in ("running", *STATUSES):
            self._trials.set(
                counts.get(status, 0), {"run": run, "status": status}
            )
        self._lanes_seen |= set(state["lanes"])
        for lane in self._lanes_seen:
            is_busy = float(lane in state["running"])
            self._lane_busy.set(is_busy, {"run": run, "lane": str(lane)})

    @property
    def _total(self) -> int:
        """The number of trials known so far; an `around` search adds more."""
        return max(self._plan.num_trials, len(self.seen)) + self._num_clones

    def on_trial_start(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        """Note a trial's start; called by Tune when the trial gets its actor."""
        self._pace.trial_started(trial.trial_id)
        name = _name(trial)
        self.seen[name] = unwrap(trial.config)
        self._started.setdefault(name, time.time())
        self.extras.pop(name, None)

    def on_trial_complete(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        """Record and report a trial that ended or was stopped; called by Tune."""
        name = _name(trial)
        if name in self._told:
            self._pace.trial_ended(was_known=False)
            return
        with self._noting_failure():
            why = self.reasons.get(trial.trial_id, "stopped by the search")
            self._record(name, why)
        record = self.records.get(name)
        was_known = record is not None and record.end_time < self._begun_at
        self._pace.trial_ended(was_known)
        if record is None:
            return
        self._count(record)
        if not was_known:
            self.say_end(record)

    def count_clone(self, record: TrialRecord) -> None:
        """Count a clone that ended in an earlier start of the sweep."""
        self._num_clones += 1
        self._count(record)

    def _count(self, record: TrialRecord) -> None:
        """Count an ended trial by its status, and update the best one."""
        self._statuses[record.status] += 1
        value = value_of(self._config.objective.metric, record)
        if value is not None and self._is_best(value):
            self._best = (value, record)
        best = redact(_best_so_far(self._config, self._best))
        trials = f"{self._statuses.total()}/{self._total}"
        sweep = redact(self._storage.uri)
        tell_of_job({"sweep": sweep, "trials": trials, "best": best})

    def say_end(self, record: TrialRecord) -> None:
        """Print how a trial, or a finalist's repeat, has ended."""
        parts = [f"trial {self._statuses.total()}/{self._total}"]
        config = record.config
        if record.seed is not None:
            parts = ["repeat"]
            config = config | {"seed": record.seed}
        parts += [in_a_line(config), record.status]
        if record.samples_per_s:
            parts.append(f"{record.samples_per_s:,.0f} samples/s")
        for key, value in record.metrics.items():
            if key.startswith("val_"):
                parts.append(f"{key} {in_digits(value)}")
        parts.append(record.message)
        logger.info("%s", "  ".join(part for part in parts if part))

    def _is_best(self, value: float) -> bool:
        if self._best is None:
            return True
        best, _ = self._best
        if self._config.objective.direction == "min":
            return value < best
        return value > best

    def on_trial_recover(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        """Let a trial continue although its actor has failed; called by Tune."""
        with self._noting_failure():
            name = _name(trial)
            ray.get(self._mailbox.orphan.remote(name))
            logger.info(
                "trial %s: its Tune actor has died; a new actor takes over",
                name,
            )

    def on_trial_error(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        """End the sweep with an error; called by Tune when it gives up a trial."""
        what = f"trial {_name(trial)} was given up: its Tune actor failed {trial.num_failures} times ({trial.error_file})"
        with suppress(OSError, TypeError):  # Tune may have no such file
            text = Path(trial.error_file).read_text(encoding="utf-8").strip()
            what += "; the last time: " + text.rpartition("\n")[2]
        self.failure = self.failure or PacelineError(what)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Store an error of the block in `failure`, which ends the sweep later."""
        try:
            yield
        except (PacelineError, ray.exceptions.RayError) as error:
            self.failure = self.failure or error

    def add(
        self,
        config: Tree,
        purpose: Purpose,
        seed: int | None = None,
        source: Storage | None = None,
    ) -> str:
        """Submit a trial that is not part of the search, and return its ID.

        Args:
            config: The trial's dotted keys and values.
            purpose: Whether the trial is a clone or a finalist's repeat.
            seed: For a repeat, the seed that replaces the configuration's own.
            source: Where the state is from which the trial continues, if any.
        """
        objective = self._config.objective
        assignment = assignment_of(
            config, self._train, objective, purpose, seed
        )
        name = assignment.trial
        self._num_clones += purpose == "clone"
        assignment = replace(assignment, source=source)
        ticket = ray.get(self._mailbox.submit.remote(assignment))
        self.extras[name] = Extra(config, purpose, seed, ticket)
        return name

    def has_ended(self, name: str) -> bool:
        """Return whether one of `extras` has ended; if so, record and report it."""
        extra = self.extras.get(name)
        if extra is None:
            return True
        events = ray.get(self._mailbox.heard.remote(name))
        if not events or events[-1].outcome is None:
            return False
        with self._noting_failure():
            self._record(name, BY_HAND)
        del self.extras[name]
        self._mailbox.forget.remote(extra.ticket)
        record = self.records.get(name)
        if record is not None:
            if extra.purpose != "repeat":
                self._told.add(name)
                self._count(record)
            self.say_end(record)
        return True

    def _record(self, name: str, why_stopped: str) -> None:
        """Load a trial's record; write one if its actor did not, or the trial was stopped.

        A trial without an evaluation or an outcome gets no record.
        """
        record = self._journal.find(name)
        if record is None:
            record = self._from_mailbox(name, why_stopped)
            if record is None:
                return
            self._journal.append(record)
        self.records[name] = record
        self._mailbox.forget.remote(name)
        if record.end_time >= self._begun_at:
            self._output.record({"record": "trial", **asdict(record)})

    def _from_mailbox(self, name: str, why_stopped: str) -> TrialRecord | None:
        """Make a record from a lane's reports; a trial without an outcome was stopped."""
        events: list[Event] = ray.get(self._mailbox.heard.remote(name))
        reports = [event.row for event in events if event.outcome is None]
        outcome = events[-1].outcome if events else None
        if not reports and outcome is None:
            return None
        extra = self.extras.get(name)
        if extra is None:
            extra = Extra(self.seen[name], started=self._started[name])
        return make_record(
            extra.config,
            self._config.objective,
            extra.started,
            reports,
            outcome or {"status": "stopped", "message": why_stopped},
            self._plan.lane_usd_per_hour,
            extra.purpose,
            extra.seed,
        )

    def record_rest(self, is_over_budget: bool) -> None:
        """Record the trials that the budget cut off; raise if any other is missing."""
        for name in list(self.extras):
            self.has_ended(
                name
            )  # in case the trial has ended since the last look
        if self.failure is not None:
            raise self.failure
        known = {*self.records, *self.extras}
        missing = [name for name in self._started if name not in known]
        if missing and not is_over_budget:
            which = f"trial {missing[0]}"
            if len(missing) > 1:
                which += f" and {len(missing) - 1} more"
            raise PacelineError(f"Tune has ended without a result of {which}")
        for name in missing:
            self._record(name, BY_BUDGET)


def _name(trial: Any) -> str:
    """Return our ID for one of Tune's trials."""
    return trial_id(unwrap(trial.config))
