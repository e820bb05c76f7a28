"""Sinks for the suite's own trackers: what a user would write, and what must not happen to a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from trainers.storage import Storage
from trainers.tracking.sink import Row, Sink, TrackedRun

importing: list[int] = []
"""Which modules are being imported."""


class Told(Sink):
    """Keeps what it was told, in the test's process."""

    asked = False
    """Whether it can be asked for what it has."""

    def __init__(self, project: str | None = None, storage: Storage | None = None) -> None:
        super().__init__(project, storage or Storage("/nowhere"))
        self.runs: list[TrackedRun] = []
        self.rows: list[Row] = []
        self.ends: list[tuple[str, str]] = []
        self.files: dict[str, bytes] = {}

    def start(self, run: TrackedRun) -> str:
        self.runs.append(run)
        return f"run-{run.id}"

    def last_steps(self, run: str) -> dict[str, int] | None:
        return {name: row.step for row in self.rows for name in row.values} if self.asked else None

    def log(self, run: str, rows: Sequence[Row]) -> None:
        self.rows += rows

    def artifact(self, run: str, file: Path) -> None:
        self.files[file.name] = file.read_bytes()

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        self.ends.append((run, status))


class Gated(Told):
    """Answers nothing until a file is there, then writes what it has to `told.json`; for a process of its own."""

    def start(self, run: TrackedRun) -> str:
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.05)
        return run.id

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        self.storage.write("told.json", json.dumps([status, *self.rows]).encode())


class Holding(Told):
    """Holds what it is told until it is closed, as clients do whose threads send it; the first one fails."""

    kept: ClassVar[list[Row]] = []
    failed: ClassVar[list[int]] = []
    held: ClassVar[list[list[Row]]] = []

    def start(self, run: TrackedRun) -> str:
        self.held.append(self.rows)
        return run.id

    def last_steps(self, run: str) -> dict[str, int]:
        return {name: row.step for row in self.kept for name in row.values}

    def log(self, run: str, rows: Sequence[Row]) -> None:
        super().log(run, rows)
        if not self.failed:
            self.failed.append(len(rows))
            raise OSError("not now")

    def close(self) -> None:
        self.held.remove(self.rows)
        self.kept += self.rows
