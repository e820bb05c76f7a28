"""What a setting's steps compute, move and keep, found by taking them with fake tensors: no device is needed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils.data import Dataset

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.launch.spec import RunSpec
from trainers.loop.data import load_data
from trainers.loop.memory_forecast import Forecaster, fake_world, largest_microbatch
from trainers.step.data_sheets import DataSheet
from trainers.step.operators import least_s
from tune.what_if.step_time import Roofline

_CPU = torch.device("cpu")
_COUNTED_AS = {"tf32": "fp32", "fp16": "bf16", "fp8": "bf16", "fp16-pure": "bf16-pure"}
"""Precisions that no CPU takes, and those whose tensors have the same sizes."""


@dataclass(frozen=True, eq=False)
class FakeSteps:
    """The steps of one setting (precision, optimizer, ...)."""

    spec: RunSpec
    config: TrainConfig

    @functools.cached_property
    def _train(self) -> Dataset[Any]:
        return load_data(self.spec.load_task(), self.config, RunContext(None, "what-if"), Group(0, 1, _CPU))[0]

    def _forecast(self, take: Callable[[Forecaster], Any], batch: int, workers: int = 1, alone: bool = True) -> Any:
        """Return what `take` finds of one rank; raise ConfigError where steps cannot be taken with fake tensors."""
        changes: dict[str, Any] = {
            "precision": _COUNTED_AS.get(self.config.precision, self.config.precision),
            "global_batch_size": batch,
            "batch_size_per_worker": None,
            "device": "cpu",
        }
        strategy = "none" if alone else self.config.strategy
        config = self.config.model_copy(update=changes | {"strategy": strategy})
        with fake_world(workers if strategy == "fsdp" else 1):
            try:
                return take(Forecaster(self.spec.load_task, config, self._train, Group(0, workers, _CPU)))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                rule = f"goes by the values of tensors ({error}), which a prediction does not have"
                raise ConfigError("task", config.task, rule, "measure it where it shall run") from error

    @functools.cached_property
    def gradient_bytes(self) -> float:
        """What workers sum up in a step; of a sharded model also what they gather, as so much of a sum."""
        gradients = self._forecast(lambda forecaster: forecaster(1).gradients, 1)
        return float(gradients) * (1.5 if self.config.strategy == "fsdp" else 1.0)

    @functools.cache  # noqa: B019 (there are a few, as long as the command)
    def _operators(self, size: int) -> Any:
        return self._forecast(lambda forecaster: forecaster.operators(size), size)

    def roofline(self, sheet: DataSheet, sizes: tuple[int, int]) -> Roofline | None:
        """Return that of a GPU, by steps of two sizes; None where its data sheet says too little."""
        precision = self.config.precision
        plain = "fp32" if precision != "tf32" else "tf32"
        half = precision if precision.removesuffix("-pure") in ("bf16", "fp16") else "bf16"
        needed = {torch.float32: sheet.peak(plain) or sheet.peak("fp32"), torch.bfloat16: sheet.peak(half)}
        has_half = any(one.dtype is torch.bfloat16 and one.flops for one in self._operators(sizes[0]))
        if not sheet.bytes_per_s or needed[torch.float32] is None or (has_half and not needed[torch.bfloat16]):
            return None
        peaks = {dtype: peak for dtype, peak in needed.items() if peak}
        low, high = (sum(least_s(o, peaks, sheet.bytes_per_s) for o in self._operators(size)) for size in sizes)
        each = (high - low) / (sizes[1] - sizes[0])
        return Roofline(max(each, 1e-15), max(low - each * sizes[0], 0.0), len(self._operators(sizes[1])))

    @functools.cache  # noqa: B019
    def peak_bytes(self, batch: int, workers: int, microbatch: int) -> int:
        """Return the most bytes that a worker's tensors take."""
        return int(self._forecast(lambda one: one.peak(microbatch), batch, workers, alone=False))

    @functools.cache  # noqa: B019
    def largest(self, batch: int, workers: int, room: int) -> int:
        """Return the largest microbatch whose tensors take at most `room` bytes; 0 where a single sample takes more."""
        start = -(-batch // workers)
        return int(self._forecast(lambda one: largest_microbatch(one.peak, start, room), batch, workers, False))
