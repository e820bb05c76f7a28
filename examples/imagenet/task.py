"""ImageNet with torchvision's ResNet-50, from class folders or memory-mapped pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from examples.imagenet.pictures import Square, crop_at_random, crop_middle
from examples.synthetic import MaySynthesize, synthetic_images
from trainers.errors import MISSING, ConfigError

_SYNTHETIC_CLASSES = 32
_LABEL_SMOOTHING = 0.1
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)


class ImageNet(MaySynthesize):
    """Classify B square images [B, 3, S, S] (uint8).

    Args:
        data: A directory that holds `train` and `val`, each with class folders
            (torchvision's ImageFolder) or with the files of
            examples/imagenet/convert.py.
        synthetic: Whether to use random images instead of data.
        samples: Number of synthetic images in each split.
        architecture: The name of one of torchvision's models.
        classes: Number of classes.
        stored: The side S of a square, pixels.
        size: The side of the model's input, pixels. The input is cut out of a
            square.
        smallest_area: The smallest share of a square's area that is drawn for
            a random crop.
    """

    def __init__(
        self,
        data: str | None = None,
        synthetic: bool = False,
        samples: int = 1024,
        architecture: str = "resnet50",
        classes: int = 1000,
        stored: int = 256,
        size: int = 224,
        smallest_area: float = 0.08,
    ) -> None:
        super().__init__(synthetic)
        if data is None and not synthetic:
            raise ConfigError(
                "task_args.data",
                MISSING,
                "is needed",
                "name the directory of train and val, or set `synthetic: true`",
            )
        self.data = Path(data or "").expanduser()
        self.samples = samples
        self.architecture = architecture
        self.classes = classes
        self.stored = stored
        self.size = size
        self.smallest_area = smallest_area
        self._statistics: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def model(self) -> nn.Module:
        """Return an untrained model of torchvision, which gives logits [B, classes]."""
        from torchvision import models

        model: nn.Module = models.get_model(
            self.architecture, weights=None, num_classes=self.classes
        )
        return model

    def dataset(self, split: str) -> Dataset[Any]:
        """Return images uint8 [3, stored, stored] and their labels."""
        if self.synthetic:
            shape = (3, self.stored, self.stored)
            few = min(self.classes, _SYNTHETIC_CLASSES)
            images, labels = synthetic_images(
                self.samples, shape, few, seed=1 + (split == "val")
            )
            return TensorDataset(images, labels)
        where = self.data / split
        if not where.is_dir():
            rule = f"holds no directory {split}"
            fix = "name a directory with train and val"
            raise ConfigError("task_args.data", str(self.data), rule, fix)
        if not (where / "pixels.npy").exists():
            from torchvision.datasets import ImageFolder

            return ImageFolder(where, loader=Square(self.stored))
        # Memory-mapped: pixels are read when a batch is made, and never
        # written. With mode "c", torch does not warn of a read-only array.
        files = [where / "pixels.npy", where / "labels.npy"]
        arrays = [np.load(file, mmap_mode="c") for file in files]
        return TensorDataset(*map(torch.from_numpy, arrays))

    def transform(self, batch: Any, training: bool) -> Any:
        """Return normalised floats [B, 3, size, size], and the labels.

        Training uses random crops, validation the middle of each image.
        """
        images, labels = batch
        if training:
            cut = crop_at_random(images, self.size, self.smallest_area)
        else:
            cut = crop_middle(images, self.size)
        if images.device not in self._statistics:
            self._statistics[images.device] = (
                torch.tensor(_MEAN, device=images.device).view(3, 1, 1),
                torch.tensor(_DEVIATION, device=images.device).view(3, 1, 1),
            )
        mean, deviation = self._statistics[images.device]
        return cut.sub_(mean).div_(deviation), labels

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean cross entropy with smoothed labels, also in validation."""
        return F.cross_entropy(
            outputs, batch[1], label_smoothing=_LABEL_SMOOTHING
        )

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        """Return the top-1 and the top-5 accuracy, one value each per sample."""
        guesses = outputs.topk(min(5, self.classes), dim=1).indices
        right = guesses == batch[1].unsqueeze(1)
        return {
            "accuracy": right[:, 0],
            "top5_accuracy": right.any(1),
            **super().metrics(outputs, batch),
        }
