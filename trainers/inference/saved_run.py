"""Open a run on storage: its configuration and a checkpoint; export the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from trainers.checkpoint.manifest import Best, Manifest
from trainers.checkpoint.store import Archive
from trainers.checkpoint.validation import check_state
from trainers.config import TrainConfig
from trainers.errors import CheckpointError, ConfigError
from trainers.launch.run_directory import open_run
from trainers.launch.spec import read_mapping
from trainers.storage import Storage, storage_uri


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, verified against its manifest."""

    name: str
    manifest: Manifest
    state: dict[str, Any]
    """As trainers/checkpoint/run_state.py wrote it, on the CPU; of a sharded one the
    model's and the task's tensors.
    """


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

        Raises ConfigError when there is none, CheckpointError when it holds more than
        tensors and plain data.
        """
        trained_as = read_mapping(
            self.storage, "config.yaml"
        )  # the command's own may say another precision
        archive = Archive(self.storage, Best.of(self.config.checkpoint), trained_as)
        try:
            name = archive.choose(which)
        except CheckpointError as error:
            raise ConfigError(
                "--checkpoint", which, str(error), "give newest, best or step-N"
            ) from error
        return SavedCheckpoint(
            name, archive.manifest(name), read_trained(archive, name)
        )


def read_trained(archive: Archive, name: str) -> dict[str, Any]:
    """Return a checkpoint's state, with the whole tensors of model and task.

    CheckpointError when it is none.

    Others may be on the meta device: nobody needs them who does not train on.
    """
    state, rows = archive.read_state(name)
    try:
        check_state(state, name, rows is not None)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {archive.storage.locate(name)} cannot be used: {error}"
        ) from None
    if rows is not None:
        state |= {section: rows.fill(state[section]) for section in ("model", "task")}
    return state


def export(location: str, out: str, which: str = "newest") -> str:
    """Write the model of a checkpoint to `out`, a file or URI; say what was written.

    The names are those of the task's bare model. Tensors that share memory are written
    under each of their names, so that `load_state_dict` takes the file as it is. Raises
    ConfigError, CheckpointError, StorageError.
    """
    if not out.endswith(".safetensors"):
        raise ConfigError(
            "--out",
            out,
            "must be the name of a safetensors file",
            "end it in .safetensors",
        )
    run = SavedRun.open(location)
    checkpoint = run.checkpoint(which)
    try:
        weights = {
            name: _own(name, value) for name, value in checkpoint.state["model"].items()
        }
    except (KeyError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.name} is no checkpoint of ours: it has no model"
        ) from error
    manifest = checkpoint.manifest
    described = {
        "format": "pt",  # what other readers ask for
        "task": run.config.task,
        "step": str(manifest.step),
        "metrics": json.dumps(manifest.metrics),
        "versions": json.dumps(manifest.versions),
    }
    try:
        data = safetensors.torch.save(weights, described)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the model of {checkpoint.name} cannot be written as safetensors: {error}"
        ) from error
    target = Storage(storage_uri(out))
    target.parent.write(target.name, data)
    figures = "".join(
        f", {name} {value:.4f}" for name, value in sorted(manifest.metrics.items())
    )
    return f"{target.uri}: {len(weights)} tensors, {len(data) / 2**20:,.1f} MiB, of step {manifest.step}{figures}"


def _own(name: str, value: object) -> Tensor:
    """Return a contiguous copy of the tensor, as the format wants it."""
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"the model cannot be written as safetensors: {name} is no tensor"
        )
    return value.detach().clone(memory_format=torch.contiguous_format)
