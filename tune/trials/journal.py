"""The sweep's own durable record: one line of JSON for each trial that ended, written before Tune is told.

`<sweep>/trials/<id>.json` is a whole file, so it works on object stores, which have no append. A resumed sweep
answers a trial that stands here from its record; only the others run. Beside it `boundary.json` keeps which
microbatches are known to fit. A trial of a population (`scheduler: pbt`) has further lines, `<sweep>/population/<id>/
<number>.json`: one for each of its stages, when it begins and again when it has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from trainers.errors import STATUSES, CheckpointError, Status, StorageError
from trainers.storage import Storage
from tune.trials.microbatch_bounds import Boundary
from tune.trials.stop_rule import Purpose

logger = logging.getLogger(__name__)

_BOUNDARY = "boundary.json"


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
    purpose: Purpose = "trial"
    """Why it was run."""
    seed: int | None = None
    """Of a repeat, in place of the configuration's own."""
    samples: float | None = None
    """Training samples seen."""
    epochs: float | None = None
    """Passes over the training split, with the part of the last one."""
    step_time_ci95_s: float | None = None
    """Half width of the 95 % confidence interval of the mean step time."""
    noise_scale: dict[str, float | None] | None = None
    """Gradient noise scale: `value` in samples, and `low` and `high` of 95 %; None is infinite."""
    cpu_pressure: float | None = None
    """Share of its time in which work of rank 0's node waited for a processor (Linux pressure stall information)."""
    message: str = ""
    """What went wrong, in one line."""
    traceback: str = ""
    """The worker's traceback, for status `error`."""
    schedule: list[dict[str, Any]] = field(default_factory=list)
    """Of a population's trial: the course of its weights, as `Stage.schedule` has it."""

    @property
    def exploited_from(self) -> str | None:
        """The trial whose weights it has gone on from; None where they are its own from the first step."""
        return self.schedule[-2]["trial"] if len(self.schedule) > 1 else None


@dataclass(frozen=True)
class Stage:
    """A part of a trial of a population: from one look of the scheduler's at it to the next, in one go on a lane."""

    trial: str
    number: int
    """From 0; how many stages the trial had before."""
    config: dict[str, Any]
    """Dotted TrainConfig keys and the values that this stage trains with."""
    started: float
    """When the trial began, Unix time, s."""
    source: str | None = None
    """The stage, of this trial or of another, whose last checkpoint it begins with; None: it begins the training."""
    schedule: list[dict[str, Any]] = field(default_factory=list)
    """The course of its weights: `config`, and the `trial`, `step` and `epoch` from which on it was trained with."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """What was evaluated of its weights: up to its begin, or to its end once it has `ended`."""
    ended: bool = False

    @property
    def name(self) -> str:
        """Of its directory below the population's, and of its line."""
        return f"{self.trial}/{self.number:05d}"


def trial_id(config: dict[str, Any], purpose: Purpose = "trial", seed: int | None = None) -> str:
    """Ten hex digits that name a configuration; others where it is run for another purpose, or again."""
    named = config if purpose == "trial" else {"purpose": purpose, "seed": seed, "config": config}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


class Journal:
    """The trial records below a sweep's directory."""

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("trials")
        self.population = sweep.child("population")

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

    def write_stage(self, stage: Stage) -> None:
        """Make a stage durable, or what it has become; returns when it is."""
        text = json.dumps(dataclasses.asdict(stage), allow_nan=True)
        self.population.write(f"{stage.name}.json", text.encode())

    def stage(self, name: str) -> Stage:
        """The stage of a name; CheckpointError when it is not there or damaged."""
        try:
            return Stage(**json.loads(self.population.read(f"{name}.json")))
        except (ValueError, TypeError, StorageError) as error:
            raise CheckpointError(f"{self.population.locate(name)} is no stage of a trial: {error}") from error

    def newest_stage(self, trial: str) -> Stage | None:
        """The last stage that a trial has begun."""
        names = [name for name in self.population.names(trial) if name.endswith(".json")]
        return self.stage(f"{trial}/{max(names).removesuffix('.json')}") if names else None

    def stage_directory(self, name: str) -> Storage:
        """Where a stage of a name keeps its run."""
        return self.population.child(*name.split("/"))

    def _read(self, name: str) -> TrialRecord:
        try:
            record = TrialRecord(**json.loads(self._storage.read(name)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._storage.locate(name)} is no trial record: {error}") from error
        if record.status not in STATUSES:
            raise CheckpointError(f"{self._storage.locate(name)} has the unknown status {record.status!r}")
        return record


def read_boundary(sweep: Storage) -> Boundary:
    """What earlier starts of the sweep have learned of microbatches; nothing when that cannot be read."""
    if not sweep.exists(_BOUNDARY):
        return Boundary()
    try:
        return Boundary.from_plain(json.loads(sweep.read(_BOUNDARY)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged (%s): which microbatches fit is learned anew", sweep.locate(_BOUNDARY), error)
        return Boundary()


def write_boundary(sweep: Storage, boundary: Boundary) -> None:
    """Keep what is known of microbatches; returns when it is durable."""
    sweep.write(_BOUNDARY, json.dumps(boundary.to_plain()).encode())
