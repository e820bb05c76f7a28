"""Delivery of histories to one tracker: under the same id in every resume, and each metric once for each step.

`tracking/<tracker>.json` in the run's directory keeps, for the run (of a sweep for each trial too), the id and what was
sent. A tracker that can be asked is: it is right where a process was killed between sending and noting that.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainers.storage import Storage
from trainers.tracking.history import History
from trainers.tracking.sink import Row, Sink, TrackedRun


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


def read_sent(storage: Storage, tracker: str) -> dict[str, Sent]:
    """What a tracker has, by the trial's id (empty for the run or the sweep itself)."""
    name = _file(tracker)
    return storage.read_json(name, dict[str, Sent]) if storage.exists(name) else {}


def _file(tracker: str) -> str:
    return f"tracking/{re.sub(r'[^A-Za-z0-9_]', '_', tracker)}.json"


class Delivery:
    """Sends to one tracker what it does not have."""

    def __init__(self, tracker: str, storage: Storage, sink: Sink) -> None:
        self._file, self._storage, self._sink = _file(tracker), storage, sink
        self._sent = read_sent(storage, tracker)
        self._started: set[str] = set()

    def send(self, histories: Sequence[History], heard: Callable[[], None] = lambda: None) -> None:
        """Send what is new; `heard` is called whenever the tracker has answered."""
        for history in histories:
            self._send(history, heard)

    def _send(self, history: History, heard: Callable[[], None]) -> None:
        sent = self._sent.get(history.key)
        if sent is not None and history.key not in self._started and self._is_all(history, sent):
            return
        if sent is None:
            sent = self._sent[history.key] = Sent(secrets.token_hex(8))
            self._note()  # before anybody is asked to make a run of this id
        if history.key not in self._started:
            self._start(history, sent)
            heard()
        assert sent.run is not None
        rows = self._unsent(history.rows, sent)
        if rows:
            self._note()  # LeaseError where another start has taken the run over: that one sends them
            self._sink.log(sent.run, rows)
            for row in rows:
                sent.last |= dict.fromkeys(row.values, row.step)
            sent.ended = None
            self._note()
            heard()
        if history.ended is not None and sent.ended != history.ended:
            with tempfile.TemporaryDirectory(prefix="paceline-tracking-") as directory:
                for name, content in history.artifacts.items():
                    file = Path(directory, name)
                    file.write_bytes(content)
                    self._sink.artifact(sent.run, file)
                    heard()
            self._sink.end(sent.run, history.ended, history.tags)
            sent.ended = history.ended
            self._started.discard(history.key)
            self._note()
            heard()

    def _start(self, history: History, sent: Sent) -> None:
        parent = self._sent[""].run if history.key else None
        about = history.key, history.name, history.kind, history.params, history.tags, parent
        run = self._sink.start(TrackedRun(sent.id, *about))
        if run != sent.run:
            sent.run, sent.last = run, {}
        elif (last := self._sink.last_steps(run)) is not None:
            sent.last = dict(last)
        self._started.add(history.key)
        sent.ended = None
        self._note()

    def _unsent(self, rows: Sequence[Row], sent: Sent) -> list[Row]:
        last = dict(sent.last)
        found: list[Row] = []
        for row in rows:
            values = {self._sink.metric(name): value for name, value in row.values.items()}
            new = {name: value for name, value in values.items() if row.step > last.get(name, -1)}
            last |= dict.fromkeys(new, row.step)
            if new and found and found[-1].step == row.step:
                found[-1] = row._replace(values=found[-1].values | new)
            elif new:
                found.append(row._replace(values=new))
        return found

    def _is_all(self, history: History, sent: Sent) -> bool:
        return history.ended is not None and sent.ended == history.ended and not self._unsent(history.rows, sent)

    def _note(self) -> None:
        everything = {key: asdict(sent) for key, sent in self._sent.items()}
        self._storage.write(self._file, json.dumps(everything).encode())
