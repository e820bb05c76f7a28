"""A table in Parquet files, and an MLP.

`setup()` generates the table from a seed, unless it exists: 100,000 rows with
64 columns. The class of a row is the index of the largest of eight linear
functions of the row, so an MLP can learn it to almost 100 %.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainers.task import Task

_CLASSES = 8
_FILES = 4  # number of files of the training split
_VALIDATION_SHARE = 0.1


class Tabular(Task):
    """Classify B rows [B, F] (float32) into eight classes.

    `root`: the directory of the table on each node. `rows`: number of rows in
    the training split. `features`: number of columns. `width`, `depth`: size
    and number of the MLP's hidden layers. `seed`: seed of the table.
    """

    def __init__(
        self,
        root: str = "~/.cache/paceline",
        rows: int = 100_000,
        features: int = 64,
        width: int = 256,
        depth: int = 2,
        seed: int = 0,
    ) -> None:
        self.rows = rows
        self.features = features
        self.width = width
        self.depth = depth
        self.seed = seed
        self.directory = (
            Path(root).expanduser() / f"tabular-{rows}x{features}-{seed}"
        )

    @property
    def columns(self) -> list[str]:
        """The names of a row's columns."""
        return [f"f{index:03d}" for index in range(self.features)]

    def setup(self) -> None:
        """Write the table as Parquet, unless it exists; it appears only once complete."""
        if self.directory.exists():
            return
        aside = self.directory.with_name(
            f"{self.directory.name}.{os.getpid()}.tmp"
        )
        aside.mkdir(parents=True)
        rng = np.random.default_rng(self.seed)
        teacher = rng.standard_normal(
            (self.features, _CLASSES), dtype=np.float32
        )
        for name, rows in self._files():
            table = rng.standard_normal(
                (rows, self.features), dtype=np.float32
            )
            columns = {
                column: table[:, index]
                for index, column in enumerate(self.columns)
            }
            columns["label"] = (table @ teacher).argmax(1)
            pq.write_table(pa.table(columns), aside / name)
        aside.rename(self.directory)

    def _files(self) -> list[tuple[str, int]]:
        bounds = [self.rows * index // _FILES for index in range(_FILES + 1)]
        parts = [
            (f"train-{index}.parquet", bounds[index + 1] - bounds[index])
            for index in range(_FILES)
        ]
        return [
            *parts,
            ("val-0.parquet", max(1, int(self.rows * _VALIDATION_SHARE))),
        ]

    def dataset(self, split: str) -> TensorDataset:
        """Return rows [N, F] and their classes [N]."""
        files = sorted(map(str, self.directory.glob(f"{split}-*.parquet")))
        table = pyarrow.dataset.dataset(files).to_table()
        columns = [table[name].to_numpy() for name in self.columns]
        rows = torch.from_numpy(np.stack(columns, axis=1))
        return TensorDataset(
            rows, torch.from_numpy(table["label"].to_numpy().copy())
        )

    def model(self) -> nn.Module:
        """Return an MLP that gives logits [B, 8]."""
        layers: list[nn.Module] = []
        for wide_in, wide in pairwise(
            [self.features, *[self.width] * self.depth]
        ):
            layers += [nn.Linear(wide_in, wide), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.width, _CLASSES))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the mean cross entropy."""
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        """Return the accuracy, one value per sample."""
        return {"accuracy": outputs.argmax(1) == batch[1]}
