"""Sinks for the suite's own trackers: what a user would write, and what must
not happen to a run.
"""

import json
import os
import time
from pathlib import Path
from typing import ClassVar

from trainers.storage import Storage
from trainers.tracking.sinks import Row, Sink


class Told(Sink):
    """Keeps what it was told, in the test's process."""

    def __init__(self, project=None, storage=None):
        super().__init__(project, storage or Storage("/nowhere"))
        self.runs = []
        self.rows = []
        self.ends = []
        self.files = {}

    def start(self, run):
        self.runs.append(run)
        return f"run-{run.id}"

    def log(self, run, rows):
        self.rows += rows

    def artifact(self, run, file):
        self.files[file.name] = file.read_bytes()

    def end(self, run, status, tags):
        self.ends.append((run, status))


class Gated(Told):
    """Answers nothing until a file is there, then writes what it has to
    `told.json`; for a process of its own.
    """

    def start(self, run):
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.05)
        return run.id

    def end(self, run, status, tags):
        self.storage.write(
            "told.json", json.dumps([status, *self.rows]).encode()
        )


class Failing(Told):
    """The first one takes nothing."""

    kept: ClassVar[list[Row]] = []
    has_failed: ClassVar[list[bool]] = []

    def log(self, run, rows):
        if not self.has_failed:
            self.has_failed.append(True)
            raise OSError("not now")
        self.kept += rows


class Buffered(Told):
    """Keeps what it was told when its run has ended, which the first time it has not."""

    keeps_at_end = True

    def __init__(self):
        super().__init__()
        self.has_died = False
        self.buffer = []

    def log(self, run, rows):
        self.buffer += rows

    def end(self, run, status, tags):
        if not self.has_died:
            self.has_died = True
            self.buffer = []
            raise OSError("gone")
        self.rows += self.buffer
