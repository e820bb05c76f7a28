"""Handwritten digits and a small CNN.

1,797 real 8 x 8 images (UCI ML repository, shipped with scikit-learn).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainers.task import Task

_SPLIT_SEED = 0
_VALIDATION_SHARE = 0.2


class Digits(Task):
    """Classify B grey images [B, 8, 8] (uint8, 0 to 16) into ten digits."""

    def __init__(self, channels: int = 32) -> None:
        self.channels = channels

    def model(self) -> nn.Module:
        """Return a CNN with three layers: images [B, 1, 8, 8] to logits [B, 10]."""
        width = self.channels
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def dataset(self, split: str) -> TensorDataset:
        """Return 1,438 training or 359 validation images with labels.

        Every call splits the images in the same way.
        """
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.from_numpy(digits.images).to(torch.uint8)
        labels = torch.from_numpy(digits.target)
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED)
        )
        held_out = int(len(images) * _VALIDATION_SHARE)
        chosen = order[:held_out] if split == "val" else order[held_out:]
        return TensorDataset(images[chosen], labels[chosen])

    def transform(self, batch: Any, training: bool) -> Any:
        """Return the images as floats [B, 1, 8, 8] from -1 to 1, and the labels."""
        images, labels = batch
        return images.unsqueeze(1).float().div_(8).sub_(1), labels

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        """Return the accuracy, one value per sample."""
        return {"accuracy": outputs.argmax(1) == batch[1]}
