"""Runs of the suite's own tasks, as specs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainers.checkpoint.manifest import folder_name
from trainers.checkpoint.store import Archive
from trainers.config import TrainConfig
from trainers.config.model import build, override
from trainers.errors import ConfigError
from trainers.launch.spec import RunSpec, make_spec, read_run
from trainers.launch.training import TrainJob
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.storage import Storage, parse_json

REPOSITORY = Path(__file__).parent.parent

if TYPE_CHECKING:
    from trainers.launch.local import LocalContext

BASE = {
    "task": "tests.tasks:Blobs",
    "task_dir": str(REPOSITORY),
    "max_steps": 30,
    "global_batch_size": 24,
    "log_every_steps": 1,
    "optimizer": {"name": "adamw", "lr": 0.01},
    "evaluate": {"every_steps": 10},
    "checkpoint": {"every_steps": 10},
    "launcher": "local",
}


def dotted(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of keys that a keyword cannot name: with `__` for a dot."""
    return {key.replace("__", "."): value for key, value in changes.items()}


def tree(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """BASE with dotted changes (`__` for a dot), stored below `tmp_path`."""
    place = {"storage_path": str(tmp_path / "runs")}
    return override(TrainConfig, BASE, place | dotted(changes))


def make(tmp_path: Path, **changes: Any) -> TrainJob:
    """The same as a job; three workers on two cores will do."""
    made = tree(tmp_path, **changes)
    return as_job(make_spec(made, "test", tmp_path, own_workers=False))


def as_job(spec: RunSpec) -> TrainJob:
    """The training of a run."""
    return TrainJob(**asdict(spec))


def ranked(
    rank: int, world_size: int, place: str | Path | None = None
) -> LocalContext:
    """The context of one rank of a group of processes."""
    from trainers.launch.local import LocalContext

    storage = Storage(place) if place else None
    return LocalContext(storage, "spawn", rank, world_size, rank, world_size)


def train_on(task: Any, context: LocalContext, **changes: Any) -> RunResult:
    """Train a task by BASE with dotted changes, as one rank."""
    from trainers.loop.fit import fit

    config = build(TrainConfig, override(TrainConfig, BASE, changes), "test")
    return fit(task, config, context)


@contextlib.contextmanager
def error_of(field: str, match: str | None = None) -> Iterator[None]:
    """What is done within is a ConfigError of this field."""
    with pytest.raises(ConfigError, match=match) as raised:
        yield
    assert raised.value.field == field


def read_json(file: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(file.read_text(encoding="utf-8"))


def read_spec(
    location: str, overrides: dict[str, Any], world_size: int | None = None
) -> TrainJob:
    """Read the file of a task's run."""
    spec = read_run(location, overrides, world_size)
    assert isinstance(spec, RunSpec)
    return as_job(spec)


def kept_result(path: Path) -> RunResult:
    """The result that a run has left in its directory."""
    return parse_json((path / "result.json").read_bytes(), RunResult)


def logged(place: str | Path, key: str) -> list[dict[str, Any]]:
    """The records of a run's log that have `key`."""
    return [record for record in read_log(Storage(place)) if key in record]


def curve(place: str | Path) -> list[float]:
    """The loss curve that a run has logged, a value a step."""
    return [record["train_loss"] for record in logged(place, "train_loss")]


def losses(spec: RunSpec) -> list[float]:
    """The same of the run of a spec."""
    return curve(spec.uri)


def evaluations(spec: RunSpec) -> list[dict[str, float]]:
    """The evaluations that a run has logged, without times."""
    return [
        {key: value for key, value in record.items() if key != "train_time_s"}
        for record in logged(spec.uri, "val_loss")
    ]


def whole_state(place: str | Path, step: int) -> dict[str, Any]:
    """The state that a run's checkpoint of a step holds, whole, however many
    ranks have written it.
    """
    state, rows = Archive(Storage(place)).read_state(folder_name(step))
    return rows.fill(state) if rows is not None else state
