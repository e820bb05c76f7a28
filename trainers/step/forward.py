"""The forward pass: a task's outputs and loss for a batch, in the run's precision."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import Dataset

from trainers.data.batch import Batch, fetch, map_tensors
from trainers.errors import MISSING, ConfigError
from trainers.model.precision import PrecisionSpec
from trainers.task import Task, collate_of


@dataclass(frozen=True)
class ForwardPass:
    """A model, bare or wrapped, as a task calls it on one device."""

    model: nn.Module
    task: Task
    spec: PrecisionSpec
    device: torch.device

    def __call__(
        self, batch: Batch, with_loss: bool = True
    ) -> tuple[Any, Any]:
        """Return the task's outputs and its scalar loss, which may be None.

        Raises ConfigError if the loss is not one number.
        """
        with self.spec.autocast_context(self.device):
            outputs = self.task.forward(
                self.model, self.spec.convert_batch(batch)
            )
            loss = self.task.loss(outputs, batch) if with_loss else None
            return outputs, None if loss is None else self.scalar(loss)

    @torch.no_grad()
    def read(
        self, dataset: Dataset[Any], rows: Tensor, training: bool = True
    ) -> Batch:
        """Read samples of a dataset as a batch for a pass; `rows` is int64 [n]."""
        batch = fetch(dataset, rows.tolist(), collate_of(self.task))
        return self.prepare(batch, training)

    @torch.no_grad()
    def prepare(self, batch: Batch, training: bool = True) -> Batch:
        """Return a transformed copy of the batch on the device."""
        moved = map_tensors(
            lambda tensor: tensor.to(self.device, copy=True), batch
        )
        return self.task.transform(moved, training)

    @property
    def said(self) -> str:
        """The name of the task's method that returns the loss, for messages."""
        return "loss()"

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no parameter of another phase requires a gradient."""
        return contextlib.nullcontext()

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward pass and return only its loss.

        Raises ConfigError if it is not one number, or does not depend on
        trained parameters.
        """
        _, loss = self(batch)
        return self.learnable(self.scalar(loss))

    def learnable(self, loss: Tensor) -> Tensor:
        """Return the loss; ConfigError if it should have a gradient and has none."""
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                f"{type(self.task).__name__}.{self.said}",
                MISSING,
                "must depend on parameters that require a gradient, and does not for this batch",
                "leave out detach(), no_grad() and requires_grad_(False), or add `0 * outputs.sum()` for such batches",
            )
        return loss

    def scalar(self, loss: Any) -> Tensor:
        """Return the task's loss as a zero-dimensional tensor.

        Raises ConfigError if it is not a tensor of one number.
        """
        if (
            isinstance(loss, Tensor)
            and loss.numel() == 1
            and not loss.is_complex()
        ):
            return loss if loss.ndim == 0 else loss.reshape(())
        raise ConfigError(
            f"{type(self.task).__name__}.{self.said}",
            shape_of(loss),
            "must be a tensor of one real number: the mean over the batch's samples, or over what weight() counts",
            "reduce it, e.g. by `.mean()`",
        )


def bare_of(model: nn.Module) -> nn.Module:
    """Return the module inside DDP or DP, or the module itself if it is not wrapped."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        bare: nn.Module = model.module
        return bare
    return model


def shape_of(value: Any) -> list[int] | str:
    """Return a tensor's shape, or the name of any other value's type, for messages."""
    if isinstance(value, Tensor):
        return list(value.shape)
    return type(value).__name__
