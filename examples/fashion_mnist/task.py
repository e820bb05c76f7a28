"""Fashion-MNIST: ten kinds of clothing in MNIST's format.

This task differs from MNIST's in data, pixel statistics and mirroring.
"""

from __future__ import annotations

from typing import Any

import torch

from examples.mnist.task import Mnist


class FashionMnist(Mnist):
    """Classify B images of clothing [B, 1, 28, 28] (uint8).

    Training images are mirrored at random.
    """

    source = "FashionMNIST"
    mean = 0.2860
    deviation = 0.3530

    def transform(self, batch: Any, training: bool) -> Any:
        """Return normalised floats; in training, half of the images are mirrored."""
        images, labels = super().transform(batch, training)
        if training:
            mirrored = (
                torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
            )
            images = torch.where(mirrored, images.flip(3), images)
        return images, labels
