"""Tasks that are hard on a lane: memory that depends on the precision, and poison for whatever trial comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import foreign_functions
from tests.tasks import Blobs

COUNT = 0
"""Module state, as careless tasks keep it."""


class Limited(Blobs):
    """Runs out of memory above `fp32_fits` samples, above `bf16_fits` under autocast; each time leaves a line."""

    def __init__(self, fp32_fits: int, bf16_fits: int, log: str, **args: Any) -> None:
        super().__init__(**args)
        self.limits, self.log = {False: fp32_fits, True: bf16_fits}, Path(log)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        half, size = torch.is_autocast_enabled("cpu"), len(batch[0])
        if model.training and size > self.limits[half]:
            with self.log.open("a") as file:
                file.write(f"{'bf16' if half else 'fp32'} {size}\n")
            raise torch.OutOfMemoryError(f"injected: {size} samples, {self.limits[half]} fit")
        return super().forward(model, batch)


class Poison(Blobs):
    """Leaves its process as no trial should find it; `drawn` samples of its data depend on every generator."""

    def __init__(self, poison: list[str] | None = None, drawn: int = 0, **args: Any) -> None:
        super().__init__(**args)
        self.poison, self.drawn = poison or [], drawn

    def dataset(self, split: str) -> Any:
        global COUNT
        data = super().dataset(split)
        if self.drawn:  # without a generator of its own: what a fresh process draws
            data.tensors[0][: self.drawn] += torch.randn(self.drawn, self.features)
        data.tensors[0][0] += COUNT
        if split == "val":
            COUNT += 1
            for name in self.poison:
                (self._flags if name == "flags" else getattr(foreign_functions, name))()
        return data

    def _flags(self) -> None:
        torch.set_num_threads(2)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.fp32_precision = "tf32"  # type: ignore[attr-defined]
        torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
        torch.backends.mkldnn.set_flags(False)


class Signed(Blobs):
    """Writes its seed once it trains."""

    def __init__(self, file: str, **args: Any) -> None:
        super().__init__(**args)
        self.file = Path(file)

    def dataset(self, split: str) -> Any:
        if split == "train":  # the loop has seeded torch with the trial's seed by now
            with self.file.open("a") as file:
                file.write(f"{torch.initial_seed()}\n")
        return super().dataset(split)
