"""Send what a run left on storage to one tracker, each step at least once.

A run has the same id in every resume.

`tracking/<tracker>.json` in the run's directory keeps, for the run (of a sweep for each
trial too), the id and what was sent. Storage is the queue: what a tracker has not got
is sent later, by this process or the next.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainers.config.tracking import TrackerConfig
from trainers.errors import LeaseError, first_line
from trainers.redaction import redact
from trainers.storage import Storage
from trainers.tracking.history import History, Source
from trainers.tracking.sink import Row, Sink, TrackedRun
from trainers.tracking.sinks import make_sink

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
_RETRY_S = 20.0
_SHARE = 20
"""A pause is so many times as long as the sending before it: no more than 5 % of a core
goes to one tracker.
"""


@dataclass
class Sent:
    """What one tracker has of one run."""

    id: str
    """Ours; a tracker that lets its users choose ids has it, too."""
    run: str | None = None
    """The tracker's own name of the run."""
    last: dict[str, int] = field(default_factory=dict)
    """For each metric the last step."""
    ended: str | None = None

    def new_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the values of later steps than were sent, a row for each step."""
        last = dict(self.last)
        found: dict[int, Row] = {}
        for row in rows:
            new = {
                name: value
                for name, value in row.values.items()
                if row.step > last.get(name, -1)
            }
            last |= dict.fromkeys(new, row.step)
            if new:
                known = found.get(row.step, row._replace(values={}))
                found[row.step] = row._replace(values=known.values | new)
        return list(found.values())


def _file(tracker: str) -> str:
    return f"tracking/{re.sub(r'[^A-Za-z0-9_]', '_', tracker)}.json"


def read_sent(storage: Storage, tracker: str) -> dict[str, Sent]:
    """What a tracker has, by the trial's id (empty for the run or the sweep itself)."""
    name = _file(tracker)
    return storage.read_json(name, dict[str, Sent]) if storage.exists(name) else {}


class Delivery:
    """One tracker of a run or a sweep."""

    def __init__(
        self,
        tracker: TrackerConfig,
        path: Sequence[str],
        storage: Storage,
        make_source: Callable[[Storage], Source],
    ) -> None:
        """`path` has the directories of the user's modules."""
        self.name = tracker.tracker
        self.is_over = False
        """Whether the tracker has all, or another process sends the rest."""
        self._tracker = tracker
        self._path = path
        self._storage = storage
        self._make_source = make_source
        self._has_ended = threading.Event()
        self._how: str | None = None

    def end(self, how: str) -> None:
        """The driver has ended; `follow` sends the rest, and returns."""
        self._how = how
        self._has_ended.set()

    def follow(self) -> None:
        """Send until the driver has ended and everything is sent; the body of a thread."""
        has_warned = False
        while not self.is_over:
            try:
                sink = make_sink(self._tracker, self._path, self._storage)
                try:
                    self._send_to(sink)
                finally:
                    sink.close()
                self.is_over = True
            except LeaseError:
                self.is_over = True
            except Exception as error:  # nobody knows what it took: a new sink, and a new look at everything
                if not has_warned:
                    has_warned = True
                    words = redact(f"{type(error).__name__}: {first_line(error)}")
                    logger.warning(
                        "tracking: %s cannot be told now (%s); it is tried again",
                        self.name,
                        words,
                    )
                if self._has_ended.is_set():
                    return
                self._has_ended.wait(_RETRY_S)

    def _send_to(self, sink: Sink) -> None:
        """Send what there is, again and again until the driver has ended."""
        self._sent = read_sent(self._storage, self.name)
        self._started: set[str] = set()
        source = self._make_source(self._storage)
        while True:
            is_last = self._has_ended.is_set()
            began = time.monotonic()
            for history in source.poll(self._how):
                self._send_history(sink, history)
            if is_last:
                return
            took_s = time.monotonic() - began
            self._has_ended.wait(max(LOOK_EVERY_S, _SHARE * took_s))

    def _send_history(self, sink: Sink, history: History) -> None:
        sent = self._sent.setdefault(history.key, Sent(secrets.token_hex(8)))
        has_ended = history.ended is not None and sent.ended != history.ended
        if not sent.new_rows(history.rows) and not has_ended and sent.run is not None:
            return
        if history.key not in self._started:
            self._start(sink, history, sent)
        assert sent.run is not None
        rows = sent.new_rows(history.rows)
        if rows:
            sink.log(sent.run, rows)
            for row in rows:
                sent.last |= dict.fromkeys(row.values, row.step)
            self._note()
        if history.ended is not None:
            with tempfile.TemporaryDirectory(prefix="paceline-tracking-") as directory:
                for name, content in history.artifacts.items():
                    file = Path(directory, name)
                    file.write_bytes(content)
                    sink.artifact(sent.run, file)
            sink.end(sent.run, history.ended, history.tags)
            sent.ended = history.ended
            self._started.discard(history.key)
            self._note()

    def _start(self, sink: Sink, history: History, sent: Sent) -> None:
        # the id, before anybody is asked to make a run of it; LeaseError where another
        # start has the run
        self._note()
        parent = self._sent[""].run if history.key else None
        about = (
            history.key,
            history.name,
            history.kind,
            history.params,
            history.tags,
            parent,
        )
        run = sink.start(TrackedRun(sent.id, *about))
        if run != sent.run:
            sent.run = run
            sent.last = {}
        sent.ended = None
        self._started.add(history.key)
        self._note()

    def _note(self) -> None:
        everything = {key: asdict(sent) for key, sent in self._sent.items()}
        self._storage.write(_file(self.name), json.dumps(everything).encode())
