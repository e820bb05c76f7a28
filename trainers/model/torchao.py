"""Use torchao: Linear layers that multiply in float8, and AdamW with narrow moments."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.errors import ConfigError, first_line

_MULTIPLE = 16
"""Of both sizes of a layer: what the GPU's float8 products take."""
NARROW = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}
"""Classes of torchao.optim by `optimizer.name`."""


def _import(module: str, key: str, value: str, instead: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        rule = f"needs torchao, which cannot be imported here ({first_line(error)})"
        raise ConfigError(
            key, value, rule, f"`pip install torchao`, or use {instead}"
        ) from error


def to_float8(model: nn.Module, emulate: bool = False) -> nn.Module:
    """Exchange the plain Linear layers of sizes that float8 products take.

    Parameters and all names stay the same.

    Inputs, weights and gradients are scaled by the largest value that each tensor has
    at the time, which is torchao's default recipe (tensorwise); a number of rows that
    is no multiple of 16 is padded. `emulate` computes the same without such products,
    on any device. Raises ConfigError without torchao, or where there is no such layer.
    """
    float8 = _import("torchao.float8", "precision", "fp8", "precision bf16")
    if not any(map(_fits, model.modules())):
        rule = f"finds no Linear layer whose sizes are both multiples of {_MULTIPLE}"
        raise ConfigError("precision", "fp8", rule, "use precision bf16")
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    converted: nn.Module = float8.convert_to_float8_training(
        model, module_filter_fn=lambda module, name: _fits(module), config=config
    )
    return converted


def _fits(module: nn.Module) -> bool:
    """A layer with a forward or hooks of its own would lose them."""
    if (
        type(module) is not nn.Linear
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
    ):
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def narrow_adamw(
    name: str, parameters: Iterable[nn.Parameter], options: Mapping[str, Any]
) -> Optimizer:
    """Build torchao's AdamW of this `optimizer.name`; ConfigError without torchao.

    Its steps are compiled, a graph for each shape of parameter, and are not fused.
    """
    kind = getattr(
        _import("torchao.optim", "optimizer.name", name, "adamw"), NARROW[name]
    )
    made: Optimizer = type(kind.__name__, (_PlainState, kind), {})(
        parameters, **options
    )
    return made


class _PlainState:
    """Keep plain tensors in the state_dict of an optimizer of torchao's.

    Its own kinds of tensors are in no checkpoint.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state; of a narrow moment a mapping of the tensors in it."""
        whole: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state = {
            number: {name: _taken_apart(value) for name, value in entries.items()}
            for number, entries in whole["state"].items()
        }
        return {**whole, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises ValueError where it is another optimizer's.
        """
        super().load_state_dict({**state_dict, "state": {}})  # type: ignore[misc]
        optimizer: Any = self
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        for number, entries in state_dict["state"].items():
            if entries:
                optimizer.state[parameters[number]] = _filled(
                    optimizer, parameters[number], entries
                )


def _taken_apart(value: Any) -> Any:
    if not hasattr(value, "__tensor_flatten__"):
        return value
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def _filled(
    optimizer: Any, parameter: Tensor, entries: Mapping[str, Any]
) -> dict[str, Any]:
    state = {
        "step": torch.tensor(float(entries["step"])),
        "exp_avg": optimizer._new_buffer(parameter, True),
        "exp_avg_sq": optimizer._new_buffer(parameter, False),
    }
    for name in ("exp_avg", "exp_avg_sq"):
        ours = _taken_apart(state[name])
        theirs = entries[name]
        pairs = (
            [(ours[key], theirs[key]) for key in ours]
            if isinstance(ours, dict)
            else [(ours, theirs)]
        )
        for mine, saved in pairs:
            if mine.shape != saved.shape or mine.dtype != saved.dtype:
                raise ValueError(
                    f"{name} is {saved.dtype} {list(saved.shape)}, not {mine.dtype} {list(mine.shape)}"
                )
            mine.copy_(saved)
    return state
