"""Batches on the device: resident tensors that are indexed there, or whole batches fetched here or by a DataLoader.

A dataset gives a whole batch at once by `gather(rows)` (an int64 array to a batch that is ready, as ArrowDataset has
it), by torch's `__getitems__(indices)`, or by being a TensorDataset; any other is asked for a sample at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainers.config.sections import DataConfig
from trainers.data.transfer import Pinnable, to_device
from trainers.devices.device import total_memory_bytes
from trainers.errors import ConfigError
from trainers.task import Batch, Task, is_tensor_dataset, map_tensors, tensors_of

_RESIDENT_SHARE = 0.1  # of the device's memory, over all workers of the device: leaves the rest to training
_FETCH = 4096  # samples fetched at once while a dataset is made resident


Rows = np.ndarray[Any, np.dtype[np.int64]]


def fetch(dataset: Dataset[Any], indices: Sequence[int] | Rows, collate: Callable[[list[Any]], Batch]) -> Batch:
    """One batch of a map-style dataset, a whole batch at a time where the dataset can."""
    rows = np.asarray(indices, dtype=np.int64)
    if is_tensor_dataset(dataset):
        chosen = torch.from_numpy(rows)
        # A copy a row: indexing with [] copies number by number, ten times slower.
        return tuple(tensor.index_select(0, chosen) for tensor in dataset.tensors)  # type: ignore[attr-defined]
    if hasattr(dataset, "gather"):
        return dataset.gather(rows)
    numbers: list[int] = rows.tolist()
    if hasattr(dataset, "__getitems__"):
        return _collated(dataset.__getitems__(numbers), collate)
    return collate([dataset[number] for number in numbers])


def _collated(fetched: Any, collate: Callable[[list[Any]], Batch]) -> Batch:
    """`__getitems__` gives a list of samples (torch's protocol) or, faster, a batch that is ready."""
    return collate(fetched) if isinstance(fetched, list) else fetched


class _WholeBatches(Dataset[Any]):
    """Seen by the DataLoader in place of a dataset: an array of indices gives one batch."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Batch]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__(np.array([index]))

    def __getitems__(self, indices: Rows) -> Batch:
        return fetch(self.dataset, indices, self.collate)


class _Plan:
    """The indices of the coming microbatches; a DataLoader with persistent workers reads it anew each epoch."""

    def __init__(self) -> None:
        self.microbatches: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[Rows]:
        return (indices.numpy() for indices in self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)


class Feed:
    """Batches of one split on the device, in the order of the index tensors that it is asked for."""

    def __init__(
        self, dataset: Dataset[Any], task: Task, config: DataConfig, device: torch.device, *, sharers: int, seed: int
    ) -> None:
        """`sharers` is how many workers share the device's memory (those of one host, on a CPU)."""
        self.dataset, self.task, self.device = dataset, task, device
        self.beat: Callable[[], None] = _nothing
        """Called for every batch: the loop's sign of life."""
        self.resident = self._make_resident(config, sharers)
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self._pins = config.pin_memory if isinstance(config.pin_memory, bool) else device.type == "cuda"
        if self._pins and self.resident is None and not torch.accelerator.is_available():
            warnings.warn("`data.pin_memory` is true, but there is no accelerator: memory is not pinned", stacklevel=2)
            self._pins = False
        if self.resident is None and config.num_workers > 0:
            self._loader = DataLoader(
                _WholeBatches(dataset, task.collate),
                batch_sampler=self._plan,  # type: ignore[arg-type]
                collate_fn=Pinnable if self._pins else _identity,
                num_workers=config.num_workers,
                prefetch_factor=config.prefetch_factor,
                pin_memory=self._pins,
                persistent_workers=True,
                generator=torch.Generator().manual_seed(seed),
            )

    def _make_resident(self, config: DataConfig, sharers: int) -> Batch | None:
        length = len(self.dataset)  # type: ignore[arg-type]
        if config.resident is False or length == 0 or (config.resident == "auto" and config.num_workers > 0):
            return None
        if config.resident == "auto":
            if not is_tensor_dataset(self.dataset):
                return None
            tensors = self.dataset.tensors  # type: ignore[attr-defined]
            wanted = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * sharers
            if wanted > _RESIDENT_SHARE * total_memory_bytes(self.device):
                return None
        if is_tensor_dataset(self.dataset):
            data: Batch = tuple(self.dataset.tensors)  # type: ignore[attr-defined]
        else:
            parts = [
                fetch(self.dataset, range(start, min(start + _FETCH, length)), self.task.collate)
                for start in range(0, length, _FETCH)
            ]
            data = parts[0] if len(parts) == 1 else concatenate(parts)
        if not _indexable(data, length):
            raise ConfigError(
                "data.resident",
                config.resident,
                f"needs data that is nothing but tensors of {length} samples each",
                "set `data.resident: false`",
            )
        return map_tensors(lambda tensor: tensor.to(self.device), data)

    def batches(self, microbatches: Sequence[Tensor], training: bool) -> Iterator[Batch]:
        """One transformed batch on the device for each int64 index tensor, in order."""
        resident = self.resident is not None
        source = self._resident_batches(microbatches) if resident else self._loaded_batches(microbatches)
        transforms = type(self.task).transform is not Task.transform
        for batch in source:
            self.beat()
            if transforms:
                with torch.no_grad():
                    batch = self.task.transform(batch, training)
            yield batch

    def _resident_batches(self, microbatches: Sequence[Tensor]) -> Iterator[Batch]:
        if not microbatches:
            return
        sizes = [len(indices) for indices in microbatches]
        rows = torch.cat(list(microbatches)).to(self.device)  # one copy for the whole epoch
        for indices in rows.split(sizes):
            yield map_tensors(lambda tensor, at=indices: tensor.index_select(0, at), self.resident)  # type: ignore[misc]

    def _loaded_batches(self, microbatches: Sequence[Tensor]) -> Iterator[Batch]:
        if self._loader is None:
            host = self._fetched_here(microbatches)
        else:
            self._plan.microbatches = microbatches
            loaded = iter(self._loader)
            host = (carried.batch for carried in loaded) if self._pins else loaded
        yield from to_device(host, self.device, ahead=self._loader is not None)

    def _fetched_here(self, microbatches: Sequence[Tensor]) -> Iterator[Batch]:
        for indices in microbatches:
            batch = fetch(self.dataset, indices.numpy(), self.task.collate)
            yield Pinnable(batch).pin_memory().batch if self._pins else batch

    def close(self) -> None:
        """End the loader's processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._loader, self.resident = None, None


def _indexable(data: Batch, length: int) -> bool:
    """Whether every leaf of a nested batch is a tensor with one row a sample."""
    if isinstance(data, Tensor):
        return data.ndim > 0 and len(data) == length
    if isinstance(data, dict):
        return all(_indexable(value, length) for value in data.values())
    if isinstance(data, (tuple, list)):
        return all(_indexable(value, length) for value in data)
    fields = getattr(data, "__dataclass_fields__", None)
    return fields is not None and all(_indexable(getattr(data, name), length) for name in fields)


def _nothing() -> None:
    """Nobody listens."""


def _identity(batch: Batch) -> Batch:
    return batch


def concatenate(parts: list[Batch]) -> Batch:
    """Batches of one nesting joined along the first dimension of every tensor."""
    joined = iter([torch.cat(tensors) for tensors in zip(*(tensors_of(part) for part in parts), strict=True)])
    return map_tensors(lambda _: next(joined), parts[0])
