"""Batches on the device: from tensors that are resident there, or copied to it.

Resident tensors are indexed on the device. Other batches are fetched here or
by a DataLoader. To a GPU they are copied on a separate CUDA stream, one batch
ahead if a DataLoader fetches them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
)

from trainers.config.sections import DataConfig
from trainers.data.batch import (
    Batch,
    Collate,
    Rows,
    fetch,
    map_tensors,
)
from trainers.data.stream import Rereadable, Stream
from trainers.devices.device import seed_device, seed_host, total_memory_bytes
from trainers.errors import ConfigError

# share of the device's memory for the data of all its workers; training needs
# the rest
_RESIDENT_SHARE = 0.1
_END = object()
_DEEPEST = 6
"""How deep attributes are followed: a subset, its dataset, its transforms, one
of them, its settings.
"""
_MOST = 10_000
_MOST_OF_ONE = 100
_SMALL_BYTES = 1 << 20
_PLAIN = (bool, int, float, str, bytes)
# One per device: torch does not share memory between streams.
_copy_stream = functools.cache(torch.cuda.Stream)


class _Asked:
    """The loader's sampler: the requested batches, which are set before each epoch."""

    def __init__(self) -> None:
        self.batches: Iterable[tuple[Rows, int | None]] = ()

    def __iter__(self) -> Iterator[tuple[Rows, int | None]]:
        return iter(self.batches)


class _WholeBatches(Dataset[Any]):
    """A dataset whose items are whole batches, for the DataLoader.

    An index is an array of rows and an optional seed; an item is a batch that
    can be pinned.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, asked: tuple[Rows, int | None]) -> Pinnable:
        rows, seed = asked
        if seed is not None:
            seed_host(seed)
        batch = fetch(self.dataset, rows, self.collate)
        if isinstance(self.dataset, Stream):
            return Pinnable(batch, self.dataset.send())
        return Pinnable(batch)


def _leave_signals_to_parent(number: int) -> None:
    """Ignore Ctrl-C and SIGHUP, which a terminal also sends to loader processes.

    The loop still needs these processes to reach its last checkpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


