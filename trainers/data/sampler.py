"""Which samples belong to which step, and whether the splits are suitable.

Steps do not depend on the number of workers: they follow from seed, epoch and
batch sizes. Each epoch has one order, by default a seeded permutation; each
step takes the next samples in it, as many as trainers/data/batch_schedule.py
says. Ranks and microbatches only divide these samples. So a run can be resumed
mid-epoch on another number of workers with the same samples.

The splits are checked by what is cheap to read: the rows of a Subset, the
bytes of a small TensorDataset, the first samples of any other dataset.
"""

import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from trainers.data.batch import Rows, as_bytes, fetch
from trainers.data.batch_schedule import BatchSchedule, Sizes
from trainers.data.stream import Rereadable, Stream, digest
from trainers.devices.device import (
    drawn_alike,
    get_rng_state,
    seed_all,
    set_rng_state,
)
from trainers.errors import MISSING, ConfigError

_SMALL_BYTES = 2**25
_FEW = 4
"""Samples to read of a dataset that is not a small TensorDataset."""
_SHARE = 0.1
"""Up to this share of validation rows may equal training rows by chance.
"""
_FRAMES = ("pandas", "polars", "pyarrow", "cudf")
_FIX = "draw the split from a generator with its own seed; if samples themselves are random, derive their seed from `split`"


