"""Record what of a model may change while it trains, beside values.

That is which parameters are frozen, the modes of modules, and which buffers there are.

A checkpoint keeps what has changed since the task's model() made it: a resumed run
makes the model anew.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class AsMade:
    """A model's switches as it was made."""

    def __init__(self, model: nn.Module) -> None:
        self._required, self._training = _switches(model)
        self._shapes = _shapes(model)
        self._parameters = list(model.parameters())

    def changes(self, model: nn.Module) -> dict[str, Any]:
        """Return what is otherwise now, as plain data; nothing where all is as it was."""
        required, training = _switches(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        found = {
            "requires_grad": {
                name: on
                for name, on in required.items()
                if on != self._required.get(name, on)
            },
            "training": {
                name: on
                for name, on in training.items()
                if on != self._training.get(name, on)
            },
            "buffers": [
                name
                for name, shape in _shapes(model).items()
                if name not in parameters and self._shapes.get(name) != shape
            ],
        }
        return {name: changed for name, changed in found.items() if changed}

    def late_parameters(self, model: nn.Module) -> list[str]:
        """Name the parameters that the model was made without, or that were exchanged."""
        made = {id(one) for one in self._parameters}
        return [
            name
            for name, one in model.named_parameters()
            if id(one) not in made and one.requires_grad
        ]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {
        name: value.shape
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }


def _switches(model: nn.Module) -> tuple[dict[str, bool], dict[str, bool]]:
    parameters = model.named_parameters(remove_duplicate=False)
    required = {name: parameter.requires_grad for name, parameter in parameters}
    return required, {name: module.training for name, module in model.named_modules()}


def apply_changes(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Freeze, unfreeze and switch as `changes` says."""
    for name, required in changes.get("requires_grad", {}).items():
        model.get_parameter(name).requires_grad_(bool(required))
    for name, training in changes.get("training", {}).items():
        model.get_submodule(name).training = bool(training)


def add_buffers(
    model: nn.Module, changes: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Register the buffers that forward passes had made, or given another shape."""
    device = next(
        (tensor.device for tensor in (*model.parameters(), *model.buffers())), None
    )
    for name in changes.get("buffers", []):
        owner, _, inner = name.rpartition(".")
        value = saved[name]
        if isinstance(value, Tensor):
            module = model.get_submodule(owner)
            vars(module).pop(inner, None)  # `self.mean = None` until the first forward
            module.register_buffer(inner, value.to(device, copy=True))


def train_as_made(model: nn.Module) -> list[str]:
    """Put a model into training mode but for what its maker put into evaluation mode.

    Returns the names of those modules, without what is in them.

    A model that is in evaluation mode as a whole (as `from_pretrained` gives one) is
    trained as a whole.
    """
    kept = [
        (name, module)
        for name, module in model.named_modules()
        if model.training and not module.training
    ]
    model.train()
    for _, module in kept:
        module.training = False
    names = {name for name, _ in kept}
    return [name for name, _ in kept if name.rpartition(".")[0] not in names]
