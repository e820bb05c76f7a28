"""Sink: what an experiment tracker has to do.

A sink of your own derives from it (`tracking: [my_module:MySink]`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainers.storage import Storage


class Row(NamedTuple):
    """Metrics of one step."""

    step: int
    time_s: float
    """Unix time."""
    values: dict[str, float]
    """By name; may be NaN or infinite."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it."""

    id: str
    """Hex digits, the same in every resume and different in every tracker."""
    key: str
    """Empty for a run or a sweep; for a trial its id."""
    name: str
    kind: str
    """run, sweep or trial."""
    params: dict[str, str | int | float | bool]
    """The resolved configuration by dotted keys."""
    tags: dict[str, str]
    """Versions, hardware, git commit, and where the run is."""
    parent: str | None = None
    """Of a trial, what `start` of its sweep returned."""


class Sink(ABC):
    """One tracker.

    All calls come from one thread, of a process in which nothing trains.

    Any method may raise or block: what was not taken is sent again, to a new instance.
    So `start` must find the run that it was asked to start before, and a step that
    comes again stands in place of the one before.
    """

    def __init__(self, project: str | None, storage: Storage) -> None:
        """Take the configuration's `project` and the directory of the run or sweep."""
        self.project = project
        self.storage = storage

    @abstractmethod
    def start(self, run: TrackedRun) -> str:
        """Begin the run `run.id`, or go on with it; return the tracker's name of it.

        Another name where it is new.

        Called once in each process for each run that has something to send.
        """

    @abstractmethod
    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Take metrics, in the order of the log."""

    # What not every tracker has.

    def artifact(self, run: str, file: Path) -> None:  # noqa: B027
        """Take a file, in place of an earlier one of its name."""

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:  # noqa: B027
        """End the run with a status of `trainers.errors`, or `killed`."""

    def close(self) -> None:  # noqa: B027
        """Called when nothing more will come."""
