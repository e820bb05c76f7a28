"""Read image files as squares of uint8 pixels; crop whole batches at random."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class Square:
    """Reads an image file as uint8 [3, S, S], where S is `stored`.

    The shorter side is scaled to S pixels, and the middle square is cut out.
    """

    def __init__(self, stored: int) -> None:
        self.stored = stored

    def __call__(self, file: str | Path) -> Tensor:
        """Return the pixels of one file."""
        from PIL import Image

        with Image.open(file) as opened:
            opened.draft(
                "RGB", (self.stored, self.stored)
            )  # decodes a JPEG at the smallest sufficient fraction of its size
            image = opened.convert("RGB")
        scale = self.stored / min(image.size)
        wide, high = (
            max(self.stored, round(side * scale)) for side in image.size
        )
        left = (wide - self.stored) // 2
        top = (high - self.stored) // 2
        middle = image.resize((wide, high), Image.Resampling.BILINEAR).crop(
            (left, top, left + self.stored, top + self.stored)
        )
        return torch.from_numpy(np.array(middle).transpose(2, 0, 1).copy())


def crop_at_random(images: Tensor, size: int, smallest_area: float) -> Tensor:
    """Return a random part of each image, scaled and mirrored at random.

    A part's share of the area is drawn from `smallest_area` to 1, and its
    aspect ratio from 3:4 to 4:3 (Szegedy et al. 2014); sides that are too long
    are cut. Nothing waits for the device.

    Returns:
        Floats [B, C, size, size].
    """
    count = len(images)
    device = images.device
    area = torch.empty(count, device=device).uniform_(smallest_area, 1.0)
    ratio = (
        torch.empty(count, device=device)
        .uniform_(math.log(3 / 4), math.log(4 / 3))
        .exp_()
    )
    wide = (area * ratio).sqrt_().clamp_(max=1.0)
    high = (area / ratio).sqrt_().clamp_(max=1.0)
    centre = torch.empty(2, count, device=device).uniform_(-1.0, 1.0)
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    nothing = torch.zeros_like(wide)
    across = torch.stack(
        [wide * mirror, nothing, centre[0] * (1 - wide)], dim=1
    )
    down = torch.stack([nothing, high, centre[1] * (1 - high)], dim=1)
    grid = F.affine_grid(
        torch.stack([across, down], dim=1),
        [count, images.shape[1], size, size],
        align_corners=False,
    )
    return F.grid_sample(
        images.float(), grid, padding_mode="reflection", align_corners=False
    )


def crop_middle(images: Tensor, size: int) -> Tensor:
    """Return the middle of each image: floats [B, C, size, size]."""
    top = (images.shape[2] - size) // 2
    left = (images.shape[3] - size) // 2
    return images[:, :, top : top + size, left : left + size].float()
