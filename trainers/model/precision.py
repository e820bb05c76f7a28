"""Define in `TABLE` what each precision means for autocast, parameters and the rest.

Linear layers that multiply in float8 come from torchao.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainers.config.train import Precision
from trainers.data.batch import Batch, map_tensors
from trainers.errors import ConfigError
from trainers.versions import import_torchao

_MULTIPLE = 16
"""Both sizes of a layer must be multiples of this for the GPU's float8 products."""
_AMPERE = (8, 0)
_ADA = (8, 9)


def to_float8(model: nn.Module, emulate: bool = False) -> nn.Module:
    """Convert the plain Linear layers whose sizes float8 products accept.

    Parameters and all names stay the same.

    Each input, weight and gradient is scaled by its largest value at the time,
    which is torchao's default recipe (tensorwise). Rows are padded to a
    multiple of 16. `emulate` computes the same results without float8
    hardware, on any device. Raises ConfigError without torchao, or if there is
    no such layer.
    """
    instead = "precision bf16"
    float8 = import_torchao("torchao.float8", "precision", "fp8", instead)
    if not any(map(_fits, model.modules())):
        raise ConfigError(
            "precision",
            "fp8",
            f"needs a plain nn.Linear (no subclass, no hooks) with in_features and out_features that are multiples of {_MULTIPLE}, and the model has none",
            "use precision bf16",
        )
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    converted: nn.Module = float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: _fits(module),
        config=config,
    )
    return converted


def _fits(module: nn.Module) -> bool:
    """Whether a layer can be converted: a plain Linear of suitable sizes without hooks."""
    if type(module) is not nn.Linear:
        return False
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
    ):
        return False
    return (
        module.in_features % _MULTIPLE == 0 == module.out_features % _MULTIPLE
    )


@dataclass(frozen=True)
class PrecisionSpec:
    """One row of the table.

    Without `autocast`, operations keep their inputs' format; without
    `parameters`, the model keeps the format it was built in. `matmul` is the
    format in which fp32 products are computed. With `float8`, torchao's Linear
    layers multiply in float8. `min_capability` is a CUDA compute capability.
    """

    name: Precision
    autocast: torch.dtype | None = None
    scaler: bool = False
    parameters: torch.dtype | None = None
    matmul: str = "ieee"
    float8: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda", "mps")
    min_capability: tuple[int, int] = (0, 0)
    channels_last: bool = False
    """Memory format of 4-D tensors; not in the table, but chosen per run
    (`with_layout`).
    """

    def autocast_context(
        self, device: torch.device
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for forward and loss."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def with_layout(
        self,
        wanted: Literal["auto"] | bool,
        model: nn.Module,
        device: torch.device,
    ) -> PrecisionSpec:
        """Return the row with the memory format that `wanted` means for this model."""
        if wanted == "auto":
            images = any(
                parameter.ndim == 4 for parameter in model.parameters()
            )
            wanted = images and device.type == "cuda"
        return replace(self, channels_last=wanted)

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Convert a model to this row's format and layout, and layers to float8.

        The layout applies to 4-D parameters and buffers.
        """
        if self.float8:
            model = to_float8(model)
        if self.parameters is not None:
            model = model.to(self.parameters)
        # Not `model.to(memory_format=...)`, which refuses a model that also
        # has a 5-D parameter.
        if self.channels_last:
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = self._laid_out(tensor.data)
        return model

    def convert_batch(self, batch: Batch) -> Batch:
        """Convert floating tensors to this row's format and layout, and no others."""
        if self.parameters is None and not self.channels_last:
            return batch
        return map_tensors(self._convert, batch)

    def _convert(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.parameters is not None:
            tensor = tensor.to(self.parameters)
        return self._laid_out(tensor)

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if self.channels_last and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor


_ROWS = (
    PrecisionSpec("fp32"),
    PrecisionSpec(
        "tf32", matmul="tf32", devices=("cuda",), min_capability=_AMPERE
    ),
    PrecisionSpec("bf16", autocast=torch.bfloat16, min_capability=_AMPERE),
    PrecisionSpec("fp16", autocast=torch.float16, scaler=True),
    PrecisionSpec(
        "fp8",
        autocast=torch.bfloat16,
        float8=True,
        devices=("cuda",),
        min_capability=_ADA,
    ),
    PrecisionSpec(
        "bf16-pure", parameters=torch.bfloat16, min_capability=_AMPERE
    ),
    PrecisionSpec("fp16-pure", parameters=torch.float16),
)
TABLE: dict[str, PrecisionSpec] = {spec.name: spec for spec in _ROWS}


def resolve_precision(name: str, device: torch.device) -> PrecisionSpec:
    """Return the row for `name`; raise ConfigError if `device` does not support it."""
    able = able_precisions(device)
    if name not in able:
        what = device.type
        if device.type == "cuda":
            what = f"{torch.cuda.get_device_name(device)} (capability {torch.cuda.get_device_capability(device)})"
        raise _unable(name, what, able)
    return TABLE[name]


def able_precisions(device: torch.device) -> list[Precision]:
    """Return the names of the precisions that `device` supports, in table order."""
    capability: tuple[int, ...] = (100, 0)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    able = []
    for row in TABLE.values():
        if device.type in row.devices and capability >= row.min_capability:
            able.append(row.name)
    return able


def check_device_type(name: str, device_type: str) -> None:
    """Raise ConfigError if no device of this type supports the precision."""
    if device_type not in TABLE[name].devices:
        able = [
            row.name for row in TABLE.values() if device_type in row.devices
        ]
        raise _unable(name, f"a {device_type} device", able)


def _unable(name: str, what: str, able: Sequence[str]) -> ConfigError:
    return ConfigError(
        "precision",
        name,
        f"is not supported on {what}",
        f"use one of {', '.join(able)}",
    )


def apply_matmul(spec: PrecisionSpec) -> None:
    """Set the precision of fp32 matmuls and convolutions for the whole process.

    torch's older switches also set its newer `fp32_precision`. If only
    `fp32_precision` were set, the two would differ, and torch would raise when
    an older switch is read, as torch.compile does for convolutions and batched
    products.
    """
    lower = spec.matmul == "tf32"
    backends: Any = torch.backends
    mkldnn = backends.mkldnn
    for inherited in (
        backends,
        backends.cudnn,
        mkldnn,
        mkldnn.conv,
        mkldnn.rnn,
    ):
        inherited.fp32_precision = "none"
    torch.set_float32_matmul_precision("high" if lower else "highest")
    torch.backends.cudnn.allow_tf32 = lower
