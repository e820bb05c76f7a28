"""Batches on their way to the device, copied one ahead on a stream of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainers.data.batch import Batch, map_tensors

_END = object()
_copy_stream = functools.cache(torch.cuda.Stream)  # one of a device: torch keeps the memory of every stream apart


class Pinnable:
    """A batch that a DataLoader pins right: torch skips dataclasses, and in some versions makes lists of tuples."""

    def __init__(self, batch: Batch, beside: Any = None) -> None:
        self.batch, self.beside = batch, beside

    def pin_memory(self) -> Pinnable:
        """Return the same batch in page-locked memory (torch's protocol)."""
        return Pinnable(
            map_tensors(lambda tensor: tensor.pin_memory() if _strided(tensor) else tensor, self.batch), self.beside
        )


class Copies:
    """Copies on a CUDA stream of their own. Neither method waits for the device when the memory is page-locked."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _copy_stream(device)

    def begin(self, batch: Batch) -> Batch:
        """Return the batch on the device, before its copy is done."""
        with torch.cuda.stream(self._stream):
            return map_tensors(lambda t: t.to(self._device, non_blocking=True) if _strided(t) else t, batch)

    def hand_over(self, batch: Batch) -> Batch:
        """Return what `begin` gave, from now on safe to use (and to free) in the stream that computes."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)

        def settle(tensor: Tensor) -> Tensor:
            if not _strided(tensor):  # sparse or jagged: record_stream does not know them
                return tensor.to(self._device)
            tensor.record_stream(computing)  # type: ignore[no-untyped-call, unused-ignore]
            return tensor

        return map_tensors(settle, batch)


def _strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def to_device(batches: Iterator[Batch], device: torch.device, ahead: bool) -> Iterator[Batch]:
    """Return the same batches on `device`, in order; on a CPU the very same iterator.

    `ahead`: the copy of the next batch begins before the one at hand is given out. Right where other processes load
    it; a batch that is made in this process may draw random numbers, which must not happen before a checkpoint of
    the step at hand.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda":
        return copied(batches, Copies(device), ahead)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)


def copied(batches: Iterator[Batch], copies: Copies, ahead: bool) -> Iterator[Batch]:
    """Yield the batches through `copies`."""
    begun = map(copies.begin, batches)
    if not ahead:
        yield from map(copies.hand_over, begun)
        return
    coming = next(begun, _END)
    while coming is not _END:
        ready = copies.hand_over(coming)  # waits for this batch's copy alone: the next one's is not in the stream yet
        coming = next(begun, _END)
        yield ready
