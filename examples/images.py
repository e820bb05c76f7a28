"""The base class of the examples on torchvision's small image sets.

It downloads a set once, and provides uint8 tensors that stay on the device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from examples.synthetic import MaySynthesize, synthetic_images
from trainers.errors import ConfigError


class SmallImages(MaySynthesize):
    """Classify B images [B, C, H, W] (uint8) of a set that torchvision can download.

    `root`: the directory of the set on each node. `samples`: the number of
    samples to use from each split. `setup` stores the pixels as one file of
    tensors, so that workers need not import torchvision, which takes seconds.
    """

    source: ClassVar[str]
    """The class in torchvision.datasets."""
    shape: ClassVar[tuple[int, int, int]]
    classes: ClassVar[int] = 10
    sizes: ClassVar[dict[str, int]]
    """Number of images, by split."""

    def __init__(
        self,
        root: str = "~/.cache/paceline",
        synthetic: bool = False,
        samples: int | None = None,
    ) -> None:
        super().__init__(synthetic)
        self.root = Path(root).expanduser()
        self.samples = samples

    @property
    def _file(self) -> Path:
        return self.root / f"{self.source}.safetensors"

    def setup(self) -> None:
        """Download and check the data with torchvision, unless it exists."""
        super().setup()
        if self.synthetic or self._file.exists():
            return
        from torchvision import datasets

        tensors = {}
        for split in self.sizes:
            try:
                data = getattr(datasets, self.source)(
                    self.root, train=split == "train", download=True
                )
            except (
                RuntimeError,
                OSError,
            ) as error:  # no network, or a damaged or incomplete file
                raise ConfigError(
                    "task_args.root",
                    str(self.root),
                    f"holds no complete {self.source}, and downloading it failed ({error})",
                    "copy the set there, or set `task_args: {synthetic: true}`",
                ) from error
            images = torch.as_tensor(data.data)
            images = (
                images.unsqueeze(1)
                if images.ndim == 3
                else images.permute(0, 3, 1, 2)
            )
            tensors[f"{split}_images"] = images.contiguous()
            tensors[f"{split}_labels"] = torch.as_tensor(
                data.targets, dtype=torch.int64
            )
        aside = self._file.with_name(f"{self._file.name}.{os.getpid()}.tmp")
        save_file(tensors, aside)
        aside.replace(self._file)

    def dataset(self, split: str) -> TensorDataset:
        """Return uint8 images [N, C, H, W] and their labels [N].

        "val" is the set's test split.
        """
        count = min(self.samples or self.sizes[split], self.sizes[split])
        if self.synthetic:
            return TensorDataset(
                *synthetic_images(
                    count, self.shape, self.classes, seed=1 + (split == "val")
                )
            )
        tensors = load_file(self._file)
        return TensorDataset(
            tensors[f"{split}_images"][:count],
            tensors[f"{split}_labels"][:count],
        )

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        """Return the accuracy, one value per sample."""
        return {
            "accuracy": outputs.argmax(1) == batch[1],
            **super().metrics(outputs, batch),
        }
