"""Synthetic data of the right shapes, for when the real data is not available.

Every output of a run with such data marks the data as synthetic.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from trainers.task import Task, num_samples, tensors_of

logger = logging.getLogger(__name__)

_COARSE = (
    4  # width and height of a class's picture, pixels, before it is enlarged
)
_NOISE = 0.5  # share of a synthetic image that is noise


class MaySynthesize(Task):
    """A task that, with `synthetic: true`, needs neither real data nor a network.

    Every output of a run with synthetic data says so: a warning at the start, the metric
    `val_synthetic` (the share of samples that are synthetic) in each
    evaluation, in result.json, in summaries and in a sweep's table, and a
    column of predictions.
    """

    def __init__(self, synthetic: bool = False) -> None:
        self.synthetic = synthetic

    def setup(self) -> None:
        """Warn if the data is synthetic; subclasses also download real data here."""
        if self.synthetic:
            logger.warning(
                "%s: the data is SYNTHETIC, of the real shapes; accuracy and loss say nothing of the real problem, and "
                "every result is marked `val_synthetic 1`",
                type(self).__name__,
            )

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Return the mark `synthetic`, 1 for each sample, if the data is synthetic."""
        if not self.synthetic:
            return {}
        return {
            "synthetic": torch.ones(
                num_samples(batch), device=tensors_of(batch)[0].device
            )
        }

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return the model's outputs and, for synthetic data, the mark."""
        return super().predictions(outputs, batch) | {
            name: mark.bool()
            for name, mark in MaySynthesize.metrics(
                self, outputs, batch
            ).items()
        }


def synthetic_images(
    count: int, shape: tuple[int, int, int], classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return images uint8 [count, C, H, W] and labels [count].

    Each image is a coarse picture of its class with noise, so the classes can
    be learned. The pictures do not depend on `seed`, so that a validation
    split can use another seed.
    """
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = shape
    coarse = torch.rand(
        classes,
        channels,
        _COARSE,
        _COARSE,
        generator=torch.Generator().manual_seed(0),
    )
    pictures = torch.nn.functional.interpolate(
        coarse, size=(height, width), mode="bilinear"
    )
    pictures = (pictures * 255 * (1 - _NOISE)).to(torch.uint8)
    labels = torch.randint(classes, (count,), generator=generator)
    noise = torch.randint(
        int(255 * _NOISE),
        (count, *shape),
        dtype=torch.uint8,
        generator=generator,
    )
    return noise.add_(pictures[labels]), labels
