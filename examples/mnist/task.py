"""MNIST and the CNN that PyTorch's guides train on it.

60,000 grey images of 28 x 28, from torchvision.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from examples.images import SmallImages


class Mnist(SmallImages):
    """Classify B handwritten digits [B, 1, 28, 28] (uint8)."""

    source = "MNIST"
    shape = (1, 28, 28)
    sizes: ClassVar = {"train": 60_000, "val": 10_000}
    mean, deviation = 0.1307, 0.3081  # of the training pixels

    def model(self) -> nn.Module:
        """Return two convolutions and two linear layers, which give logits [B, 10].

        The model has dropout and 1.2 million parameters.
        """
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 12 * 12, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def transform(self, batch: Any, training: bool) -> Any:
        """Return normalised floats and the labels; runs on the device."""
        images, labels = batch
        return images.float().div_(255).sub_(self.mean).div_(
            self.deviation
        ), labels
