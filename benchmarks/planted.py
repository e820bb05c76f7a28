"""Tasks with slowdowns planted in them, each by a mechanism that users' code has: for benchmarks/explain.py."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.digits.task import Digits
from examples.fashion_mnist.task import FashionMnist
from examples.gpt.task import CharacterModel
from examples.tabular.task import Tabular
from trainers.data.batch import fetch, map_tensors
from trainers.task import Task


def work(seconds: float) -> None:
    """Compute for so long on this thread, whatever else the machine does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class SlowData(Dataset[Any]):
    """A dataset whose samples are waited for, or computed; `wait_s` and `work_s` are of one sample."""

    def __init__(self, dataset: Dataset[Any], task: Task, wait_s: float, work_s: float) -> None:
        self.dataset, self.task, self.wait_s, self.work_s = dataset, task, wait_s, work_s

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        """A whole batch."""
        time.sleep(self.wait_s * len(numbers))
        work(self.work_s * len(numbers))
        return fetch(self.dataset, numbers, self.task.collate)


class Planted(Task):
    """A mixin before a task; `plant` has seconds a step, but for `lengths` (how many there are) and `reads`."""

    def __init__(self, plant: dict[str, float], per_step: int = 1, **args: Any) -> None:
        super().__init__(**args)
        self.plant, self.per_step = plant, per_step

    def dataset(self, split: str) -> Any:
        """The task's, slow where `fetch_wait_s` or `fetch_work_s` are set."""
        made: Any = super().dataset(split)
        wait_s, work_s = (self.plant.get(name, 0.0) / self.per_step for name in ("fetch_wait_s", "fetch_work_s"))
        return SlowData(made, self, wait_s, work_s) if split == "train" and wait_s + work_s > 0 else made

    def transform(self, batch: Any, training: bool) -> Any:
        """The task's, after `transform_s`; `lengths` cuts sequences to one of so many lengths."""
        batch = super().transform(batch, training)
        if training:
            work(self.plant.get("transform_s", 0.0))
        if training and (lengths := int(self.plant.get("lengths", 0))):
            cut = int(torch.randint(lengths, ()))
            batch = map_tensors(lambda tensor: tensor[:, : tensor.shape[1] - cut], batch)
        return batch

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The task's, after waiting for `wait_s`, reading the loss `reads` times, and rank 1's `slow_rank_s`."""
        loss: Tensor = super().loss(outputs, batch)  # type: ignore[assignment]
        if not loss.requires_grad:  # an evaluation
            return loss
        time.sleep(self.plant.get("wait_s", 0.0))
        for _ in range(int(self.plant.get("reads", 0))):
            loss.item()
        if os.environ.get("RANK", "0") == "1" or (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            work(self.plant.get("slow_rank_s", 0.0))
        return loss


class PlantedDigits(Planted, Digits):
    """Small images, convolutions."""


class PlantedText(Planted, CharacterModel):
    """Sequences, attention."""


class PlantedTable(Planted, Tabular):
    """Rows of a memory-mapped table, an MLP."""


class PlantedImages(Planted, FashionMnist):
    """Larger images, convolutions."""
