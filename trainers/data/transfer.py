"""Batches on their way to the device: copied one ahead on a stream of their own; and tensors left behind, by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainers.errors import DeviceMismatchError, first_line
from trainers.task import Batch, Task, map_tensors

_END = object()
_NAMED = 4  # how many tensors a sentence names
_DEPTH = 6  # how deep they are looked for
# torch's own words, from the checks of its dispatcher and of its CUDA, cuDNN and meta kernels.
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


class Pinnable:
    """A batch in a DataLoader that pins: its own pinning knows no dataclass, and in some versions makes lists of
    tuples.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def pin_memory(self) -> Pinnable:
        """The same batch in page-locked memory (torch's protocol)."""
        return Pinnable(map_tensors(lambda tensor: tensor.pin_memory() if _strided(tensor) else tensor, self.batch))


class Copies(Protocol):
    """Copies that run beside the computation."""

    def begin(self, batch: Batch) -> Batch:
        """The batch on the device, before its copy is done."""

    def hand_over(self, batch: Batch) -> Batch:
        """What `begin` gave, from now on safe to use (and to free) in the stream that computes."""


class _CudaCopies:
    """Copies on a stream of their own. Neither method waits for the device when the memory is page-locked."""

    def __init__(self, device: torch.device) -> None:
        # One for the whole process: torch keeps the memory of every stream apart.
        self._device, self._stream = device, _copy_stream(device)

    def begin(self, batch: Batch) -> Batch:
        with torch.cuda.stream(self._stream):
            return map_tensors(
                lambda tensor: tensor.to(self._device, non_blocking=True) if _strided(tensor) else tensor, batch
            )

    def hand_over(self, batch: Batch) -> Batch:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)

        def settle(tensor: Tensor) -> Tensor:
            if not _strided(tensor):  # sparse or jagged: record_stream does not know them
                return tensor.to(self._device)
            tensor.record_stream(computing)  # type: ignore[no-untyped-call, unused-ignore]
            return tensor

        return map_tensors(settle, batch)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def to_device(batches: Iterator[Batch], device: torch.device, ahead: bool) -> Iterator[Batch]:
    """The same batches on `device`, in order; on a CPU the very same iterator.

    `ahead`: the copy of the next batch begins before the one at hand is given out. Right where other processes load
    it; a batch that is made in this process may draw random numbers, which must not happen before a checkpoint of
    the step at hand.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda":
        return copied(batches, _CudaCopies(device), ahead)
    return (map_tensors(lambda tensor: tensor.to(device), batch) for batch in batches)


def copied(batches: Iterator[Batch], copies: Copies, ahead: bool) -> Iterator[Batch]:
    """The batches through `copies`."""

    def begin() -> Batch:
        batch = next(batches, _END)
        return _END if batch is _END else copies.begin(batch)

    coming = begin()
    while coming is not _END:
        ready = copies.hand_over(coming)  # waits for this batch's copy alone: the next one's is not in the stream yet
        if ahead:
            coming = begin()
        yield ready
        if not ahead:
            coming = begin()


def raise_if_mismatch(error: RuntimeError, task: Task, model: nn.Module, batch: Batch, device: torch.device) -> None:
    """DeviceMismatchError from torch's complaint about devices, naming what lies elsewhere; returns for other errors.

    Looks at the batch, at the model's parameters and buffers, and at tensors that modules or the task hold as plain
    attributes, which `model.to(device)` does not move.
    """
    if any(words in str(error) for words in _MISMATCH):
        bare = model.module if isinstance(model, (DistributedDataParallel, DataParallel)) else model
        places = {
            "batch": named_tensors(batch, "batch"),
            "state": _registered(bare),
            "attribute": _attributes(bare),
            "task": _held(task, type(task).__name__),
        }
        elsewhere = {
            place: [f"{name} on {tensor.device}" for name, tensor in found if _lies_elsewhere(tensor, device)]
            for place, found in places.items()
        }
        if any(elsewhere.values()) or "device" in str(error):
            _raise(error, elsewhere, device)


_FIXES = {
    "batch": "move what `transform()` makes to the batch's device, and keep a batch's tensors in tuples, lists, dicts "
    "and dataclasses",
    "state": "leave parameters and buffers where `model.to()` puts them",
    "attribute": "keep a module's tensors with `register_buffer()`, which moves them with the model",
    "task": "move a task's tensors to the batch's device where they are used",
}


def _raise(error: RuntimeError, elsewhere: dict[str, list[str]], device: torch.device) -> NoReturn:
    names = [name for found in elsewhere.values() for name in found]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        said = f"{', '.join(names[:_NAMED])}{more} cannot meet the rest on {device}"
        fix = "; ".join(_FIXES[place] for place, found in elsewhere.items() if found)
    else:
        said = f"forward() or loss() makes a tensor that is not on {device}, where batch and model are"
        fix = "give it the `device=` of one of its inputs"
    raise DeviceMismatchError(f"{said}; {fix} (torch: {first_line(error)})") from error


def _lies_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    number = tensor.device.type == "cpu" and tensor.ndim == 0  # torch takes these as plain numbers
    return tensor.device != device and not number


def _registered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"parameter `{name}`", tensor) for name, tensor in model.named_parameters())
    yield from ((f"buffer `{name}`", tensor) for name, tensor in model.named_buffers())


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in _held(module, path or type(module).__name__):
            yield f"attribute {name}", tensor


def _held(owner: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an object's attributes; what a module has registered is not among them."""
    for key, value in vars(owner).items():
        if key not in ("_parameters", "_buffers", "_modules"):
            yield from named_tensors(value, f"{name}.{key}", depth - 1)


def named_tensors(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested batch with its path (`batch['image'][0]`), also those in objects of other classes."""
    if isinstance(value, Tensor):
        yield f"`{name}`", value
    elif isinstance(value, nn.Module):
        for path, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"`{name}.{path}`", tensor
    elif depth == 0:  # objects may hold each other
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key!r}]", depth - 1)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]", depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _held(value, name, depth)