class Feed:
    """Yields batches of one split on the device, in the requested order."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        transform: Callable[[Batch, bool], Batch] | None,
        config: DataConfig,
        device: torch.device,
        *,
        sharers: int,
        seed: int,
    ) -> None:
        """Copy the data to the device, or make the loader.

        `transform` is called as `transform(batch, training)` for each batch,
        once it is on the device; None leaves batches unchanged.

        `sharers` is how many workers share the device's memory: on a CPU,
        those of one host.
        """
        self.dataset = dataset
        self.device = device
        self._collate = collate
        self._transform = transform
        self.beat: Callable[[], None] = lambda: None
        """Called for every batch, to show that the loop makes progress."""
        self.most: int | None = None
        """The most samples of an evaluation batch, if a larger one did not fit."""
        self.resident: tuple[Tensor, ...] | None = None
        if self._is_resident(config, sharers):
            self._make_resident()
        self._copied = held_by(dataset, collate)
        """What was copied to the device, or to the loader's processes."""
        self._stream = dataset if isinstance(dataset, Stream) else None
        self.most_loaders = (
            1 if isinstance(dataset, (Stream, Rereadable)) else None
        )
        """The most loader processes that can read the data; None without a limit."""
        self._source = _WholeBatches(dataset, collate)
        self._asked = _Asked()
        pins = config.pin_memory
        if pins == "auto":
            pins = device.type == "cuda"
        self._pins = pins and torch.accelerator.is_available()
        self._loader: DataLoader[Any] | None = None
        if self.resident is None and config.num_workers > 0:
            self._loader = self._make_loader(config, seed)

    def _make_loader(self, config: DataConfig, seed: int) -> DataLoader[Any]:
        return DataLoader(
            self._source,
            batch_size=None,
            sampler=self._asked,
            num_workers=self.most_loaders or config.num_workers,
            prefetch_factor=config.prefetch_factor,
            pin_memory=self._pins,
            persistent_workers=True,
            worker_init_fn=_leave_signals_to_parent,
            generator=torch.Generator().manual_seed(seed),
        )

    def _is_resident(self, config: DataConfig, sharers: int) -> bool:
        if (
            type(self.dataset) is not TensorDataset
            or self._collate is not default_collate
        ):
            if config.resident is True:
                raise ConfigError(
                    "data.resident",
                    config.resident,
                    "needs a TensorDataset, and a task without collate()",
                    "set `data.resident: false`",
                )
            return False
        if config.resident != "auto":
            return config.resident
        wanted = sharers * sum(
            tensor.nbytes for tensor in self.dataset.tensors
        )
        most = _RESIDENT_SHARE * total_memory_bytes(self.device)
        return config.num_workers == 0 and wanted <= most

    def _make_resident(self) -> None:
        dataset: Any = self.dataset
        self.resident = tuple(
            tensor.to(self.device) for tensor in dataset.tensors
        )

    def batches(
        self,
        microbatches: Iterable[Tensor],
        training: bool,
        seeds: Iterable[int] | None = None,
    ) -> Iterator[Batch]:
        """Yield a transformed batch on the device for each int64 index tensor.

        With `seeds`, one per batch, the random numbers that a loader process
        draws for a batch depend only on the batch's seed. In evaluation, this
        also holds for those that this process draws.
        """
        self._renew()
        none = itertools.repeat(None)
        if self.resident is not None:
            source = self._resident_batches(self.resident, microbatches)
        else:
            source = self._loaded_batches(microbatches, seeds or none)
        for seed in none if training else seeds or none:
            if seed is not None:
                seed_device(seed, self.device)
            batch = next(source, _END)
            if batch is _END:
                return
            self.beat()
            if self._transform is not None:
                with torch.no_grad():
                    batch = self._transform(batch, training)
            yield batch
        next(source, None)  # the loader ends its epoch

    def _resident_batches(
        self, data: Sequence[Tensor], microbatches: Iterable[Tensor]
    ) -> Iterator[Batch]:
        if not (batches := list(microbatches)):
            return
        rows = torch.cat(batches)
        # One copy for the whole epoch, which does not wait for steps of the
        # previous one.
        rows = (rows.pin_memory() if self._pins else rows).to(
            self.device, non_blocking=self._pins
        )
        for indices in rows.split([len(indices) for indices in batches]):
            yield tuple(tensor.index_select(0, indices) for tensor in data)

    def _loaded_batches(
        self, microbatches: Iterable[Tensor], seeds: Iterable[int | None]
    ) -> Iterator[Batch]:
        rows: Iterator[Rows] = (indices.numpy() for indices in microbatches)
        loaded: Iterable[Pinnable]
        if self._loader is not None:
            self._asked.batches = zip(rows, seeds, strict=False)
            loaded = self._loader
        else:
            loaded = (self._source[at, None] for at in rows)
            if self._pins:
                loaded = map(Pinnable.pin_memory, loaded)
        host = map(self._taken, loaded)
        yield from to_device(host, self.device, ahead=self._loader is not None)

    def _renew(self) -> None:
        """Copy the dataset again if the task has changed it since the last copy.

        Changes to what the collate function refers to count as well.
        """
        if isinstance(self.dataset, (Stream, Rereadable)):  # one process reads
            return
        if self.resident is None and self._loader is None:
            return
        if not are_same(self._copied, held_by(self.dataset, self._collate)):
            self._end_processes()
            if self.resident is not None:
                self.resident = None  # there may be no room for both
                self._make_resident()
            self._copied = held_by(self.dataset, self._collate)

    def _taken(self, loaded: Pinnable) -> Batch:
        """Return the batch; first hand the state that came with it to the stream."""
        if self._stream is not None:
            self._stream.receive(loaded.beside)
        return loaded.batch

    def close(self) -> None:
        """End the loader's processes."""
        self._end_processes()
        self._loader = None
        self.resident = None

    def _end_processes(self) -> None:
        """End the loader's processes; the next epoch starts new ones."""
        iterator = getattr(self._loader, "_iterator", None)
        if self._loader is not None and iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class Pinnable:
    """A batch that a DataLoader pins correctly.

    torch itself skips dataclasses, and some versions turn tuples into lists.
    """

    def __init__(self, batch: Batch, beside: Any = None) -> None:
        self.batch = batch
        self.beside = beside

    def pin_memory(self) -> Pinnable:
        """Return the same batch in page-locked memory (torch's protocol)."""

        def pin(tensor: Tensor) -> Tensor:
            return tensor.pin_memory() if _strided(tensor) else tensor

        return Pinnable(map_tensors(pin, self.batch), self.beside)


