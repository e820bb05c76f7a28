"""Batches on the device: resident tensors that are indexed there, or a torch DataLoader that fetches whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainers.config import DataConfig
from trainers.device import total_memory_bytes
from trainers.errors import ConfigError
from trainers.task import Batch, Task, is_tensor_dataset, map_tensors, tensors_of

_RESIDENT_SHARE = 0.1  # of the device's memory, over all workers of the device: leaves the rest to training
_FETCH = 4096  # samples fetched at once while a dataset is made resident


def fetch(dataset: Dataset[Any], indices: Sequence[int], collate: Callable[[list[Any]], Batch]) -> Batch:
    """One batch of a map-style dataset, a whole batch at a time where the dataset can."""
    if is_tensor_dataset(dataset):
        rows = torch.as_tensor(indices)
        return tuple(tensor[rows] for tensor in dataset.tensors)  # type: ignore[attr-defined]
    if hasattr(dataset, "__getitems__"):
        return _collated(dataset.__getitems__(list(indices)), collate)
    return collate([dataset[index] for index in indices])


def _collated(fetched: Any, collate: Callable[[list[Any]], Batch]) -> Batch:
    """`__getitems__` gives a list of samples (torch's protocol) or, faster, a batch that is ready."""
    return collate(fetched) if isinstance(fetched, list) else fetched


class _WholeBatches(Dataset[Any]):
    """Seen by the DataLoader in place of a dataset: a list of indices gives one batch."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Batch]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        return fetch(self.dataset, indices, self.collate)


class _Plan:
    """The index lists of the coming microbatches; a DataLoader with persistent workers reads it anew each epoch."""

    def __init__(self) -> None:
        self.microbatches: Sequence[Tensor] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)


class Feed:
    """Batches of one split on the device, in the order of the index tensors that it is asked for."""

    def __init__(
        self, dataset: Dataset[Any], task: Task, config: DataConfig, device: torch.device, *, sharers: int, seed: int
    ) -> None:
        """`sharers` is how many workers share the device's memory (those of one host, on a CPU)."""
        self.dataset, self.task, self.device = dataset, task, device
        self.resident = self._make_resident(config, sharers)
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        if self.resident is None:
            pin = config.pin_memory if isinstance(config.pin_memory, bool) else device.type == "cuda"
            self._loader = DataLoader(
                _WholeBatches(dataset, task.collate),
                batch_sampler=self._plan,
                collate_fn=_identity,
                num_workers=config.num_workers,
                prefetch_factor=config.prefetch_factor,
                pin_memory=pin,
                persistent_workers=config.num_workers > 0,
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
        source = self._resident_batches(microbatches) if self._loader is None else self._loaded_batches(microbatches)
        for batch in source:
            with torch.no_grad():
                transformed = self.task.transform(batch, training)
            yield transformed

    def _resident_batches(self, microbatches: Sequence[Tensor]) -> Iterator[Batch]:
        if not microbatches:
            return
        sizes = [len(indices) for indices in microbatches]
        rows = torch.cat(list(microbatches)).to(self.device)  # one copy for the whole epoch
        for indices in rows.split(sizes):
            yield map_tensors(lambda tensor, at=indices: tensor.index_select(0, at), self.resident)  # type: ignore[misc]

    def _loaded_batches(self, microbatches: Sequence[Tensor]) -> Iterator[Batch]:
        assert self._loader is not None
        self._plan.microbatches = microbatches
        for batch in self._loader:
            yield map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)

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


def _identity(batch: Batch) -> Batch:
    return batch


def concatenate(parts: list[Batch]) -> Batch:
    """Batches of one nesting joined along the first dimension of every tensor."""
    joined = iter([torch.cat(tensors) for tensors in zip(*(tensors_of(part) for part in parts), strict=True)])
    return map_tensors(lambda _: next(joined), parts[0])
