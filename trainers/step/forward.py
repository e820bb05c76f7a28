"""The forward pass: a task's outputs and loss of a batch, in the run's precision.

If torch complains about mixed devices, the error names the tensors that are elsewhere.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import Dataset

from trainers.data.batch import Batch, fetch, map_tensors, parts_of
from trainers.errors import MISSING, ConfigError, DeviceMismatchError
from trainers.model.precision import PrecisionSpec
from trainers.model.strategy import raise_if_unused
from trainers.task import Task

_NAMED = 4  # how many tensors a sentence names
_DEPTH = 6  # how deep they are looked for
# torch's own words, from the checks of its dispatcher and of its CUDA, cuDNN and meta
# kernels.
_MISMATCH = (
    "same device",
    "expected device",
    "two devices",
    "device type",
    "but expected on",
    "Input type",
    "passed weights are on",
    "Placeholder storage",
)
_FIXES = {
    "batch": "move what `transform()` makes to the batch's device, and keep a batch's tensors in tuples, lists, dicts "
    "and dataclasses",
    "state": "leave parameters and buffers where `model.to()` puts them",
    "attribute": "keep a module's tensors with `register_buffer()`, which moves them with the model",
    "task": "move a task's tensors to the batch's device where they are used",
}


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
    """The task's compiled loss(); None if it is not compiled."""

    def __call__(self, batch: Batch, with_loss: bool = True) -> tuple[Any, Any]:
        """Return the task's outputs and its scalar loss, which may be None.

        Raises DeviceMismatchError if torch rejects tensors of different devices, and
        ConfigError if DDP waits for gradients that never come.
        """
        try:
            with self.spec.autocast_context(self.device):
                outputs = self.task.forward(self.model, self.spec.convert_batch(batch))
                return outputs, self.loss_of(outputs, batch) if with_loss else None
        except RuntimeError as error:
            self.explain(error, batch)
            raise

    @torch.no_grad()
    def read(self, dataset: Dataset[Any], rows: Tensor, training: bool = True) -> Batch:
        """Read samples of a dataset as a batch for a pass; `rows` is int64 [n]."""
        batch = fetch(dataset, rows.tolist(), self.task.collate)
        return self.prepare(batch, training)

    @torch.no_grad()
    def prepare(self, batch: Batch, training: bool = True) -> Batch:
        """Return a transformed copy of the batch on the device."""
        moved = map_tensors(lambda tensor: tensor.to(self.device, copy=True), batch)
        return self.task.transform(moved, training)

    @property
    def said(self) -> str:
        """The name of the task's method that returns the loss, for messages."""
        return "loss()"

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which only what this loss trains requires a gradient."""
        return contextlib.nullcontext()

    def loss_of(self, outputs: Any, batch: Batch) -> Any:
        """Return the task's loss for given outputs, or None if the task returns None.

        Raises ConfigError if it is not one number.
        """
        loss = (self.compiled_loss or self.task.loss)(outputs, batch)
        return None if loss is None else self.scalar(loss)

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward pass and return its loss alone.

        Raises ConfigError if it is not one number, or does not depend on trained
        parameters.
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
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            return loss if loss.ndim == 0 else loss.reshape(())
        raise ConfigError(
            f"{type(self.task).__name__}.{self.said}",
            shape_of(loss),
            "must be a tensor of one real number, the mean over the batch's weight",
            "reduce it, as by `.mean()`",
        )

    def explain(self, error: RuntimeError, batch: Batch) -> None:
        """Raise a clearer error for mixed devices or unused parameters."""
        raise_if_unused(error, self.model)
        raise_if_mismatch(error, self.task, self.model, batch, self.device)


def bare_of(model: nn.Module) -> nn.Module:
    """Return the module inside DDP or DP, or the module itself if it is not wrapped."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        bare: nn.Module = model.module
        return bare
    return model


def shape_of(value: Any) -> list[int] | str:
    """Return a tensor's shape, or the type's name of any other value, for messages."""
    if isinstance(value, Tensor):
        return list(value.shape)
    return type(value).__name__


def raise_if_mismatch(
    error: RuntimeError,
    task: Task,
    model: nn.Module,
    batch: Batch,
    device: torch.device,
) -> None:
    """Raise DeviceMismatchError if torch's error is about devices; otherwise return.

    Looks at the batch, at the model's parameters and buffers, and at tensors that
    modules or the task hold as plain attributes, which `model.to(device)` does not
    move.
    """
    if not any(words in str(error) for words in _MISMATCH):
        return
    bare = bare_of(model)
    found = {
        "batch": named_tensors(batch, "batch"),
        "state": named_tensors(bare, "model"),
        "attribute": itertools.chain.from_iterable(
            _held(module, path or type(module).__name__)
            for path, module in bare.named_modules()
        ),
        "task": _held(task, type(task).__name__),
    }
    names: list[str] = []
    fixes = []
    for place, tensors in found.items():
        before = len(names)
        for name, tensor in tensors:
            if _is_elsewhere(tensor, device):
                names.append(f"{name} on {tensor.device}")
        if len(names) > before:
            fixes.append(_FIXES[place])
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        said = f"{', '.join(names[:_NAMED])}{more} cannot meet the rest on {device}"
    elif "device" in str(error):
        said = f"forward() or loss() makes a tensor that is not on {device}, where batch and model are"
        fixes = ["give it the `device=` of one of its inputs"]
    else:
        return
    raise DeviceMismatchError(
        f"{said}; {'; '.join(fixes)} (torch: {str(error).splitlines()[0]})"
    ) from error


def _is_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    # torch takes these as plain numbers.
    is_number = tensor.device.type == "cpu" and tensor.ndim == 0
    return tensor.device != device and not is_number


def _held(owner: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an object's attributes, except those a module registers."""
    for key, value in vars(owner).items():
        if key not in ("_parameters", "_buffers", "_modules"):
            yield from named_tensors(value, f"{name}.{key}", depth - 1)


def named_tensors(
    value: Any, name: str, depth: int = _DEPTH
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a nested batch, or inside objects in it, with its path.

    An example of a path is `batch['image'][0]`.
    """
    if isinstance(value, Tensor):
        yield f"`{name}`", value
    elif isinstance(value, nn.Module):
        for path, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"`{name}.{path}`", tensor
    elif depth == 0:  # objects may hold each other
        return
    elif isinstance(value, (dict, tuple, list)):
        for key, item in parts_of(value) or ():
            yield from named_tensors(item, f"{name}[{key!r}]", depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _held(value, name, depth)
