"""Which functions there are, and what each is run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.on_ray.functions import libraries, plain, pytorch

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One function and the trials that it is run in."""

    function: Callable[..., Any]
    grid: list[Config]
    """Configurations, which all succeed but for those in `fails`; the most promising first where `asha` is set."""
    batch_key: str | None = None
    """Which key holds the batch size of a worker."""
    workers: tuple[int, ...] = (1, 2)
    trainer: Callable[[], dict[str, Any]] | None = None
    """Makes further arguments for the trainer, once Ray is up."""
    fails: tuple[int, ...] = ()
    """Which trials fail, by their place in `grid`."""
    max_failures: int = 0
    """How often a trial is tried again."""
    asha: bool = False
    """ASHA stops some trials by their `loss`."""


_RATES: list[Config] = [{"lr": 0.1, "batch_size": 32}, {"lr": 1e-4, "batch_size": 32}, {"lr": 0.05, "batch_size": 64}]
_SIZES: list[Config] = [{"lr": 0.1, "batch_size": size} for size in (16, 64)]

TRAIN = {
    "epochs": Case(pytorch.epochs, _RATES, "batch_size", asha=True),
    "resumed": Case(
        pytorch.resumed,
        [{"lr": 0.1, "batch_size": 32, "fails_at": epoch} for epoch in (None, 2)],
        "batch_size",
        max_failures=1,
    ),
    "checkpoint_of_each_rank": Case(pytorch.checkpoint_of_each_rank, _RATES, "batch_size", asha=True),
    "asynchronous_upload": Case(pytorch.asynchronous_upload, _SIZES, "batch_size"),
    "context": Case(pytorch.context, [{"seed": 1}, {"seed": 2}]),
    "collectives": Case(
        pytorch.collectives, [{"lr": 0.1, "batch_size": 32, "seed": seed} for seed in (1, 2)], "batch_size"
    ),
    "data_shard": Case(pytorch.data_shard, _SIZES, "batch_size", trainer=pytorch.rows_in_order),
    "checkpoints_so_far": Case(pytorch.checkpoints_so_far, _SIZES, "batch_size"),
    "preemption": Case(pytorch.preemption, _SIZES, "batch_size"),
    "reduced_by_hand": Case(pytorch.reduced_by_hand, _RATES, "batch_size", asha=True),
    "ddp_by_hand": Case(pytorch.ddp_by_hand, [{"lr": 0.01, "batch_size": size} for size in (16, 64)], "batch_size"),
    "mixed_precision": Case(
        pytorch.mixed_precision, [{"lr": 0.1, "batch_size": 32, "amp": amp} for amp in (True, False)], "batch_size"
    ),
    "accumulation": Case(
        pytorch.accumulation, [{"lr": 0.1, "batch_size": 16, "accumulate": count} for count in (2, 4)], "batch_size"
    ),
    "no_argument": Case(pytorch.no_argument, [{}, {}]),
    "returned": Case(pytorch.returned, _SIZES, "batch_size"),
    "nested_model": Case(pytorch.nested_model, [{"width": width, "batch_size": 25} for width in (8, 32)], "batch_size"),
    "global_defaults": Case(pytorch.global_defaults, [{"lr": 0.1, "momentum": 0.5}, {"lr": 0.05}]),
    "with_torchmetrics": Case(pytorch.with_torchmetrics, [{"batch_size": size} for size in (32, 64)], "batch_size"),
    "fully_sharded": Case(pytorch.fully_sharded, [{"lr": lr, "batch_size": 32} for lr in (0.01, 0.03)], "batch_size"),
    "refuses": Case(pytorch.refuses, [{"hidden": 16}, {"hidden": 0}, {"hidden": 128}, {"hidden": 8}], fails=(1, 2)),
    "bound": Case(pytorch.bound, [{"lr": lr, "batch_size": 32} for lr in (0.01, 0.05)], "batch_size"),
    "loop_object": Case(
        pytorch.Loop(pytorch.Settings(hidden=12)),
        [{"lr": lr, "batch_size": 32} for lr in (0.05, 1e-5)],
        "batch_size",
        asha=True,
    ),
    "lightning_on_ray": Case(
        libraries.lightning_on_ray, [{"lr": lr, "batch_size": 32} for lr in (0.05, 1e-5)], "batch_size", asha=True
    ),
    "lightning_alone": Case(
        libraries.lightning_alone,
        [{"precision": precision, "batch_size": 32} for precision in ("32-true", "bf16-mixed")],
        "batch_size",
        workers=(1,),
    ),
    "accelerated": Case(
        libraries.accelerated, [{"batch_size": 16, "accumulate": count} for count in (1, 2)], "batch_size"
    ),
    "transformers_trainer": Case(
        libraries.transformers_trainer,
        [{"learning_rate": rate, "per_device_train_batch_size": 16} for rate in (0.01, 0.001)],
        "per_device_train_batch_size",
    ),
    "transformers_accumulating": Case(
        libraries.transformers_accumulating,
        [{"schedule": "linear", "accumulate": 1}, {"schedule": "cosine", "accumulate": 2}],
    ),
}
"""Functions for a TorchTrainer."""

TUNE = {
    "descent": Case(plain.descent, [{"lr": lr} for lr in (0.1, 0.001, 0.2)], workers=(0,), asha=True),
    "with_checkpoints": Case(
        plain.with_checkpoints,
        [{"start": 1.0, "fails": False}, {"start": 1.0, "fails": True}],
        workers=(0,),
        max_failures=1,
    ),
    "final_dictionary": Case(plain.final_dictionary, [{"seed": seed} for seed in (1, 2, 3)], workers=(0,)),
}
"""Functions for a Tuner, which start no workers."""
