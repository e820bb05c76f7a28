"""CIFAR-10 with a ResNet-9 designed for 94 % in 24 epochs.

The data stays on the device, and is augmented there.

Network, schedule, label smoothing and augmentation follow David Page's "How to
train your ResNet" (2018). The augmentation shifts an image by up to four
pixels, fills the border by reflection, mirrors the image, and blanks a square
of 8 x 8 pixels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.images import SmallImages

_BORDER = 4
_BLANK = 8
_LOGIT_SCALE = 0.125


def _block(wide_in: int, wide: int, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(wide_in, wide, 3, padding=1, bias=False),
        nn.BatchNorm2d(wide),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class _Residual(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_block(wide, wide), _block(wide, wide))

    def forward(self, images: Tensor) -> Tensor:
        return images + self.blocks(images)


class _Scale(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits * _LOGIT_SCALE


class Cifar10(SmallImages):
    """Classify B colour images [B, 3, 32, 32] (uint8).

    `width`: channels of the first layer (64: 6.6 million parameters).
    """

    source = "CIFAR10"
    shape = (3, 32, 32)
    sizes: ClassVar = {"train": 50_000, "val": 10_000}

    def __init__(
        self,
        root: str = "~/.cache/paceline",
        synthetic: bool = False,
        samples: int | None = None,
        width: int = 64,
        label_smoothing: float = 0.2,
    ) -> None:
        super().__init__(root, synthetic, samples)
        self.width = width
        self.label_smoothing = label_smoothing
        self._statistics: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def model(self) -> nn.Module:
        """Return a ResNet-9, which gives logits [B, 10]."""
        wide = self.width
        return nn.Sequential(
            _block(3, wide),
            _block(wide, 2 * wide, pool=True),
            _Residual(2 * wide),
            _block(2 * wide, 4 * wide, pool=True),
            _block(4 * wide, 8 * wide, pool=True),
            _Residual(8 * wide),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * wide, 10, bias=False),
            _Scale(),
        )

    def transform(self, batch: Any, training: bool) -> Any:
        """Return normalised floats and the labels; augment the images in training.

        Each image gets its own random shift, mirroring and blank square.
        """
        images, labels = batch
        if training:
            images = crop_and_mirror(images)
        images = self._normalised(images)
        return (blank_squares(images) if training else images), labels

    def _normalised(self, images: Tensor) -> Tensor:
        if (
            images.device not in self._statistics
        ):  # of the training pixels; copied to the device once, not in every step
            mean = torch.tensor(
                [125.31, 122.95, 113.87], device=images.device
            ).view(3, 1, 1)
            deviation = torch.tensor(
                [62.99, 62.09, 66.70], device=images.device
            ).view(3, 1, 1)
            self._statistics[images.device] = mean, deviation
        mean, deviation = self._statistics[images.device]
        return images.float().sub_(mean).div_(deviation)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean cross entropy with smoothed labels, also in validation."""
        return F.cross_entropy(
            outputs, batch[1], label_smoothing=self.label_smoothing
        )


def crop_and_mirror(images: Tensor) -> Tensor:
    """Return images [B, C, H, W] shifted by up to four pixels, half of them mirrored.

    Pixels beyond the border are reflections. A single gather reads the images,
    so there is no padded copy, and nothing waits for the device.
    """
    count, _, height, width = images.shape
    draw = (
        torch.randint(2 * _BORDER + 1, (2, count, 1), device=images.device)
        - _BORDER
    )
    rows = _reflected(
        draw[0] + torch.arange(height, device=images.device), height
    )
    columns = _reflected(
        draw[1] + torch.arange(width, device=images.device), width
    )
    mirrored = torch.rand(count, 1, device=images.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    places = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).view(
        count, 1, -1
    )
    return (
        images.flatten(2)
        .gather(2, places.expand(-1, images.shape[1], -1))
        .view_as(images)
    )


def _reflected(places: Tensor, size: int) -> Tensor:
    return size - 1 - (size - 1 - places.abs()).abs()


def blank_squares(images: Tensor) -> Tensor:
    """Set a random 8 x 8 square of each normalised image to the mean, in place."""
    count, _, height, width = images.shape
    corner = torch.randint(
        height - _BLANK + 1, (count, 1), device=images.device
    )
    inside_rows = _within(corner, height)
    inside_columns = _within(
        torch.randint(width - _BLANK + 1, (count, 1), device=images.device),
        width,
    )
    return images.masked_fill_(
        (inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)).unsqueeze(1),
        0.0,
    )


def _within(corner: Tensor, size: int) -> Tensor:
    places = torch.arange(size, device=corner.device)
    return (places >= corner) & (places < corner + _BLANK)
