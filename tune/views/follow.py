"""A sweep's directory as it changes: what it says of the sweep by now, and its report. Only reads."""

import hashlib
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trainers.config.function import build_run
from trainers.errors import CheckpointError, ConfigError, PacelineError, StorageError, counted
from trainers.lease import LEASE, STALE_S, Holder
from trainers.redaction import redact
from trainers.storage import Storage, storage_uri
from tune.report.answer import answer
from tune.report.canvas import Figure
from tune.report.figures import figures
from tune.report.page import contents, render
from tune.report.words import duration, in_short, labels
from tune.report.write import best_tree, read_environment
from tune.search.finalists import repeats_to_run
from tune.sweeps.spec import SAVED, SweepSpec, is_complete, read_kept
from tune.trials.journal import Journal, trial_id
from tune.trials.live import Live, read_live
from tune.trials.record import TrialRecord

_LOOK_S = 1.0
_SHARE = 0.1
"""Of its time that the process may spend on drawing figures, and on the rest of the page."""
_QUIET_S, _QUIET_TRIALS = 600.0, 3.0
"""Nothing new for this long, and for so many times the longest trial, is said."""

Kind = Literal["waiting", "running", "quiet", "cut", "ended"]


@dataclass(frozen=True)
class Seen:
    """What a look at the directory has found."""

    uri: str
    has_sweep: bool = False
    holder: Holder | None = None
    """Of the lease: the process that runs the sweep, or ran it until it was killed."""
    holder_idle_s: float = 0.0
    """For how long its lease has not moved, as far as this process has seen."""
    live: Live | None = None
    records: list[TrialRecord] = field(default_factory=list)
    is_complete: bool = False
    """Whether every trial has a record."""
    idle_s: float = 0.0
    """For how long nothing of a trial is new."""


def judge(seen: Seen) -> tuple[Kind, str]:
    """Return how a sweep is, and that as a sentence."""
    holder, live = seen.holder, seen.live
    num_repeats = sum(record.purpose == "repeat" for record in seen.records)
    num_trials, repeats = len(seen.records) - num_repeats, counted(num_repeats, "repeat")
    ended = counted(num_trials, "trial") + f" and {repeats}" * bool(num_repeats)
    is_alive = holder is not None and (holder.is_alive if holder.is_here else seen.holder_idle_s <= STALE_S)
    if not seen.has_sweep:
        begins = f"A sweep begins in {seen.uri}." if is_alive else f"{seen.uri} holds no sweep yet."
        return "waiting", f"{begins} This page shows it as soon as it is there."
    if is_alive:
        live = live if live is not None and live.state == "running" else None  # else it is of the start before
        planned = f" of {live.total}" if live is not None and live.total else ""
        if not seen.records and (live is None or not live.num_lanes):
            return "running", "Starting: no lane is up yet."
        longest_s = max((one.end_time - one.start_time for one in seen.records), default=0.0)
        if seen.idle_s > max(_QUIET_S, _QUIET_TRIALS * longest_s):
            why = "its trials may hang, or wait for nodes"
            return "quiet", f"Nothing new for {duration(seen.idle_s)}, though the sweep's process is alive: {why}."
        lanes = f" {counted(live.num_lanes, 'lane')} up." if live is not None else ""
        of_repeats = f", and {repeats} of the best" * bool(num_repeats)
        return "running", f"Running: {num_trials}{planned} trials have ended{of_repeats}.{lanes}"
    state = live.state if live is not None and holder is None else None
    if state == "ended" or (state is None and holder is None and seen.is_complete):
        return "ended", f"The sweep has ended, with {ended}."
    what = "its process has ended without an answer" if holder is not None else "it was stopped before its end"
    return "cut", f"Cut off: {what}; {ended} are kept. `python -m tune resume {shlex.quote(seen.uri)}` goes on."


