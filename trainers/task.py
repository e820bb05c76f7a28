"""Task: what a user writes. A model, its data and its loss; everything else has a default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

from trainers.config import TrainConfig

Batch = Any
"""Any nesting of tensors (tuple, list, dict, dataclass) whose first dimension counts samples."""


class Task:
    """One learning problem.

    Shapes: B samples of one microbatch come first in every tensor of a batch. One instance lives in every
    worker; the constructor gets `task_args` and must be cheap (no data, no model).
    """

    def model(self) -> nn.Module:
        """A new model on the CPU; called once, under the run's seed."""
        raise _missing(self, "model")

    def dataset(self, split: str) -> Dataset[Any]:
        """The map-style dataset of `split`: "train" or "val"."""
        raise _missing(self, "dataset")

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Scalar: the mean over the batch's weight (see `weight`).

        Where a batch may weigh nothing (all its tokens are padding), divide the sum by `weight.clamp(min=1)`: a mean
        over nothing is NaN, and so is its gradient.
        """
        raise _missing(self, "loss")

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Model outputs of a batch: `model(**batch)` for a dict, else `model(batch[0])`."""
        return model(**batch) if isinstance(batch, dict) else model(batch[0])

    def weight(self, batch: Batch) -> Tensor:
        """Scalar: what the loss of this batch is a mean over. Samples; override it for tokens."""
        return torch.tensor(float(num_samples(batch)))

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Evaluation metrics by name: a tensor [B] of one value a sample, which is averaged exactly, or a
        torchmetrics.Metric that this batch alone has updated (new, or the task's own: it is reset after every batch).
        """
        return {}

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """What `predict` writes, a column each: [B] or [B, ...], of one shape in all batches."""
        return dict(outputs) if isinstance(outputs, dict) else {"output": outputs}

    def transform(self, batch: Batch, training: bool) -> Batch:
        """The whole batch, on the device, before the model: augmentation, normalisation."""
        return batch

    def collate(self, samples: list[Any]) -> Batch:
        """A batch from a list of samples; override it for what does not stack."""
        return default_collate(samples)

    def optimizer(self, model: nn.Module, config: TrainConfig) -> Optimizer:
        """The optimizer that `config.optimizer` describes, at the scaled learning rate."""
        from trainers.model.optimizer import build_optimizer

        return build_optimizer(model, config)

    def worst_case_batch(self, dataset: Dataset[Any], size: int) -> Batch:
        """The batch of `size` samples that takes most memory: the first ones; override it for sequences."""
        from trainers.data.feed import fetch

        length = len(dataset)  # type: ignore[arg-type]
        return fetch(dataset, [index % length for index in range(size)], self.collate)

    def setup(self) -> None:
        """Once a node, before any worker reads data: download, decompress."""

    def state_dict(self) -> dict[str, Any]:
        """The task's own state (EMA, curriculum): tensors and plain data, kept in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def _missing(task: Task, method: str) -> TypeError:
    return TypeError(f"{type(task).__name__} must define `{method}()`: see trainers/task.py for what a task is")


def num_samples(batch: Batch) -> int:
    """First dimension of the first tensor in a nested batch."""
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError("the batch has no tensor with a first dimension to count samples by: override `weight()`")


def tensors_of(batch: Batch) -> list[Tensor]:
    """All tensors of a nested batch, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The same nesting with `function` applied to every tensor; other leaves stay as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return type(batch)((key, map_tensors(function, value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(function, value) for value in batch)
    if hasattr(batch, "__dataclass_fields__") and not isinstance(batch, type):
        return type(batch)(**{name: map_tensors(function, getattr(batch, name)) for name in batch.__dataclass_fields__})
    return batch


def is_tensor_dataset(dataset: Dataset[Any]) -> bool:
    """Whether the dataset is nothing but tensors, which may be indexed a whole batch at a time."""
    return type(dataset) is TensorDataset
