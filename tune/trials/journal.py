"""What a sweep keeps in its directory: trial records, progress and memory limits."""

import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from trainers.config.model import Tree
from trainers.errors import CheckpointError, StorageError
from trainers.storage import Storage
from tune.trials.microbatch_bounds import Boundary
from tune.trials.record import Name, TrialRecord, UnixTime, dollars

logger = logging.getLogger(__name__)

PROGRESS = "progress.json"
WRITE_EVERY_S = 3.0
_BOUNDARY = "boundary.json"


@dataclass(frozen=True)
class Running:
    """A trial on a lane."""

    trial: Name
    lane: int
    started: UnixTime
    """Unix time at which the lane took the trial, s."""
    config: Tree = field(default_factory=dict)
    """Its keys and values; for a finalist's repeat, including its seed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Its newest evaluation."""


@dataclass(frozen=True)
class Live:
    """How far a sweep is: `progress.json`, which its driver writes every few seconds.

    An observer needs no connection to the cluster. A driver that was killed
    leaves the last state that it wrote, so use the directory's lease to see
    whether the driver is alive.
    """

    state: Literal["running", "ended", "cut off"]
    total: int | None = None
    """The number of planned trials, if known."""
    num_lanes: int = 0
    """Lanes that are up."""
    running: list[Running] = field(default_factory=list)


def write_live(sweep: Storage, live: Live) -> None:
    """Try to write the progress file once; storage errors do not stop the sweep."""
    content = json.dumps(asdict(live))
    with contextlib.suppress(StorageError), sweep.writer(PROGRESS) as stream:
        stream.write(content.encode())


def write_state(
    sweep: Storage, state: Literal["running", "ended", "cut off"]
) -> None:
    """Write how a start begins or ends; storage errors do not stop the sweep.

    This write is tried again if it fails, because no other follows it soon.
    """
    content = json.dumps(asdict(Live(state)))
    with contextlib.suppress(StorageError):
        sweep.write(PROGRESS, content.encode())


def read_live(sweep: Storage) -> Live | None:
    """Read the progress file; return None if it is missing or damaged."""
    if not sweep.exists(PROGRESS):
        return None
    try:
        return sweep.read_json(PROGRESS, Live)
    except CheckpointError:
        return None


class Journal:
    """The trial records of a sweep, each durable before Tune learns of the trial's end.

    Each trial has its own file, `<sweep>/trials/<id>.json`, because object
    stores cannot append. A resumed sweep takes the results of recorded trials
    from their records, and runs only the others.
    """

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("trials")

    def append(self, record: TrialRecord) -> None:
        """Write a record; return once it is durable."""
        content = json.dumps(asdict(record))
        self._storage.write(f"{record.id}.json", content.encode())

    def tidy(self) -> None:
        """Delete temporary files of killed writers; no trial may be running."""
        self._storage.clear_aside()

    def set_aside(self, record: TrialRecord) -> None:
        """Move a record to `before/`, so that its trial runs again or continues."""
        name = f"before/{record.id}-{record.end_time:.0f}.json"
        content = json.dumps(asdict(record))
        self._storage.parent.write(name, content.encode())
        self._storage.delete(f"{record.id}.json")

    def find(self, trial: str) -> TrialRecord | None:
        """Return the record of a trial that has ended, else None."""
        name = f"{trial}.json"
        return self._read(name) if self._storage.exists(name) else None

    def names(self) -> set[str]:
        """Return the IDs of the trials that have a record, without reading any."""
        files = self._storage.names()
        return {
            name.removesuffix(".json")
            for name in files
            if name.endswith(".json")
        }

    def records(self) -> list[TrialRecord]:
        """Return all records, in the order in which the trials started."""
        found = [self._read(f"{name}.json") for name in self.names()]
        return in_order(found)

    def price(self, lane_usd_per_hour: float | None) -> list[TrialRecord]:
        """Price all trials by the same lane, and return their records."""
        priced = []
        for record in self.records():
            metrics = dict(record.metrics)
            metrics.pop("usd_to_target", None)
            if record.time_to_target_s is not None and lane_usd_per_hour:
                metrics["usd_to_target"] = dollars(
                    record.time_to_target_s, lane_usd_per_hour
                )
            if metrics != record.metrics:
                record = replace(record, metrics=metrics)
                self.append(record)
            priced.append(record)
        return priced

    def _read(self, name: str) -> TrialRecord:
        fix = "delete the file, and the trial runs again"
        try:
            return self._storage.read_json(name, TrialRecord)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {fix}") from None


def in_order(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return records in the order in which their trials started."""
    return sorted(records, key=lambda record: (record.start_time, record.id))


def read_boundary(sweep: Storage) -> Boundary:
    """Return what earlier starts learned about microbatches; empty if damaged."""
    try:
        if not sweep.exists(_BOUNDARY):
            return Boundary()
        content = sweep.read_json(_BOUNDARY, Tree)
        return Boundary.from_plain(content)
    except CheckpointError as error:
        logger.warning(
            "%s is damaged (%s): which microbatches fit is learned again",
            sweep.locate(_BOUNDARY),
            error,
        )
        return Boundary()


def write_boundary(sweep: Storage, boundary: Boundary) -> None:
    """Write what is known about microbatches; return once it is durable."""
    content = json.dumps(boundary.to_plain())
    sweep.write(_BOUNDARY, content.encode())
