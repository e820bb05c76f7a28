"""Linear layers that multiply in float8: torchao's, on the model's own parameters."""

import importlib
from typing import Any

from torch import nn

from trainers.errors import ConfigError, first_line

_MULTIPLE = 16
"""Of both sizes of a layer: what the GPU's float8 products take."""


def to_float8(model: nn.Module, emulate: bool = False) -> nn.Module:
    """Exchange the plain Linear layers of sizes that float8 products take; parameters and all names stay the same.

    Inputs, weights and gradients are scaled by the largest value that each tensor has at the time, which is torchao's
    default recipe (tensorwise); a number of rows that is no multiple of 16 is padded. `emulate` computes the same
    without such products, on any device. Raises ConfigError without torchao, or where there is no such layer.
    """
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        rule = f"needs torchao, which cannot be imported here ({first_line(error)})"
        raise ConfigError("precision", "fp8", rule, "`pip install torchao`, or use precision bf16") from error
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
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