class Drawn:
    """The samples that a sampler draws, epoch by epoch.

    The global generators of Python, numpy and torch, and a torch generator in
    the sampler's attribute `generator`, are first seeded with the run's seed
    plus the epoch. So the samples are the same on every rank and after a
    resume. The sampler's `set_epoch` is called if it has one. The caller's
    random state is preserved.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        num_samples: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed
        self._device = device
        self.name = type(sampler).__name__
        order = self(0)
        self.length = len(order)
        if not torch.equal(order, self(0)):
            raise self._refused(
                "gives a different order when asked again for the same epoch",
                "draw from torch's global generator, or from one that `set_epoch` seeds",
            )

    def __call__(self, epoch: int) -> Tensor:
        """Return the samples of an epoch in order: int64 [n].

        Raises ConfigError for values that are not indices of the dataset.
        """
        kept = get_rng_state(self._device)
        sampler: Any = self._sampler
        try:
            seed_all(self._seed + epoch)
            if isinstance(
                getattr(sampler, "generator", None), torch.Generator
            ):
                sampler.generator.manual_seed(self._seed + epoch)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            numbers = np.fromiter(map(operator.index, sampler), np.int64)
        except (TypeError, OverflowError) as error:
            raise self._refused(
                f"must give whole numbers, one per sample: {error}",
                "give indices, not batches of them",
            ) from error
        finally:
            set_rng_state(kept, self._device)
        if not len(numbers):
            raise self._refused("gives no sample", "give at least one")
        if numbers.min() < 0 or numbers.max() >= self._num_samples:
            raise self._refused(
                f"gives indices {numbers.min()} to {numbers.max()} for a dataset of {self._num_samples} samples",
                f"give indices from 0 to {self._num_samples - 1}",
            )
        if epoch and len(numbers) != self.length:
            raise self._refused(
                f"gives {len(numbers)} samples in epoch {epoch} and {self.length} in epoch 0",
                "give the same number in every epoch",
            )
        return torch.from_numpy(numbers)

    def _refused(self, rule: str, fix: str) -> ConfigError:
        return ConfigError("sampler", self.name, rule, fix)


class StepSampler(DistributedSampler[int]):
    """A torch DistributedSampler that also deals samples out by step.

    Iterating over it gives what torch's class gives (padded, interleaved);
    `share` gives steps without padding. Call `set_epoch` before each epoch.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        global_batch_size: int | Sizes,
        drawn: Drawn | None = None,
    ) -> None:
        """Take torch's own arguments, and two more.

        Args:
            dataset: The samples; it must have a length.
            num_replicas: Ranks that share the samples; None: those of the
                process group.
            rank: This rank; None: that in the process group.
            shuffle: Whether each epoch has a different order.
            seed: Seed of the orders, equal on all ranks.
            drop_last: Whether to leave out a last step that is not full.
            global_batch_size: One size, or a sequence of sizes.
            drawn: Orders that replace torch's; they may give a sample twice,
                or never.
        """
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.drawn = drawn
        self.length = len(dataset) if drawn is None else drawn.length  # type: ignore[arg-type]
        self.of_stream = False
        """Whether samples come from a stream; the whole run then counts as one epoch."""
        self.batches = BatchSchedule(global_batch_size, self.length, drop_last)
        self._permutation: tuple[int, Tensor] | None = None

    @property
    def known_length(self) -> int:
        """Samples of one epoch; 0 for a stream, whose length is unknown."""
        if self.of_stream:
            return 0
        return self.length

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of this epoch; the last may be short unless `drop_last`."""
        return self.batches.steps_in(self.epoch)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return this epoch's samples from `start` to `stop`: int64 [stop - start].

        The samples are the same on every rank. Do not modify the tensor.
        """
        if self.drawn is None and not self.shuffle:
            return torch.arange(start, min(stop, self.length))
        if self._permutation is None or self._permutation[0] != self.epoch:
            if self.drawn is not None:
                order = self.drawn(self.epoch)
            else:
                # Seeded as in torch's class.
                generator = torch.Generator().manual_seed(
                    self.seed + self.epoch
                )
                order = torch.randperm(self.length, generator=generator)
            self._permutation = (self.epoch, order)
        return self._permutation[1][start:stop]

    def name(self, anew: bool = False) -> str:
        """Return the name of this epoch's order, which a checkpoint stores.

        A resumed run must continue in the same order. With `anew`, the order
        is drawn again: a sampler may depend on the task's state.
        """
        if anew:
            self._permutation = None
        if self.of_stream:
            return "stream"
        if self.drawn is not None:
            order = self.rows(0, self.length).numpy().tobytes()
            told = hashlib.blake2b(order, digest_size=8).hexdigest()
            return f"{self.drawn.name} {told}"
        if self.shuffle:
            return "shuffled"
        return "in order"

    def step_size(self, step: int) -> int:
        """Number of samples, over all ranks, in a step of this epoch."""
        start, stop = self.batches.bounds(self.epoch, step)
        return stop - start

    def share(self, step: int) -> Tensor:
        """Return this rank's samples of a step: int64 [n].

        n differs by at most one between ranks, and may be 0.
        """
        start, stop = self.batches.bounds(self.epoch, step)
        size = stop - start
        first = size * self.rank // self.num_replicas
        last = size * (self.rank + 1) // self.num_replicas
        return self.rows(start + first, start + last)

    def anchor(self, step: int) -> Tensor:
        """Return the first sample of the step: int64 [1].

        A rank without samples computes this sample with weight zero, to take
        part in collectives.
        """
        start, _ = self.batches.bounds(self.epoch, step)
        return self.rows(start, start + 1)

    def plan(
        self, step: int, microbatch_size: int, even: bool = False
    ) -> tuple[list[Tensor], list[int]]:
        """Return this rank's microbatches of a step, and the sample count of each.

        An empty microbatch is replaced by one sample that counts as 0. With
        `even`, every rank has equally many microbatches, for a model whose
        forward is a collective.
        """
        share = self.share(step)
        largest = (
            -(-self.step_size(step) // self.num_replicas)
            if even
            else len(share)
        )
        chunks = split_share(share, microbatch_size, largest)
        sizes = [len(chunk) for chunk in chunks]
        # Not a row before the rank's share: a stream cannot go back.
        idle = share[-1:] if len(share) else self.anchor(step)
        return [chunk if len(chunk) else idle for chunk in chunks], sizes


def split_share(
    share: Tensor, microbatch_size: int, largest: int | None = None
) -> list[Tensor]:
    """Split a share into as few microbatches as possible, of nearly equal sizes.

    Sizes differ by at most one, so none is tiny. With `largest`, there are as
    many microbatches as a share of `largest` samples needs; some may then be
    empty.
    """
    most = len(share) if largest is None else largest
    count = max(1, -(-most // microbatch_size))
    if count == 1:
        return [share]
    return list(torch.tensor_split(share, count))


def check_dataset(field: str, dataset: Any) -> None:
    """Raise ConfigError for common values that are not a map-style dataset."""
    tensors = "return TensorDataset(inputs, labels), from torch.utils.data"
    if dataset is None:
        return
    if isinstance(dataset, type):
        rule = "must be an instance, not a class"
        fix = "return an instance of it"
    elif isinstance(dataset, IterableDataset):
        # If it has a length (as MosaicML's and LitData's have), that may be
        # the length of this rank's share.
        rule = "must be a map-style dataset"
        fix = "return it from stream()"
    elif isinstance(dataset, DataLoader):
        rule = "must give samples, not batches"
        fix = "return its `.dataset`, without the loader"
    elif isinstance(dataset, tuple) and all(map(_is_table, dataset)):
        rule = "must be one dataset"
        fix = tensors
    elif _is_frame(dataset):
        rule = "must be indexed by sample, not by column"
        fix = tensors
    elif not (
        hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    ):
        rule = "must have `__getitem__`, which gives a sample"
        fix = "return a map-style dataset, or return it from stream() if it is only read forward"
    else:
        return
    raise ConfigError(field, type(dataset).__name__, rule, fix)


def _is_frame(value: Any) -> bool:
    """Whether a value is a data frame, which is not indexed by row."""
    libraries = {
        base.__module__.partition(".")[0] for base in type(value).__mro__
    }
    return hasattr(value, "columns") and not libraries.isdisjoint(_FRAMES)


def _is_table(value: Any) -> bool:
    """Whether a value is a container of rows rather than a sample."""
    is_rows = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
    return is_rows or isinstance(value, Dataset)


def name_rows(dataset: Any) -> str:
    """Return a digest of a dataset's rows, from the parts that are cheap to read."""
    if not isinstance(dataset, Subset):
        return digest([len(dataset), _tensors(dataset)])
    table, rows = _rows_of_table(dataset)
    return digest([len(table), rows])


def _rows_of_table(dataset: Any) -> tuple[Any, Rows]:
    """Return the dataset that nested Subsets are taken from, and the selected rows."""
    rows: Rows = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        rows = np.asarray(dataset.indices, np.int64)[rows]
        dataset = dataset.dataset
    return dataset, rows


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors of a small TensorDataset, or None for any other dataset."""
    if type(dataset) is not TensorDataset:
        return None
    if sum(tensor.nbytes for tensor in dataset.tensors) > _SMALL_BYTES:
        return None
    return dataset.tensors


def check_apart(train: Any, val: Any) -> ConfigError | str | None:
    """Return a warning or an error if validation samples are also training samples.

    It is an error if Subsets of one dataset overlap in part, else a warning.
    """
    if isinstance(train, Stream) or isinstance(val, Rereadable | None):
        return None
    common = 0
    if isinstance(train, Subset) or isinstance(val, Subset):
        table, trained = _rows_of_table(train)
        other, held_back = _rows_of_table(val)
        if _alike(table, other):
            common = len(np.intersect1d(trained, held_back))
        if 0 < common < min(len(train), len(val)):
            return ConfigError(
                'dataset("val")',
                MISSING,
                f"has {common} of its {len(val)} samples in common with the training split",
                _FIX,
            )
    else:
        common = _common(train, val)
    if not common:
        return None
    return f'at least {common} samples of dataset("val") are training samples too: val figures say nothing about unseen samples'


def _alike(dataset: Any, other: Any) -> bool:
    """Whether two datasets have the same samples, judged by the first ones."""
    if dataset is other or type(dataset) is not type(other):
        return dataset is other
    return len(dataset) == len(other) and _first(dataset) == _first(other)


def _first(dataset: Any) -> list[str]:
    rows = range(min(_FEW, len(dataset)))
    with drawn_alike():
        return [digest(fetch(dataset, [row], list)) for row in rows]


def _common(train: Any, val: Any) -> int:
    """Return how many samples of `val` are in `train`; 0 if few enough to be chance."""
    known = _tensors(train)
    asked = _tensors(val)
    if known is None or asked is None:
        first = _first(val)
        if len(set(first)) > 1 and first == _first(train)[: len(first)]:
            return len(first)
        return 0
    count = len(asked[0])
    rows = _rows(asked)
    common = len(rows & _rows(known))
    # Rows of few different values are often equal by chance.
    are_few = len(rows) < count * (1 - _SHARE)
    if are_few or common <= _SHARE * count:
        return 0
    return common


def _rows(tensors: tuple[Tensor, ...]) -> set[bytes]:
    columns = []
    for tensor in tensors:
        values = as_bytes(tensor.cpu())
        columns.append(values.reshape(len(tensor), -1).numpy())
    return {row.tobytes() for row in np.concatenate(columns, axis=1)}
