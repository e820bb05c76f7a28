"""The training of before.py as a task: model, data and loss, without the loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainers.task import Task


def spirals(samples: int, seed: int) -> TensorDataset:
    """Return points [N, 2] on three noisy arms, and the arm of each point [N]."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = (
        4.0 * radius
        + arms * 2.0944
        + 0.2 * torch.randn(samples, generator=generator)
    )
    return TensorDataset(
        torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms
    )


class Spirals(Task):
    """Classify points by the arm of the spiral that they are on."""

    def model(self):
        """Return a model that turns points [B, 2] into logits [B, 3]."""
        return nn.Sequential(
            nn.Linear(2, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 3),
        )

    def dataset(self, split):
        """Return 3,000 training points or 600 validation points."""
        return (
            spirals(3000, seed=1) if split == "train" else spirals(600, seed=2)
        )

    def loss(self, outputs, batch):
        """Return the mean cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        """Return the accuracy, one value per sample."""
        return {"accuracy": outputs.argmax(1) == batch[1]}
