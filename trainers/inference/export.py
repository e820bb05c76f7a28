"""Export of a trained model: its weights as one safetensors file, which needs nothing of ours to be read."""

import json

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trainers.errors import CheckpointError, ConfigError
from trainers.inference.saved_run import SavedRun
from trainers.storage import Storage, storage_uri


def export(location: str, out: str, which: str = "newest") -> str:
    """Write the model of a run's checkpoint to `out`, a file or URI; return a sentence of what was written.

    The names are those of the task's bare model. Tensors that share memory are written under each of their names, so
    that `load_state_dict` takes the file as it is. Raises ConfigError, CheckpointError, StorageError.
    """
    if not out.endswith(".safetensors"):
        raise ConfigError("--out", out, "must be the name of a safetensors file", "end it in .safetensors")
    run = SavedRun.open(location)
    checkpoint = run.checkpoint(which)
    try:
        weights = {name: _own(name, value) for name, value in checkpoint.state["model"].items()}
    except (KeyError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.name} is no checkpoint of ours: it has no model") from error
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
        raise CheckpointError(f"the model of {checkpoint.name} cannot be written as safetensors: {error}") from error
    target = Storage(storage_uri(out))
    target.parent.write(target.name, data)
    figures = "".join(f", {name} {value:.4f}" for name, value in sorted(manifest.metrics.items()))
    return f"{target.uri}: {len(weights)} tensors, {len(data) / 2**20:,.1f} MiB, of step {manifest.step}{figures}"


def _own(name: str, value: object) -> Tensor:
    """Return a contiguous copy of the tensor, as the format wants it."""
    if not isinstance(value, Tensor):
        raise CheckpointError(f"the model cannot be written as safetensors: {name} is no tensor")
    return value.detach().clone(memory_format=torch.contiguous_format)
