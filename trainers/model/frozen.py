"""Leave frozen parameters out of checkpoints (`checkpoint.parameters: trained`)."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainers.errors import CheckpointError


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return by name a SHA-256 of each parameter that needs no gradient.

    `model` is as the task makes it, on the CPU, so that digests depend on neither
    precision nor strategy.
    """
    return {
        name: _digest(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(
        tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    )
    return digest.hexdigest()


def check_frozen(saved: Any, now: Mapping[str, str] | None) -> None:
    """Raise CheckpointError unless a checkpoint left out these very parameters.

    None: it, or this run, has them all.
    """
    if not isinstance(saved, dict) or now is None:
        if saved is not now:
            raise CheckpointError(
                "it was written with another `checkpoint.parameters` than this run has"
            )
        return
    for name in sorted(map(str, saved.keys() | now.keys())):
        if saved.get(name) != now.get(name):
            raise CheckpointError(
                f"it was trained on another base: the frozen `{name}` is not what it was"
            )


def load_model(
    model: nn.Module, saved: Mapping[str, Any], frozen: Mapping[str, str] | None
) -> None:
    """Load a model's state; `frozen` parameters, which it lacks, stay the model's own."""
    missing, unexpected = model.load_state_dict(saved, strict=not frozen)
    if wrong := sorted({*missing, *unexpected} - (frozen or {}).keys()):
        raise CheckpointError(f"it does not fit this model: {', '.join(wrong[:4])}")