class Follow:
    """A sweep's directory, which need not be there yet; from any thread."""

    def __init__(self, location: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.storage = Storage(storage_uri(location))
        self._clock, self._lock = clock, threading.Lock()
        self._look_at = self._drawing_s = 0.0
        self._page = ("", "")
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the sweep: it is another one."""
        self._saved = b""
        self._spec: SweepSpec | None = None
        self._records: dict[str, TrialRecord] = {}
        self._damaged: dict[str, str] = {}
        self._drawn: tuple[Any, dict[str, Any]] | None = None
        self._figures: tuple[list[str], list[Figure]] = ([], [])
        self._may_draw = 0.0
        self._lease: tuple[bytes, float] = (b"", self._clock())
        self._news: tuple[Any, float] = (None, self._clock())

    def page(self) -> tuple[str, str]:
        """Return the page as it was a second ago, or longer where it is large, and its version."""
        with self._lock:
            began = self._clock()
            if began >= self._look_at:
                self._drawing_s = 0.0
                html = self._look()
                self._page = html, f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"'
                cost_s = self._clock() - began - self._drawing_s
                self._look_at = began + max(_LOOK_S, cost_s / _SHARE)
            return self._page

    def _look(self) -> str:
        try:
            seen = self._see()
        except (PacelineError, OSError) as error:
            shown = self._shown("waiting" if self._drawn is None else "quiet", redact(f"{error}"), [], None)
        else:
            notes = list(self._damaged.values())
            kind, sentence = judge(seen)
            if kind in ("running", "quiet") and seen.live is None and seen.records:
                notes.append("Which trials run now is not known: the sweep's directory has no progress.json.")
            self._draw(seen, kind)
            if self._drawn is not None and len(seen.records) > (drawn := len(self._figures[0])):
                notes.append(f"The figures have the first {drawn} trials, until they are drawn again.")
            shown = self._shown(kind, redact(sentence), notes, seen.live if kind in ("running", "quiet") else None)
        if self._drawn is None:
            return render("waiting.html", live=shown)
        return render("report.html", **{**self._drawn[1], "live": shown})

    def _shown(self, kind: Kind, sentence: str, notes: list[str], live: Live | None) -> dict[str, Any]:
        """Return what live.html shows."""
        rows, repeats = [], self._repeats() if live is not None and live.running else {}
        for one in live.running if live is not None else ():
            if one.trial in self._records:
                continue
            words, (config, seed) = one.trial, repeats.get(one.trial, (one.config, None))
            if self._spec is not None and config:
                known = TrialRecord(one.trial, config, "done", 0.0, 0.0)
                words = in_short(labels(self._spec.config, [known]), known) + (f", repeat, seed {seed}" if seed else "")
            newest = [f"{key} {one.metrics[key]:.4g}" for key in one.metrics if key.startswith(("val_", "train_l"))]
            step = f"{one.metrics['step']:g}" if "step" in one.metrics else ""
            rows.append((one.lane, words, step, "  ".join(newest), duration(max(0.0, time.time() - one.started))))
        return {"kind": kind, "sentence": sentence, "notes": notes, "running": rows}

    def _see(self) -> Seen:
        """Read what is new."""
        storage, now = self.storage, self._clock()
        data = storage.read(LEASE) if storage.exists(LEASE) else b""
        holder = Holder.read(data) if data else None
        before = Holder.read(self._lease[0]) if self._lease[0] else None
        saved = storage.read(SAVED) if storage.exists(SAVED) else b""
        another = holder is not None and before is not None and holder.token != before.token
        if saved != self._saved or another:
            self._forget()
            self._saved, self._spec = saved, read_kept(storage.uri) if saved else None
        if data != self._lease[0]:
            self._lease = data, now
        live = read_live(storage)
        self._read_records()
        records = sorted(self._records.values(), key=lambda record: (record.start_time, record.id))
        news = len(records), live and [(one.trial, one.metrics.get("step")) for one in live.running]
        if news != self._news[0]:
            self._news = news, now
        is_old = holder is None and live is None and self._spec is not None and self._spec.config.search != "random"
        complete = is_old and self._spec is not None and is_complete(self._spec, records)
        idle_s, holder_idle_s = now - self._news[1], now - self._lease[1]
        return Seen(storage.uri, bool(saved), holder, holder_idle_s, live, records, complete, idle_s)

    def _read_records(self) -> None:
        """Read the records that are new, each once; one that is damaged is named."""
        names = {name.removesuffix(".json") for name in self.storage.names("trials") if name.endswith(".json")}
        journal = Journal(self.storage)
        self._records = {name: record for name, record in self._records.items() if name in names}
        self._damaged = {name: words for name, words in self._damaged.items() if name in names}
        for name in sorted(names - self._records.keys() - self._damaged.keys()):
            try:
                record = journal.find(name)
            except CheckpointError as error:
                self._damaged[name] = redact(f"{error}")
            except StorageError:
                continue  # it was deleted between the list and the look
            else:
                if record is not None:
                    self._records[name] = record

    def _repeats(self) -> dict[str, tuple[dict[str, Any], int]]:
        """Return configuration and seed of the repeats that are to come, by their ids."""
        if self._spec is None:
            return {}
        wanted = repeats_to_run(self._spec.config, self._spec.train, list(self._records.values()))
        return {trial_id(one.config, "repeat", seed): (one.config, seed) for one, seed in wanted}

    def _draw(self, seen: Seen, kind: Kind) -> None:
        """Make the report anew where a record is new or the sweep has ended; its figures when it is time for that."""
        spec, records = self._spec, seen.records
        what = [record.id for record in records], kind == "ended"
        if spec is None or (self._drawn is not None and self._drawn[0] == what and self._figures[0] == what[0]):
            return
        found = answer(spec.config, records)
        began = self._clock()
        if self._figures[0] != what[0] and (began >= self._may_draw or kind in ("ended", "cut")):
            self._figures = what[0], figures(spec.config, records, found.best)
            self._drawing_s = self._clock() - began
            self._may_draw = self._clock() + self._drawing_s / _SHARE
        if self._drawn is not None and self._drawn[0] == what and self._drawn[1]["figures"] is self._figures[1]:
            return
        tree = best_tree(spec.config, spec.train, found, spec.storage, None)
        try:
            resolved = build_run(tree, "best.yaml").tree() if tree is not None else spec.train
        except ConfigError:  # of a version with other keys
            resolved = tree or spec.train
        args = spec.storage, spec.config, resolved, records, read_environment(spec.storage), found
        self._drawn = what, contents(*args, drawn=self._figures[1])
