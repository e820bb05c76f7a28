"""What a sweep keeps in its directory: trials that ended, how far it is, what fits."""

import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from trainers.config.model import Tree
from trainers.errors import CheckpointError, StorageError
from trainers.storage import Storage
from tune.trials.microbatch_bounds import Boundary
from tune.trials.record import Name, TrialRecord, UnixTime, trial_id

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
    """When the lane took it, Unix time, s."""
    config: Tree = field(default_factory=dict)
    """Of a repeat of a finalist with its seed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Its newest evaluation."""


@dataclass(frozen=True)
class Live:
    """How far a sweep is: `progress.json`, which its driver writes every few seconds.

    Who watches needs no connection to the cluster. A driver that was killed leaves what
    it wrote last: whether it is alive the directory's lease tells.
    """

    state: Literal["running", "ended", "cut off"]
    total: int | None = None
    """Trials that are planned, where that is known."""
    num_lanes: int = 0
    """Lanes that are up."""
    running: list[Running] = field(default_factory=list)


def write_live(sweep: Storage, live: Live) -> None:
    """Write it once; where that fails, or the lease is another's, the sweep goes on."""
    content = json.dumps(asdict(live))
    with contextlib.suppress(StorageError), sweep.writer(PROGRESS) as stream:
        stream.write(content.encode())


def read_live(sweep: Storage) -> Live | None:
    """Return what it says; None where there is none, or it is damaged."""
    if not sweep.exists(PROGRESS):
        return None
    try:
        return sweep.read_json(PROGRESS, Live, finite=False)
    except CheckpointError:
        return None


class Journal:
    """The trial records of a sweep: a file each, durable before Tune is told.

    `<sweep>/trials/<id>.json` is a whole file because object stores have no append. A
    resumed sweep answers a trial that has a record from it and runs only the others.
    """

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("trials")

    def append(self, record: TrialRecord) -> None:
        """Write a record; return when it is durable."""
        content = json.dumps(asdict(record))
        self._storage.write(f"{record.id}.json", content.encode())

    def set_aside(self, record: TrialRecord) -> None:
        """Move a record out of the way, to `before/`: its trial runs again, or goes on."""
        name = f"before/{record.id}-{record.end_time:.0f}.json"
        content = json.dumps(asdict(record))
        self._storage.parent.write(name, content.encode())
        self._storage.delete(f"{record.id}.json")

    def find(self, trial: str) -> TrialRecord | None:
        """Return the record of a trial that has ended, else None."""
        name = f"{trial}.json"
        return self._read(name) if self._storage.exists(name) else None

    def names(self) -> set[str]:
        """Return the ids of the trials that have a record, and read none."""
        files = self._storage.names()
        return {name.removesuffix(".json") for name in files if name.endswith(".json")}

    def records(self) -> list[TrialRecord]:
        """Return all records, in the order in which the trials started."""
        found = [self._read(f"{name}.json") for name in self.names()]
        return in_order(found)

    def _read(self, name: str) -> TrialRecord:
        fix = "delete the file, and the trial runs again"
        try:
            record = self._storage.read_json(name, TrialRecord, finite=False)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {fix}") from None
        configured = trial_id(record.config, record.purpose, record.seed)
        if not record.id == configured == name.removesuffix(".json"):
            where = self._storage.locate(name)
            raise CheckpointError(
                f"{where} is the record of another trial, {configured}; {fix}"
            )
        return record


def in_order(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return records in the order in which their trials started."""
    return sorted(records, key=lambda record: (record.start_time, record.id))


def read_boundary(sweep: Storage) -> Boundary:
    """Return what earlier starts learned of microbatches; nothing where it is damaged."""
    try:
        if not sweep.exists(_BOUNDARY):
            return Boundary()
        content = sweep.read_json(_BOUNDARY, Tree)
        return Boundary.from_plain(content)
    except CheckpointError as error:
        logger.warning(
            "%s is damaged (%s): which microbatches fit is learned anew",
            sweep.locate(_BOUNDARY),
            error,
        )
        return Boundary()


def write_boundary(sweep: Storage, boundary: Boundary) -> None:
    """Write what is known of microbatches; return when it is durable."""
    content = json.dumps(boundary.to_plain())
    sweep.write(_BOUNDARY, content.encode())
