"""Shard models and tensors (FSDP2, DTensor), and gather them whole."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainers.devices.group import Group

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def shard_units(model: nn.Module) -> list[nn.Module]:
    """Find the blocks that fsdp gathers and frees one by one.

    They are the repeated children of ModuleList and Sequential: children with
    parameters, at any depth, that are not such containers themselves. Nothing
    inside a block is split further. The rest, and any block that shares a
    parameter with something outside it, belongs to the root.
    """
    uses = _uses(model)

    def blocks(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(module) in _CONTAINERS and type(child) not in _CONTAINERS:
                yield child
            else:
                yield from blocks(child)

    def owns_all(block: nn.Module) -> bool:
        own = _uses(block)
        return bool(own) and own.items() <= uses.items()

    return [block for block in blocks(model) if owns_all(block)]


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    """Count how often each parameter occurs in a model."""
    named = model.named_parameters(remove_duplicate=False)
    return Counter(parameter for _, parameter in named)


def is_sharded(model: nn.Module) -> bool:
    """Whether forward and backward of this module are collectives (FSDP2)."""
    return hasattr(type(model), "set_requires_gradient_sync")


class Used:
    """A digest of a sharded model's calls of units, and of parameters without gradient.

    FSDP does not compare these between ranks. If the ranks' digests differ,
    weights or gradients of one block or parameter were mixed with another's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.digest = 0
        """Equal on ranks that did the same; exact in float64."""
        for number, unit in enumerate(filter(is_sharded, model.modules())):
            unit.register_forward_pre_hook(partial(self._add, number))

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add to the digest which parameters a backward pass left without a gradient."""
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                self._add(number)

    def _add(self, number: int, *_: object) -> None:
        self.digest = (31 * self.digest + number + 1) % (1 << 48)


def is_shard(tensor: Any) -> bool:
    """Whether this is a rank's part of a tensor (a DTensor)."""
    return isinstance(tensor, Tensor) and hasattr(type(tensor), "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached, sharing the tensor's memory."""
    detached: Any = tensor.detach()
    part: Tensor = detached.to_local() if is_shard(detached) else detached
    return part


def whole(tree: Any, group: Group) -> Any:
    """Gather every sharded tensor of nested plain data into host memory of rank 0.

    Other ranks get None in place of these tensors.

    Every rank must call it.
    """
    if is_shard(tree):
        full = tree.full_tensor()
        return full.cpu() if group.rank == 0 else None
    if isinstance(tree, dict):
        return {key: whole(value, group) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(whole(value, group) for value in tree)
    return tree


def place_rows(rows: Tensor, whole: Tensor, like: Any) -> Tensor:
    """Return `rows` as this rank's part of a tensor sharded like `like`.

    The whole tensor has the shape and stride of `whole`.
    """
    from torch.distributed.tensor import DTensor

    placed: Tensor = DTensor.from_local(
        rows.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return placed


def shard_like(tree: Any, like: Any) -> Any:
    """Shard nested tensors, which every rank has whole, like those in `like`."""
    if is_shard(like):
        from torch.distributed.tensor import distribute_tensor

        tensor = tree.to(like.device, like.dtype)
        mesh = like.device_mesh
        return distribute_tensor(
            tensor, mesh, like.placements, src_data_rank=None
        )
    if isinstance(tree, dict) and isinstance(like, dict):
        return {
            key: shard_like(value, like.get(key))
            for key, value in tree.items()
        }
    are_rows = isinstance(tree, tuple | list) and isinstance(
        like, tuple | list
    )
    if are_rows and len(tree) == len(like):
        return type(tree)(map(shard_like, tree, like))
    return tree
