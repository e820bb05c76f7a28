"""Task: what a user writes. A model, its data and its loss; everything else has a default."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from trainers.config import TrainConfig
from trainers.config.sections import DataConfig
from trainers.data.batch import Batch, fetch, map_tensors, num_samples, tensors_of
from trainers.data.feed import Feed
from trainers.model.optimizer import build_optimizer

__all__ = ["Batch", "Task", "map_tensors", "num_samples", "task_feed", "tensors_of"]


class Task:
    """One learning problem.

    Shapes: B samples of one microbatch come first in every tensor of a batch. One instance lives in every
    worker; the constructor gets `task_args` and must be cheap (no data, no model).
    """

    def model(self) -> nn.Module:
        """Return a new model on the CPU; called once, under the run's seed."""
        raise _missing(self, "model")

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the map-style dataset of `split`: "train" or "val"."""
        raise _missing(self, "dataset")

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return a scalar: the mean over the batch's weight (see `weight`).

        Where a batch may weigh nothing (all its tokens are padding), divide the sum by `weight.clamp(min=1)`: a mean
        over nothing is NaN, and so is its gradient.
        """
        raise _missing(self, "loss")

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Return the model's outputs: `model(**batch)` for a dict, else `model(batch[0])`."""
        return model(**batch) if isinstance(batch, dict) else model(batch[0])

    def weight(self, batch: Batch) -> Tensor:
        """Return a scalar: what the loss of this batch is a mean over. Samples; override it for tokens."""
        return torch.tensor(float(num_samples(batch)))

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return evaluation metrics by name: a tensor [B] of one value a sample, which is averaged exactly, or a
        torchmetrics.Metric that this batch alone has updated (new, or the task's own: it is reset after every batch).
        """
        return {}

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return what `predict` writes, by column: [B] or [B, ...], of one shape in all batches."""
        return dict(outputs) if isinstance(outputs, dict) else {"output": outputs}

    def transform(self, batch: Batch, training: bool) -> Batch:
        """Change the whole batch, on the device, before the model: augmentation, normalisation."""
        return batch

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of a list of samples; override it for what does not stack."""
        return default_collate(samples)

    def optimizer(self, model: nn.Module, config: TrainConfig) -> Optimizer:
        """Return the optimizer that `config.optimizer` describes, at the scaled learning rate."""
        return build_optimizer(model, config)

    def worst_case_batch(self, dataset: Dataset[Any], size: int) -> Batch:
        """Return the batch of `size` samples that takes most memory: the first ones; override it for sequences."""
        length = len(dataset)  # type: ignore[arg-type]
        return fetch(dataset, [index % length for index in range(size)], self.collate)

    def setup(self) -> None:
        """Prepare a node, once, before any worker reads data: download, decompress."""

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state (EMA, curriculum): tensors and plain data, kept in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def _missing(task: Task, method: str) -> TypeError:
    return TypeError(f"{type(task).__name__} must define `{method}()`: see trainers/task.py for what a task is")


def task_feed(
    dataset: Dataset[Any], task: Task, config: DataConfig, device: torch.device, *, sharers: int, seed: int
) -> Feed:
    """Return a feed of `dataset` that collates and transforms as the task does; `sharers` as in Feed."""
    transform = None if type(task).transform is Task.transform else task.transform
    return Feed(dataset, task.collate, transform, config, device, sharers=sharers, seed=seed)