class Copies:
    """Copies batches on a separate CUDA stream.

    `begin` and `hand_over` do not wait for the device if the host memory is
    page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _copy_stream(device)

    def begin(self, batch: Batch) -> Batch:
        """Start copying a batch to the device; return the new batch without waiting."""

        def copy(tensor: Tensor) -> Tensor:
            if not _strided(tensor):
                return tensor
            return tensor.to(self._device, non_blocking=True)

        with torch.cuda.stream(self._stream):
            return map_tensors(copy, batch)

    def hand_over(self, batch: Batch) -> Batch:
        """Return what `begin` gave, safe to use and free in the current stream."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)

        def settle(tensor: Tensor) -> Tensor:
            # record_stream does not know sparse and jagged tensors.
            if not _strided(tensor):
                return tensor.to(self._device)
            tensor.record_stream(computing)  # type: ignore[no-untyped-call, unused-ignore]
            return tensor

        return map_tensors(settle, batch)


def _strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def to_device(
    batches: Iterator[Batch], device: torch.device, ahead: bool
) -> Iterator[Batch]:
    """Return an iterator over the same batches on `device`, in order.

    With `ahead`, the next batch's copy begins before the current batch is
    yielded. Use `ahead` only if other processes load the batches: making a
    batch in this process may draw random numbers, which must not happen before
    a checkpoint of the current step.
    """
    if device.type == "cpu":
        return batches
    if device.type == "cuda":
        return copied(batches, Copies(device), ahead)
    return (
        map_tensors(lambda tensor: tensor.to(device), batch)
        for batch in batches
    )


def copied(
    batches: Iterator[Batch], copies: Copies, ahead: bool
) -> Iterator[Batch]:
    """Yield the batches, copied to the device by `copies`."""
    begun = map(copies.begin, batches)
    if not ahead:
        yield from map(copies.hand_over, begun)
        return
    coming = next(begun, _END)
    while coming is not _END:
        # Waits only for this batch's copy: the next one's is not in the stream
        # yet.
        ready = copies.hand_over(coming)
        coming = next(begun, _END)
        yield ready


def held_by(*things: Any) -> list[Any]:
    """Return the given things and, recursively, their attributes and items.

    For tensors, it also returns how often they were written to. It does not
    look inside models, classes, modules or large arrays.
    """
    every = itertools.chain.from_iterable(
        _held(thing, _DEEPEST) for thing in things
    )
    return list(itertools.islice(every, _MOST))


def are_same(before: list[Any], now: list[Any]) -> bool:
    """Whether two results of `held_by` show no change."""
    if len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return all(a is b or (isinstance(a, _PLAIN) and a == b) for a, b in pairs)


def _held(thing: Any, deeper: int) -> Iterator[Any]:
    yield thing
    if isinstance(thing, Tensor) and not thing.is_inference():
        yield thing._version
    if isinstance(thing, np.ndarray) and thing.nbytes <= _SMALL_BYTES:
        yield hash(thing.tobytes())
    if not deeper or isinstance(
        thing, (*_PLAIN, Tensor, nn.Module, type, ModuleType)
    ):
        return
    owner = thing.__self__ if inspect.ismethod(thing) else thing
    items: Any = getattr(owner, "__dict__", ())
    if isinstance(thing, (list, tuple, dict)):
        items = thing
        with contextlib.suppress(Exception):  # an item may not be hashable
            yield hash(
                (*thing.items(),) if isinstance(thing, dict) else (*thing,)
            )
    if isinstance(items, Mapping):
        items = items.values()
    for part in itertools.islice(items, _MOST_OF_ONE):
        yield from _held(part, deeper - 1)
