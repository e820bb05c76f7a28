"""Batches on the device: resident tensors that are indexed there, or whole batches fetched here or by a DataLoader."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainers.config.sections import DataConfig
from trainers.data.batch import Batch, Collate, Rows, concatenate, fetch, leaves_of, map_tensors
from trainers.data.transfer import Pinnable, to_device
from trainers.devices.device import seed_all, total_memory_bytes
from trainers.errors import ConfigError

_RESIDENT_SHARE = 0.1  # of the device's memory, over all workers of the device: leaves the rest to training
_FETCH = 4096  # samples fetched at once while a dataset is made resident


class _WholeBatches(Dataset[Any]):
    """What the DataLoader reads in place of a dataset: an index is an array of rows (and a seed for what is drawn), an
    item a batch to be pinned.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, asked: tuple[Rows, int | None]) -> Pinnable:
        rows, seed = asked
        if seed is not None:
            seed_all(seed)
        return Pinnable(fetch(self.dataset, rows, self.collate))


class Feed:
    """Batches of one split on the device, in the order of the index tensors that it is asked for."""

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
        """`transform` gets each batch on the device, and whether it is for training; None leaves batches as they are.

        `sharers` is how many workers share the device's memory (those of one host, on a CPU).
        """
        self.dataset, self.device, self._collate, self._transform = dataset, device, collate, transform
        self.beat: Callable[[], None] = lambda: None
        """Called for every batch: the loop's sign of life."""
        self.resident = self._make_resident(config, sharers)
        # Of the coming batches: a DataLoader with persistent workers reads it each epoch.
        self._rows: list[tuple[Rows, int | None]] = []
        self._loader: DataLoader[Any] | None = None
        self._pins = config.pin_memory if isinstance(config.pin_memory, bool) else device.type == "cuda"
        if self._pins and self.resident is None and not torch.accelerator.is_available():
            warnings.warn("`data.pin_memory` is true, but there is no accelerator: memory is not pinned", stacklevel=2)
            self._pins = False
        if self.resident is None and config.num_workers > 0:
            self._loader = DataLoader(
                _WholeBatches(dataset, collate),
                batch_size=None,
                sampler=self._rows,
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
        data: Batch = self.dataset.tensors if type(self.dataset) is TensorDataset else None
        if config.resident == "auto":
            wanted = sharers * sum(tensor.numel() * tensor.element_size() for tensor in data or ())
            if data is None or wanted > _RESIDENT_SHARE * total_memory_bytes(self.device):
                return None
        if data is None:
            rows = torch.arange(length).split(_FETCH)
            data = concatenate([fetch(self.dataset, some.numpy(), self._collate) for some in rows])
        if not all(isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == length for leaf in leaves_of(data)):
            rule = f"needs data that is nothing but tensors of {length} samples each"
            raise ConfigError("data.resident", config.resident, rule, "set `data.resident: false`")
        return map_tensors(lambda tensor: tensor.to(self.device), data)

    def batches(
        self, microbatches: Sequence[Tensor], training: bool, seeds: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """Yield one transformed batch on the device for each int64 index tensor, in order.

        With `seeds`, one a batch, what is drawn for a batch, here or in a loader's process, follows from its own alone.
        """
        resident = self.resident is not None
        source = self._resident_batches(microbatches) if resident else self._loaded_batches(microbatches, seeds)
        each: Sequence[int | None] = seeds or [None] * len(microbatches)
        for seed in each:
            if seed is not None:
                seed_all(seed)
            batch = next(source)
            self.beat()
            if self._transform is not None:
                with torch.no_grad():
                    batch = self._transform(batch, training)
            yield batch
        next(source, None)  # the loader ends its epoch

    def _resident_batches(self, microbatches: Sequence[Tensor]) -> Iterator[Batch]:
        if not microbatches:
            return
        rows = torch.cat(list(microbatches)).to(self.device)  # one copy for the whole epoch
        for indices in rows.split([len(indices) for indices in microbatches]):
            yield map_tensors(lambda tensor, at=indices: tensor.index_select(0, at), self.resident)  # type: ignore[misc]

    def _loaded_batches(self, microbatches: Sequence[Tensor], seeds: Sequence[int] | None) -> Iterator[Batch]:
        if self._loader is None:
            host: Iterator[Batch] = (fetch(self.dataset, at.numpy(), self._collate) for at in microbatches)
            if self._pins:
                host = (Pinnable(batch).pin_memory().batch for batch in host)
        else:
            each: Sequence[int | None] = seeds or [None] * len(microbatches)
            self._rows[:] = [(indices.numpy(), seed) for indices, seed in zip(microbatches, each, strict=True)]
            host = (loaded.batch for loaded in self._loader)
        yield from to_device(host, self.device, ahead=self._loader is not None)

    def close(self) -> None:
        """End the loader's processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._loader, self.resident = None, None
