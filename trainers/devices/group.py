"""The ranks of one run, and the few collectives that the loop needs."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Group:
    """The ranks of one run. With one rank every method returns at once, and no process group is needed.

    Every rank must call every method equally often.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on the tensor's own device."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks, on the tensor's own device."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        moved = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(tensor.device)

    def gather(self, value: T) -> list[T]:
        """Return plain data of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def collect(self, value: T) -> list[T]:
        """Return plain data of every rank, in rank order, on rank 0; nothing on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0)
        return values or []

    def first(self, value: T) -> T:
        """Return rank 0's plain data on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)
