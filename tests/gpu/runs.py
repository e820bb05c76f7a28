"""Runs of small tasks on a chosen device, straight through the loop."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests import specs
from tests.tasks import Blobs
from trainers.config import TrainConfig
from trainers.config.model import build, override
from trainers.data.sampler import split_share
from trainers.launch.local import LocalContext
from trainers.loop.build import build_replica
from trainers.loop.fit import fit
from trainers.measure.result import RunResult
from trainers.model.optimizer import lr_factor
from trainers.step.train_step import Replica
from trainers.storage import Storage
from trainers.task import Task

CUDA = torch.device("cuda", 0)

BASE = specs.BASE | {
    "lr_schedule": {"name": "cosine", "warmup": 4},
    "evaluate": {"every_steps": 1000},
    "checkpoint": {"every_steps": 1000},
}


def config(device: torch.device, **changes: Any) -> TrainConfig:
    """BASE on `device` with dotted changes (`__` for a dot)."""
    chosen = {"device": device.type, **specs.dotted(changes)}
    return build(TrainConfig, override(TrainConfig, BASE, chosen), "test")


class Context(LocalContext):
    """Asks to stop once the loop has looked `looks` times (every ten steps)."""

    def __init__(self, path: Path | None, looks: int | None = None):
        super().__init__(Storage(path) if path else None, "local")
        self.looks = looks
        self._looked = count(1)

    def should_stop(self, elapsed_s: float) -> bool:
        return self.looks is not None and next(self._looked) >= self.looks


def train(
    device: torch.device,
    path: Path | None = None,
    task: Task | None = None,
    looks: int | None = None,
    **changes: Any,
) -> RunResult:
    """A run from its start, or from its newest checkpoint below `path`."""
    return fit(
        task or Blobs(), config(device, **changes), Context(path, looks)
    )


def make(
    device: torch.device, task: Task | None = None, **changes: Any
) -> tuple[Replica, TrainConfig]:
    """The parts of a run, to be stepped by hand; `parts.close()` ends them."""
    chosen = config(device, **changes).with_global_batch()
    return build_replica(task or Blobs(), chosen, Context(None)), chosen


def stepper(
    parts: Replica, config: TrainConfig, steps: int
) -> Callable[[], None]:
    """One call, one step, over as many epochs as `steps` need: what the loop
    does between two looks at the device.
    """
    sampler = parts.sampler
    positions = [
        divmod(number, sampler.steps_per_epoch) for number in range(steps)
    ]
    plans = []
    for epoch, step in positions:
        sampler.set_epoch(epoch)
        plans.append(
            list(split_share(sampler.share(step), parts.microbatch_size))
        )
    batches = parts.train_feed.batches(
        [indices for plan in plans for indices in plan], training=True
    )
    numbers = iter(range(steps))

    def step():
        number = next(numbers)
        parts.step.set_lr(lr_factor(config.lr_schedule, number, steps))
        sizes = [len(indices) for indices in plans[number]]
        parts.step(batches, sizes, sum(sizes), idle=False)

    return step


class Images(Task):
    """Convolutions, BatchNorm, dropout and a random transform on the device:
    all that draws or that has a layout.
    """

    def __init__(
        self,
        samples: int = 120,
        size: int = 16,
        channels: int = 16,
        random: bool = True,
    ):
        self.samples = samples
        self.size = size
        self.channels = channels
        self.random = random

    def model(self):
        wide = self.channels
        dropout = [nn.Dropout(0.1)] if self.random else []
        return nn.Sequential(
            nn.Conv2d(3, wide, 3, padding=1),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, 2 * wide, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            *dropout,
            nn.Linear(2 * wide, 4),
        )

    def dataset(self, split: str):
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        labels = torch.randint(0, 4, (self.samples,), generator=generator)
        images = torch.randn(
            self.samples, 3, self.size, self.size, generator=generator
        )
        images[:, 0] += labels.view(-1, 1, 1)
        return TensorDataset(images, labels)

    def transform(self, batch: Any, training: bool):
        images, labels = batch
        return (
            (images + 0.1 * torch.randn_like(images), labels)
            if training and self.random
            else batch
        )

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": outputs.argmax(1) == batch[1]}


class Hungry(Blobs):
    """Forward takes `bytes_per_sample` on the device, and `later` times as
    much from its `turns`-th call on.
    """

    def __init__(
        self,
        bytes_per_sample: int,
        turns: int | None = None,
        later: int = 1,
        samples: int = 203,
    ):
        super().__init__(samples=samples)
        self.bytes_per_sample = bytes_per_sample
        self.turns = turns
        self.later = later

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        outputs = super().forward(model, batch)
        if not model.training:
            return outputs
        grown = self.turns is not None and self.forwards >= self.turns
        width = self.bytes_per_sample * (self.later if grown else 1) // 4
        filler = torch.zeros(len(outputs), width, device=outputs.device)
        return outputs + filler.sum(
            1, keepdim=True
        )  # freed here, but it has to fit
