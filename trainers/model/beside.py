"""Find what a task trains beside its model, such as a loss with parameters.

It is the model's equal: on its device, alike on all ranks, averaged over them, kept in
checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainers.errors import CheckpointError, ConfigError
from trainers.model.sharding import is_sharded


def modules_beside(task: Any, model: nn.Module) -> list[nn.Module]:
    """Return the task's modules with parameters to train that are not the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        value
        for value in vars(task).values()
        if isinstance(value, nn.Module)
        and any(one.requires_grad and id(one) not in own for one in value.parameters())
    ]


def trained_beside(
    task: Any, model: nn.Module, optimizer: Optimizer
) -> dict[str, Tensor]:
    """Return by name what the optimizer holds beside the model.

    With it comes what else is in the same attributes of the task.

    Raises ConfigError for what no checkpoint would find again.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = {
        id(one): one
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) not in own
    }
    if not held:
        return {}
    owner = f"{type(task).__name__}.optimizer()"
    found: dict[str, Tensor] = {}
    for name, value in vars(task).items():
        tensors = {
            inner: one for inner, one in _tensors(value, name) if id(one) not in own
        }
        if any(id(one) in held for one in tensors.values()):
            found |= tensors
    if lost := held.keys() - {id(one) for one in found.values()}:
        shape = list(held[min(lost)].shape)
        rule = "is neither the model's nor in an attribute of the task, and no checkpoint would have it"
        raise ConfigError(
            owner,
            f"a parameter of {shape}",
            rule,
            "keep it, or its module, as an attribute of the task",
        )
    if is_sharded(model):
        rule = f"shards the model alone, and {owner} holds `{next(iter(found))}`, too"
        raise ConfigError(
            "strategy",
            "fsdp",
            rule,
            "set `strategy: ddp`, or make it a part of the model",
        )
    return found


def left_beside(task: Any, model: nn.Module, kept: Iterable[str]) -> dict[str, Tensor]:
    """Return by name the tensors of a task that are neither the model's nor `kept`."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        name: one
        for name, one in _all_tensors(task).items()
        if id(one) not in own and name not in kept
    }


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return by name the sums of floating tensors, which tell whether one has changed."""
    return {
        name: str(
            float(one.detach().sum(dtype=torch.float64))
        )  # as words NaN is equal to itself
        for name, one in tensors.items()
        if one.is_floating_point() and not one.is_meta and not is_lazy(one)
    }


def place(
    tensors: Iterable[Tensor], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Move tensors to a device, in place; floating ones also to a format, if given."""
    for tensor in tensors:
        tensor.data = tensor.data.to(
            device, dtype if tensor.is_floating_point() else None
        )


def _all_tensors(task: Any) -> dict[str, Tensor]:
    return {
        inner: one
        for name, value in vars(task).items()
        for inner, one in _tensors(value, name)
    }


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        for inner, tensor in value.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                yield f"{name}.{inner}", tensor
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)):
        items: Iterable[tuple[Any, Any]] = (
            value.items() if isinstance(value, dict) else enumerate(value)
        )
        for key, item in items:
            if isinstance(item, (nn.Module, Tensor)):
                yield from _tensors(item, f"{name}.{key}")


def find_beside(task: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the task's tensors of these names.

    Raises CheckpointError where one is missing.
    """
    there = _all_tensors(task)
    if missing := sorted(names - there.keys()):
        raise CheckpointError(f"it does not fit this task, which has no `{missing[0]}`")
    return {name: there[name] for name in names}


@torch.no_grad()
def load_beside(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Take back what a checkpoint has; CheckpointError where it has other tensors."""
    shapes = {name: one.shape for name, one in tensors.items()}
    if {name: one.shape for name, one in saved.items()} != shapes:
        raise CheckpointError(
            "it does not fit this task: what is trained beside the model has other names or shapes"
        )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])
