"""The journal of a sweep: one JSON file for each trial that ended, durable before Ray Tune is told.

`<sweep>/trials/<id>.json` is a whole file because object stores have no append. A resumed sweep answers a trial that
has a record from it and runs only the others. Beside it `boundary.json` keeps which microbatches are known to fit. A
trial of a population (`scheduler: pbt`) also has `<sweep>/population/<id>/<number>.json`: one for each of its stages,
written when it begins and again when it has ended.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import Field

from trainers.errors import CheckpointError, StorageError
from trainers.storage import Storage
from tune.trials.microbatch_bounds import Boundary
from tune.trials.record import Name, Part, Purpose, StageRow, TrialRecord, UnixTime

logger = logging.getLogger(__name__)

_BOUNDARY = "boundary.json"


@dataclass(frozen=True)
class Stage:
    """A part of a trial of a population, between two decisions of the scheduler, run in one go on a lane."""

    trial: Name
    number: Annotated[int, Field(ge=0)]
    """From 0; how many stages the trial had before."""
    config: dict[str, Any]
    """Dotted TrainConfig keys and the values that this stage trains with."""
    started: UnixTime
    """When the trial began, Unix time, s."""
    source: Annotated[str, Field(pattern=r"^\w[\w.-]*/[0-9]+$", max_length=220)] | None = None
    """The stage, of this trial or of another, whose last checkpoint it begins with; None: it begins the training."""
    schedule: list[Part] = field(default_factory=list)
    """The course of its weights."""
    curve: list[StageRow] = field(default_factory=list)
    """Evaluations of its weights: up to its beginning, or to its end once it has `ended`."""
    ended: bool = False

    @property
    def name(self) -> str:
        """Names its directory and its file below the population's directory."""
        return f"{self.trial}/{self.number:05d}"


def trial_id(config: dict[str, Any], purpose: Purpose = "trial", seed: int | None = None) -> str:
    """Return ten hex digits that name a configuration; others where it is run for another purpose or seed."""
    named = config if purpose == "trial" else {"purpose": purpose, "seed": seed, "config": config}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Journal:
    """The trial records below a sweep's directory."""

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("trials")
        self.population = sweep.child("population")

    def append(self, record: TrialRecord) -> None:
        """Write a record; return when it is durable."""
        self._storage.write(f"{record.id}.json", json.dumps(asdict(record)).encode())

    def find(self, trial: str) -> TrialRecord | None:
        """Return the record of a trial that has ended, else None."""
        return self._read(f"{trial}.json") if self._storage.exists(f"{trial}.json") else None

    def records(self) -> list[TrialRecord]:
        """Return all records, in the order in which the trials started."""
        names = [name for name in self._storage.names() if name.endswith(".json")]
        return sorted((self._read(name) for name in names), key=lambda record: (record.start_time, record.id))

    def write_stage(self, stage: Stage) -> None:
        """Write a stage, anew when it has ended; return when it is durable."""
        self.population.write(f"{stage.name}.json", json.dumps(asdict(stage)).encode())

    def stage(self, name: str) -> Stage:
        """Return the stage of a name; raise CheckpointError when it is not there or damaged."""
        try:
            stage = self.population.read_json(f"{name}.json", Stage, finite=False)
        except (CheckpointError, StorageError) as error:
            raise CheckpointError(f"{self.population.locate(name)} is no stage of a trial: {error}") from error
        if stage.name != name:
            raise CheckpointError(f"{self.population.locate(name)} is the stage {stage.name}")
        return stage

    def newest_stage(self, trial: str) -> Stage | None:
        """Return the last stage that a trial has begun."""
        names = [name for name in self.population.names(trial) if name.endswith(".json")]
        return self.stage(f"{trial}/{max(names).removesuffix('.json')}") if names else None

    def stage_directory(self, name: str) -> Storage:
        """Return the directory in which a stage keeps its run."""
        return self.population.child(*name.split("/"))

    def _read(self, name: str) -> TrialRecord:
        where = self._storage.locate(name)
        fix = "delete the file, and the trial runs again"
        try:
            record = self._storage.read_json(name, TrialRecord, finite=False)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {fix}") from None
        # A population's trial keeps its id while its configuration changes.
        configured = record.id if record.schedule else trial_id(record.config, record.purpose, record.seed)
        if not record.id == configured == name.removesuffix(".json"):
            raise CheckpointError(f"{where} is the record of another trial, {configured}; {fix}")
        return record


def read_boundary(sweep: Storage) -> Boundary:
    """Return what earlier starts of the sweep have learned of microbatches; nothing when that cannot be read."""
    try:
        return Boundary.from_plain(sweep.read_json(_BOUNDARY, dict[str, Any]) if sweep.exists(_BOUNDARY) else {})
    except CheckpointError as error:
        logger.warning("%s is damaged (%s): which microbatches fit is learned anew", sweep.locate(_BOUNDARY), error)
        return Boundary()


def write_boundary(sweep: Storage, boundary: Boundary) -> None:
    """Write what is known of microbatches; return when it is durable."""
    sweep.write(_BOUNDARY, json.dumps(boundary.to_plain()).encode())
