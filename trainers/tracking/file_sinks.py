"""Sinks that are files in the directory of the run or the sweep: CSV, and a sweep's TensorBoard events."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from trainers.measure.run_log import encode_events, events_name
from trainers.storage import Storage
from trainers.tracking.sink import Row, Sink, TrackedRun

_FILE = "metrics.csv"
_PLACE = ("run", "step", "time")


class CsvSink(Sink):
    """`metrics.csv`: a row for each step of each run (empty for a run itself), a column for each metric."""

    def __init__(self, project: str | None, storage: Storage) -> None:
        super().__init__(project, storage)
        self._rows: dict[tuple[str, int], dict[str, str]] = {}
        if storage.exists(_FILE):
            for row in csv.DictReader(io.StringIO(storage.read(_FILE).decode())):
                self._rows[row["run"], int(row["step"])] = {name: text for name, text in row.items() if text}

    def start(self, run: TrackedRun) -> str:
        """Rows have the trial's id."""
        return run.key

    def last_steps(self, run: str) -> dict[str, int]:
        """As the file has them."""
        own = sorted((step, row) for (name, step), row in self._rows.items() if name == run)
        return {name: step for step, row in own for name in row if name not in _PLACE}

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Write the file anew: object stores have no append."""
        for row in rows:
            known = self._rows.setdefault(
                (run, row.step), {"run": run, "step": str(row.step), "time": f"{row.time_s:.3f}"}
            )
            known |= {name: repr(value) for name, value in row.values.items()}
        names = dict.fromkeys([*_PLACE, *(name for row in self._rows.values() for name in row)])
        text = io.StringIO()
        writer = csv.DictWriter(text, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows.values())
        self.storage.write(_FILE, text.getvalue().encode())

    def artifact(self, run: str, file: Path) -> None:
        """They are in the directory already."""

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        """A table has no end."""


class EventsSink(Sink):
    """`tensorboard/<trial>/`: a directory for each trial, as TensorBoard shows runs side by side."""

    def start(self, run: TrackedRun) -> str:
        """The sweep itself has a directory, too."""
        return run.key or "sweep"

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """One file for all that is sent at once."""
        records = [(row.time_s, {"step": row.step, **row.values}) for row in rows]
        self.storage.child("tensorboard", run).write(events_name(rows[-1].step), encode_events(records))

    def artifact(self, run: str, file: Path) -> None:
        """TensorBoard has none."""

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        """Nor ends."""
