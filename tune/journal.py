"""The sweep's own durable record: one line of JSON for each trial that ended, written before Tune is told.

`<sweep>/trials/<id>.json` is a whole file, so it works on object stores, which have no append. A resumed sweep
answers a trial that stands here from its record; only the others run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from trainers.errors import STATUSES, CheckpointError, Status
from trainers.storage import Storage


@dataclass(frozen=True)
class TrialRecord:
    """How one trial ended."""

    id: str
    """Digest of `config`: the same configuration has the same id in every resume."""
    config: dict[str, Any]
    """Dotted TrainConfig keys and the values that the search gave them."""
    status: Status
    start_time: float
    """Unix time, s."""
    end_time: float
    """Unix time, s."""
    samples_per_s: float | None = None
    """Training throughput after warm-up, evaluation left out."""
    step_time_s: float | None = None
    """Median time of a step."""
    peak_memory_bytes: int | None = None
    """Peak of the device's memory; of the worker's resident memory on a CPU. Largest over ranks."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of everything that was reported: train_loss, val_loss, val_accuracy, ..."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """One row an evaluation: step, epoch, train_time_s, train_loss, val_loss, ..."""
    time_to_target_s: float | None = None
    """Training time until the objective's target was first reached; None when it was not."""
    lane: int | None = None
    """The lane that ran it."""
    message: str = ""
    """What went wrong, in one line."""
    traceback: str = ""
    """The worker's traceback, for status `error`."""


def trial_id(config: dict[str, Any]) -> str:
    """Ten hex digits that name a configuration."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Journal:
    """The trial records below a sweep's directory."""

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("trials")

    def append(self, record: TrialRecord) -> None:
        """Make a record durable; returns when it is."""
        text = json.dumps(dataclasses.asdict(record), allow_nan=True)
        self._storage.write(f"{record.id}.json", text.encode())

    def find(self, trial: str) -> TrialRecord | None:
        """The record of a trial, when it has ended."""
        return self._read(f"{trial}.json") if self._storage.exists(f"{trial}.json") else None

    def records(self) -> list[TrialRecord]:
        """All records, in the order in which the trials started."""
        names = [name for name in self._storage.names() if name.endswith(".json")]
        return sorted((self._read(name) for name in names), key=lambda record: (record.start_time, record.id))

    def _read(self, name: str) -> TrialRecord:
        try:
            record = TrialRecord(**json.loads(self._storage.read(name)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._storage.locate(name)} is no trial record: {error}") from error
        if record.status not in STATUSES:
            raise CheckpointError(f"{self._storage.locate(name)} has the unknown status {record.status!r}")
        return record
