"""The same training as a task.

What before.py says of model, data and loss, and nothing of the loop.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainers.task import Task


def spirals(samples: int, seed: int) -> TensorDataset:
    """Points [N, 2] on three noisy arms, and the arm of each [N]."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = (
        4.0 * radius + arms * 2.0944 + 0.2 * torch.randn(samples, generator=generator)
    )
    return TensorDataset(
        torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms
    )


class Spirals(Task):
    """Which of three arms is a point on?"""

    def model(self):
        """Logits [B, 3] of points [B, 2]."""
        return nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )

    def dataset(self, split):
        """3,000 points to train, 600 to validate."""
        return spirals(3000, seed=1) if split == "train" else spirals(600, seed=2)

    def loss(self, outputs, batch):
        """Cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        """Accuracy, one value a sample."""
        return {"accuracy": outputs.argmax(1) == batch[1]}
