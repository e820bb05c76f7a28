"""Say what each precision means for autocast, scaler, parameters and matmul: `TABLE`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainers.config.train import Precision
from trainers.data.batch import Batch, map_tensors
from trainers.errors import ConfigError
from trainers.model.torchao import to_float8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrecisionSpec:
    """One row of the table.

    Without `autocast` operations keep their inputs' format; without `parameters` the
    model stays as it was built; `matmul` is what fp32 products compute in; with
    `float8` Linear layers multiply in that, by torchao; `min_capability` is CUDA's.
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
    """Memory format of 4-D tensors: not in the table, a run chooses it (`with_layout`).
    """

    def autocast_context(
        self, device: torch.device
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context for forward and loss."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def with_layout(
        self, wanted: Literal["auto"] | bool, model: nn.Module, device: torch.device
    ) -> PrecisionSpec:
        """Return the row with the memory format that `wanted` means for this model.

        auto: channels last for convolutions on CUDA.
        """
        images = any(parameter.ndim == 4 for parameter in model.parameters())
        if wanted is True and not images:
            logger.warning(
                "`channels_last` is true, but the model has no 4-D parameter: only batches are converted"
            )
        return replace(
            self,
            channels_last=wanted is True
            or (wanted == "auto" and images and device.type == "cuda"),
        )

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Convert a model to this row's format and layout, and its layers to float8.

        The layout is one of 4-D parameters and buffers.
        """
        if self.float8:
            model = to_float8(model)
        if self.parameters is not None:
            model = model.to(self.parameters)
        # not `model.to(memory_format=...)`, which refuses a model with a 5-D parameter
        # as well
        if self.channels_last:
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.ndim == 4:
                    tensor.data = tensor.data.contiguous(
                        memory_format=torch.channels_last
                    )
        return model

    def convert_batch(self, batch: Batch) -> Batch:
        """Convert floating tensors to this row's format and layout; others stay."""
        if self.parameters is None and not self.channels_last:
            return batch
        return map_tensors(self._convert, batch)

    def _convert(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.parameters is not None:
            tensor = tensor.to(self.parameters)
        if self.channels_last and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor


_AMPERE = (8, 0)
_ADA = (8, 9)
_ROWS = (
    PrecisionSpec("fp32"),
    PrecisionSpec("tf32", matmul="tf32", devices=("cuda",), min_capability=_AMPERE),
    PrecisionSpec("bf16", autocast=torch.bfloat16, min_capability=_AMPERE),
    PrecisionSpec("fp16", autocast=torch.float16, scaler=True),
    PrecisionSpec(
        "fp8",
        autocast=torch.bfloat16,
        float8=True,
        devices=("cuda",),
        min_capability=_ADA,
    ),
    PrecisionSpec("bf16-pure", parameters=torch.bfloat16, min_capability=_AMPERE),
    PrecisionSpec("fp16-pure", parameters=torch.float16),
)
TABLE: dict[str, PrecisionSpec] = {spec.name: spec for spec in _ROWS}


def resolve_precision(name: str, device: torch.device) -> PrecisionSpec:
    """Return the row for `name`; raise ConfigError when `device` cannot do it."""
    able = able_precisions(device)
    if name not in able:
        what = device.type
        if device.type == "cuda":
            what = f"{torch.cuda.get_device_name(device)} (capability {torch.cuda.get_device_capability(device)})"
        raise _unable(name, what, able)
    return TABLE[name]


def able_precisions(device: torch.device) -> list[Precision]:
    """Return the names that `device` can do, in the table's order."""
    capability = (
        torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    )
    rows = (row for row in TABLE.values() if device.type in row.devices)
    return [
        row.name
        for row in rows
        if device.type != "cuda" or capability >= row.min_capability
    ]


def check_device_type(name: str, device_type: str) -> None:
    """Raise ConfigError when no device of this type can do the precision.

    A device's capability is checked where it is.
    """
    if device_type not in TABLE[name].devices:
        able = [row.name for row in TABLE.values() if device_type in row.devices]
        raise _unable(name, f"a {device_type} device", able)


def _unable(name: str, what: str, able: Sequence[str]) -> ConfigError:
    return ConfigError(
        "precision",
        name,
        f"is not something that {what} can do",
        f"use one of {', '.join(able)}",
    )


def apply_matmul(spec: PrecisionSpec) -> None:
    """Set what fp32 matmuls and convolutions compute in, in the whole process.

    torch's older switches set its newer `fp32_precision` too. Set alone, the newer ones
    differ from the older, and reading those then raises: torch.compile does, for
    convolutions and batched products.
    """
    lower = spec.matmul == "tf32"
    backends: Any = torch.backends
    for inherited in (
        backends,
        backends.cudnn,
        backends.mkldnn,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    ):
        inherited.fp32_precision = "none"
    torch.set_float32_matmul_precision("high" if lower else "highest")
    torch.backends.cudnn.allow_tf32 = lower
