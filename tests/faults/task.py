"""The task of the campaign: small and in float64, with an event in each phase,
and its samples written down.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tests.faults import hook
from trainers.config import TrainConfig
from trainers.data.batch import Batch
from trainers.task import Task

SAMPLES = 99
FEATURES = 12
ORPHANED_S = 0.25
hook.event("import")


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Four noisy clusters; each sample brings its index."""

    def __init__(self, split: str):
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
        centres = torch.randn(
            4,
            FEATURES,
            generator=torch.Generator().manual_seed(3),
            dtype=torch.float64,
        )
        noise = torch.randn(
            SAMPLES, FEATURES, generator=generator, dtype=torch.float64
        )
        self.rows = centres[self.labels] + noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.rows[index], self.labels[index], index


def make_model() -> nn.Module:
    """Logits [B, 4] of rows [B, 12]."""
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 4)
    ).to(torch.float64)


class Faulty(Task):
    """Everything that a task may define, each with its event; counts its steps
    over restarts.
    """

    def __init__(self, pause_s: float = 0.0, trial: int = 0):
        hook.event("constructor")
        self.pause_s = pause_s
        self.trial = trial
        self.step = 0
        self.in_step = False
        self.parent = os.getppid()

    def begin_step(self):
        """Called before each training step, by the hook."""
        self.step = self.step + 1
        self.in_step = True
        # An orphan lingers: it must not be at its end before somebody looks.
        time.sleep(self.pause_s if os.getppid() == self.parent else ORPHANED_S)
        hook.trial = self.trial
        hook.note_rank(hook.own_rank())
        hook.event("step", self.step)

    def setup(self):
        hook.event("setup")

    def model(self) -> nn.Module:
        hook.event("model")
        return make_model()

    def dataset(self, split: str) -> Rows:
        hook.event("dataset")
        return Rows(split)

    def optimizer(self, model: nn.Module, config: TrainConfig) -> Optimizer:
        hook.event("optimizer")
        return super().optimizer(model, config)

    def transform(self, batch: Batch, training: bool) -> Batch:
        hook.event("transform")
        return batch

    def collate(self, samples: list[Any]) -> Batch:
        hook.event("collate")
        return super().collate(samples)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            hook.event("evaluate")
            return model(batch[0])
        if not self.in_step:
            hook.event("probe")
            return model(batch[0])
        hook.record(self.step, hook.own_rank(), batch[2].tolist())
        hook.event("forward", self.step)
        outputs = model(batch[0])
        outputs.register_hook(lambda gradient: self._backward())
        return outputs

    def _backward(self):
        hook.event("backward", self.step)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = F.cross_entropy(outputs, batch[1])
        if self.in_step and hook.event("loss", self.step) == "nan":
            return loss * float("nan")
        return loss

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        hook.event("metrics")
        return {"accuracy": outputs.argmax(1) == batch[1]}

    def state_dict(self) -> dict[str, Any]:
        hook.event("state_dict")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]):
        self.step = state["step"]
