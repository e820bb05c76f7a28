"""Open a run on storage, for every command but training: its configuration and one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.checkpoint.manifest import Best, Manifest
from trainers.checkpoint.store import Archive
from trainers.checkpoint.validation import check_state
from trainers.config import TrainConfig
from trainers.errors import CheckpointError, ConfigError
from trainers.launch.run_directory import open_run
from trainers.launch.spec import read_mapping
from trainers.storage import Storage


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, verified against its manifest."""

    name: str
    manifest: Manifest
    state: dict[str, Any]
    """As trainers/checkpoint/run_state.py wrote it, on the CPU; of a sharded one the model's and the task's tensors."""


@dataclass(frozen=True)
class SavedRun:
    """A run's directory and the configuration that trained it last."""

    storage: Storage
    config: TrainConfig

    @staticmethod
    def open(location: str) -> SavedRun:
        """Open the run in a directory or URI; ConfigError when there is none."""
        return SavedRun(*open_run(location))

    def checkpoint(self, which: str) -> SavedCheckpoint:
        """Read the checkpoint `newest`, `best` or `step-123`.

        Raises ConfigError when there is none, CheckpointError when it holds more than tensors and plain data.
        """
        trained_as = read_mapping(self.storage, "config.yaml")  # the command's own may say another precision
        archive = Archive(self.storage, Best.of(self.config.checkpoint), trained_as)
        try:
            name = archive.choose(which)
        except CheckpointError as error:
            raise ConfigError("--checkpoint", which, str(error), "give newest, best or step-N") from error
        return SavedCheckpoint(name, archive.manifest(name), read_trained(archive, name))


def read_trained(archive: Archive, name: str) -> dict[str, Any]:
    """The state of a checkpoint, whose tensors of the model and of the task are whole; CheckpointError when it is none.

    Others may be on the meta device: nobody needs them who does not train on.
    """
    state, rows = archive.read_state(name)
    try:
        check_state(state, name, rows is not None)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {archive.storage.locate(name)} cannot be used: {error}") from None
    if rows is not None:
        state |= {section: rows.fill(state[section]) for section in ("model", "task")}
    return state
