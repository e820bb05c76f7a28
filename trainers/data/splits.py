"""Check both splits: the same on every rank, and no sample in both.

Only what costs little is looked at: the rows of a Subset, the bytes of a small
TensorDataset, the first samples of others.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trainers.data.batch import Rows, fetch
from trainers.data.stream import Rereadable, Stream
from trainers.data.stream_reader import digest
from trainers.devices.group import Group
from trainers.devices.rng import drawn_alike
from trainers.errors import MISSING, ConfigError

_SMALL_BYTES = 2**25
_FEW = 4
"""Samples that are read of any other dataset."""
_SHARE = 0.1
"""Of validation rows in training: below it they may be equal by chance."""
_FRAMES = ("pandas", "polars", "pyarrow", "cudf")
_FIX = "draw from a generator with a seed of its own, which follows from `split` where samples themselves are drawn"


def check_dataset(field: str, dataset: Any) -> None:
    """Raise ConfigError for what is returned in place of a map-style dataset."""
    tensors = "return TensorDataset(inputs, labels), from torch.utils.data"
    if dataset is None:
        return
    if isinstance(dataset, type):
        rule = "must be an instance, not a class"
        fix = "return an instance of it"
    elif isinstance(dataset, DataLoader):
        rule = "must give samples: the run makes the batches"
        fix = "return its `.dataset`, without the loader"
    elif isinstance(dataset, tuple) and all(map(_is_table, dataset)):
        rule = "must be one dataset"
        fix = tensors
    elif _is_frame(dataset):
        rule = "must be indexed by sample, not by column"
        fix = tensors
    elif not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        rule = "must have `__getitem__`, which gives a sample"
        fix = "return a map-style dataset, or what is read forward from stream()"
    else:
        return
    raise ConfigError(field, type(dataset).__name__, rule, fix)


def _is_frame(value: Any) -> bool:
    """Whether a value is a table of a library whose rows have no index of their own."""
    libraries = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return hasattr(value, "columns") and not libraries.isdisjoint(_FRAMES)


def _is_table(value: Any) -> bool:
    """Whether a value holds rows itself, and is no sample."""
    is_rows = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
    return is_rows or isinstance(value, Dataset)


def same_rows_on_ranks(split: str, dataset: Dataset[Any], group: Group) -> None:
    """Raise ConfigError where a split has other rows on another rank.

    Every rank must call it.
    """
    if len(set(group.gather(_name(dataset)))) > 1:
        raise ConfigError(
            f'dataset("{split}")', MISSING, "has other rows on each rank", _FIX
        )


def _name(dataset: Any) -> str:
    """What tells the rows of a dataset from others, as far as that is cheap."""
    if not isinstance(dataset, Subset):
        return digest([len(dataset), _tensors(dataset)])
    table, rows = _rows_of_table(dataset)
    return digest([len(table), rows])


def _rows_of_table(dataset: Any) -> tuple[Any, Rows]:
    """What a Subset, or one of those, is a part of, and which rows."""
    rows: Rows = np.arange(len(dataset))
    while isinstance(dataset, Subset):
        rows = np.asarray(dataset.indices, np.int64)[rows]
        dataset = dataset.dataset
    return dataset, rows


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a small TensorDataset; None of anything else."""
    if (
        type(dataset) is not TensorDataset
        or sum(tensor.nbytes for tensor in dataset.tensors) > _SMALL_BYTES
    ):
        return None
    return dataset.tensors


def check_apart(train: Any, val: Any) -> ConfigError | str | None:
    """Return a warning or an error where validation samples are training samples.

    It is an error where each split is a part of one table that was drawn by itself.
    """
    if isinstance(train, Stream) or isinstance(val, Rereadable | None):
        return None
    common = 0
    are_parts = isinstance(train, Subset) or isinstance(val, Subset)
    if are_parts:
        (table, trained), (other, held_back) = map(_rows_of_table, (train, val))
        if _alike(table, other):
            common = len(np.intersect1d(trained, held_back))
        if 0 < common < min(len(train), len(val)):
            rule = f"has {common} of its {len(val)} samples in common with the training split"
            return ConfigError('dataset("val")', MISSING, rule, _FIX)
    else:
        common = _common(train, val)
    if not common:
        return None
    return f'at least {common} samples of dataset("val") are training samples, too: val figures say nothing of others'


def _alike(one: Any, other: Any) -> bool:
    """Whether two datasets have the same samples, by the first ones."""
    if one is other:
        return True
    return (
        type(one) is type(other)
        and len(one) == len(other)
        and _first(one) == _first(other)
    )


def _first(dataset: Any) -> list[str]:
    with drawn_alike():
        return [
            digest(fetch(dataset, [row], list))
            for row in range(min(_FEW, len(dataset)))
        ]


def _common(train: Any, val: Any) -> int:
    """How many samples of `val` are in `train`, where that is more than chance."""
    known = _tensors(train)
    asked = _tensors(val)
    if known is None or asked is None:
        first = _first(val)
        if len(set(first)) > 1 and first == _first(train)[: len(first)]:
            return len(first)
        return 0
    rows = _rows(asked)
    if len(set(rows)) < len(rows) * (
        1 - _SHARE
    ):  # rows of a few values: equal ones say nothing
        return 0
    common = len(set(rows) & set(_rows(known)))
    if common > _SHARE * len(rows):
        return common
    return 0


def _rows(tensors: tuple[Tensor, ...]) -> list[bytes]:
    columns = [
        tensor.detach().cpu().reshape(len(tensor), -1).contiguous().view(torch.uint8)
        for tensor in tensors
    ]
    return [
        row.tobytes()
        for row in np.concatenate([column.numpy() for column in columns], axis=1)
    ]
