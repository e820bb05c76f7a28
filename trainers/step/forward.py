"""The forward pass: a task's outputs and loss of a batch, in the run's precision."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainers.data.batch import Batch
from trainers.errors import MISSING, ConfigError
from trainers.model.precision import PrecisionSpec
from trainers.model.strategy import raise_if_unused
from trainers.step.device_mismatch import raise_if_mismatch
from trainers.task import Task


@dataclass(frozen=True)
class ForwardPass:
    """A model, bare or wrapped, as a task calls it on one device."""

    model: nn.Module
    task: Task
    spec: PrecisionSpec
    device: torch.device
    compiled_loss: Callable[[Any, Batch], Any] | None = field(
        default=None, kw_only=True
    )
    """The task's loss() as `compile` has it; None: as it is."""

    def __call__(self, batch: Batch, with_loss: bool = True) -> tuple[Any, Any]:
        """Return the task's outputs and its scalar loss, or None for the loss.

        Raises DeviceMismatchError where torch refuses tensors of different devices,
        ConfigError where DDP waits for gradients that do not come.
        """
        try:
            with self.spec.autocast_context(self.device):
                outputs = self.task.forward(self.model, self.spec.convert_batch(batch))
                return outputs, self.loss_of(outputs, batch) if with_loss else None
        except RuntimeError as error:
            self.explain(error, batch)
            raise

    @property
    def said(self) -> str:
        """The task's method that gives the loss, for a sentence."""
        return "loss()"

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which only what this loss trains requires a gradient."""
        return contextlib.nullcontext()

    def loss_of(self, outputs: Any, batch: Batch) -> Any:
        """Return the task's loss of outputs that are there; None where it gives none.

        ConfigError as `loss`.
        """
        loss = (self.compiled_loss or self.task.loss)(outputs, batch)
        return None if loss is None else self.scalar(loss)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss alone.

        Raises ConfigError where it is not one number, or nothing can be learned from
        it.
        """
        loss = self(batch)[1]
        loss = self.scalar(loss) if loss is None else loss
        if torch.is_grad_enabled() and not loss.requires_grad:
            rule = "must depend on parameters that require a gradient, and does not for this batch"
            fix = "leave out detach(), no_grad() and requires_grad_(False), or add `0 * outputs.sum()` for such batches"
            raise ConfigError(
                f"{type(self.task).__name__}.{self.said}", MISSING, rule, fix
            )
        return loss

    def scalar(self, loss: Any) -> Tensor:
        """Return the task's loss as a tensor of no dimension.

        Raises ConfigError where it is something else.
        """
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss if loss.ndim == 0 else loss.reshape(())
        shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        rule = "must be a tensor of one number, the mean over the batch's weight"
        raise ConfigError(
            f"{type(self.task).__name__}.{self.said}",
            shown,
            rule,
            "reduce it, as by `.mean()`",
        )

    def explain(self, error: RuntimeError, batch: Batch) -> None:
        """Raise ours for torch's words on devices or unused parameters."""
        raise_if_unused(error, self.model)
        raise_if_mismatch(error, self.task, self.model, batch, self.device)
