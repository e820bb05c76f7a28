"""What each precision name means for autocast, scaler, parameters and matmul, and which devices can do it.

| name      | autocast | loss scaler | parameters | fp32 matmul | cpu | cuda           | mps |
|-----------|----------|-------------|------------|-------------|-----|----------------|-----|
| fp32      | -        | -           | as built   | ieee        | yes | yes            | yes |
| tf32      | -        | -           | as built   | tf32        | no  | capability 8.0 | no  |
| bf16      | bfloat16 | -           | as built   | ieee        | yes | capability 8.0 | yes |
| fp16      | float16  | yes         | as built   | ieee        | yes | yes            | yes |
| bf16-pure | -        | -           | bfloat16   | ieee        | yes | capability 8.0 | yes |
| fp16-pure | -        | -           | float16    | ieee        | yes | yes            | yes |
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainers.config import Precision
from trainers.errors import ConfigError
from trainers.task import Batch, map_tensors


@dataclass(frozen=True)
class PrecisionSpec:
    """One row of the table."""

    name: Precision
    autocast: torch.dtype | None = None
    scaler: bool = False
    parameters: torch.dtype | None = None
    matmul: str = "ieee"
    devices: tuple[str, ...] = ("cpu", "cuda", "mps")
    min_capability: tuple[int, int] = (0, 0)

    def autocast_context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context for forward and loss."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Manual half: parameters and buffers in this format."""
        return model if self.parameters is None else model.to(self.parameters)

    def convert_batch(self, batch: Batch) -> Batch:
        """Manual half: floating tensors in the parameters' format; indices and masks stay."""
        dtype = self.parameters
        if dtype is None:
            return batch
        return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


_AMPERE = (8, 0)
TABLE: dict[str, PrecisionSpec] = {
    spec.name: spec
    for spec in (
        PrecisionSpec("fp32"),
        PrecisionSpec("tf32", matmul="tf32", devices=("cuda",), min_capability=_AMPERE),
        PrecisionSpec("bf16", autocast=torch.bfloat16, min_capability=_AMPERE),
        PrecisionSpec("fp16", autocast=torch.float16, scaler=True),
        PrecisionSpec("bf16-pure", parameters=torch.bfloat16, min_capability=_AMPERE),
        PrecisionSpec("fp16-pure", parameters=torch.float16),
    )
}


def resolve_precision(name: str, device: torch.device) -> PrecisionSpec:
    """The row for `name`; ConfigError when `device` cannot do it."""
    spec = TABLE[name]
    able = [row.name for row in TABLE.values() if _able(row, device)]
    if not _able(spec, device):
        what = device.type
        if device.type == "cuda":
            what = f"{torch.cuda.get_device_name(device)} (capability {torch.cuda.get_device_capability(device)})"
        raise ConfigError("precision", name, f"is not something that {what} can do", f"use one of {', '.join(able)}")
    return spec


def _able(spec: PrecisionSpec, device: torch.device) -> bool:
    if device.type not in spec.devices:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= spec.min_capability


def apply_matmul(spec: PrecisionSpec, device: torch.device) -> None:
    """Set what fp32 matmuls and convolutions compute in, process-wide, whatever it was before."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = spec.matmul
        torch.backends.cudnn.conv.fp32_precision = spec.matmul  # type: ignore[attr-defined]


def check_device_type(name: str, device_type: str) -> None:
    """ConfigError when no device of this type can do the precision (its capability is checked where it is)."""
    if device_type not in TABLE[name].devices:
        able = [row.name for row in TABLE.values() if device_type in row.devices]
        raise ConfigError(
            "precision", name, f"is not something that a {device_type} device can do", f"use one of {', '.join(able)}"
        )
