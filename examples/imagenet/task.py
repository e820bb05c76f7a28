"""ImageNet with torchvision's ResNet-50, from class folders, from Parquet shards or
from mapped pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from examples.imagenet.pictures import Square, crop_at_random, crop_middle
from examples.synthetic import MaySynthesize, synthetic_images
from trainers import ArrowDataset
from trainers.data.arrow_files import column_names, find_files
from trainers.errors import MISSING, ConfigError

_SYNTHETIC_CLASSES = 32
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)


class ImageNet(MaySynthesize):
    """Classify B images of a thousand classes; squares [B, 3, stored, stored] (uint8)
    reach the device.

    `data`: a directory or URI that holds `train` and `val`, each with class folders
    (torchvision's ImageFolder) or with the shards that examples/imagenet/convert.py
    writes. `cache`: where shards that cannot be mapped are converted to. `samples`: how
    many synthetic images each split has.
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
        label_smoothing: float = 0.1,
        cache: str | None = None,
    ) -> None:
        super().__init__(synthetic)
        if data is None and not synthetic:
            raise ConfigError(
                "task_args.data",
                MISSING,
                "is needed",
                "name the directory of train and val, or set `synthetic: true`",
            )
        self.data = (
            data if data is None or "://" in data else str(Path(data).expanduser())
        )
        self.samples = samples
        self.architecture = architecture
        self.classes = classes
        self.stored = stored
        self.size = size
        self.smallest_area = smallest_area
        self.label_smoothing = label_smoothing
        self.cache = cache
        self._statistics: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def model(self) -> nn.Module:
        """One of torchvision's models, untrained: logits [B, classes]."""
        from torchvision import models

        model: nn.Module = models.get_model(
            self.architecture, weights=None, num_classes=self.classes
        )
        return model

    def dataset(self, split: str) -> Dataset[Any]:
        """Images uint8 [3, stored, stored] and their labels."""
        if self.synthetic:
            shape = (3, self.stored, self.stored)
            few = min(self.classes, _SYNTHETIC_CLASSES)
            return TensorDataset(
                *synthetic_images(self.samples, shape, few, seed=1 + (split == "val"))
            )
        where = f"{self.data}/{split}"
        if "://" not in where and not Path(where).is_dir():
            raise ConfigError(
                "task_args.data",
                self.data,
                f"holds no directory {split}",
                "name one with train and val",
            )
        if "://" not in where and not any(Path(where).glob("*.*")):
            from torchvision.datasets import ImageFolder

            return ImageFolder(where, loader=Square(self.stored))
        names = column_names(find_files(where)[0])
        if "pixels" in names:
            return ArrowDataset(where, ["pixels", "label"], cache=self.cache)
        return ArrowDataset(
            where,
            ["encoded", "label"],
            decode={"encoded": Square(self.stored).batch},
            cache=self.cache,
        )

    def transform(self, batch: Any, training: bool) -> Any:
        """Normalised floats [B, 3, size, size]: random crops in training, the middle in
        validation.
        """
        images, labels = batch
        cut = (
            crop_at_random(images, self.size, self.smallest_area)
            if training
            else crop_middle(images, self.size)
        )
        if images.device not in self._statistics:
            self._statistics[images.device] = (
                torch.tensor(_MEAN, device=images.device).view(3, 1, 1),
                torch.tensor(_DEVIATION, device=images.device).view(3, 1, 1),
            )
        mean, deviation = self._statistics[images.device]
        return cut.sub_(mean).div_(deviation), labels

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Cross entropy with smoothed labels, in validation too."""
        return F.cross_entropy(outputs, batch[1], label_smoothing=self.label_smoothing)

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        """Accuracy of the first guess and of the first five, one value a sample."""
        right = outputs.topk(min(5, self.classes), dim=1).indices == batch[1].unsqueeze(
            1
        )
        return {
            "accuracy": right[:, 0],
            "top5_accuracy": right.any(1),
            **super().metrics(outputs, batch),
        }
