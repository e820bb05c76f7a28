"""Batches: nested tensors, how to go through them, and how to read them from a dataset.

A dataset that has torch's `__getitems__(indices)`, or is a TensorDataset whose
task has no collate(), is asked for a whole batch in one call; any other, for
one sample at a time.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, TensorDataset, default_collate

from trainers.errors import ConfigError

Batch = Any
"""Any nesting of tensors (tuple, list, mapping, dataclass), whose first
dimension usually counts samples.
"""
Collate = Callable[[list[Any]], Batch]
"""Makes a batch from a list of samples."""
Rows = np.ndarray[Any, np.dtype[np.int64]]


def parts_of(batch: Batch) -> list[tuple[Any, Any]] | None:
    """Return the key and value of each item of a nested batch; None for a leaf."""
    if isinstance(batch, PackedSequence):
        # Without `batch_sizes`, which torch needs on the host.
        names = ["data", "sorted_indices", "unsorted_indices"]
    elif isinstance(batch, (tuple, list)):
        return list(enumerate(batch))
    elif isinstance(batch, Mapping):
        return list(batch.items())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
    else:
        return None
    return [(name, getattr(batch, name)) for name in names]


def leaves_of(batch: Batch) -> list[Any]:
    """Return all leaves of a nested batch, tensors and others, in order."""
    parts = parts_of(batch)
    if parts is None:
        return [batch]
    return [leaf for _, part in parts for leaf in leaves_of(part)]


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return all tensors of a nested batch, in order."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in one dimension, without a copy if it is contiguous.

    Columns of tables are not contiguous. A column with one row counts as
    contiguous, but keeps the table's stride, with which torch shows no bytes;
    the added dimension has stride 1.
    """
    flat = tensor.detach().contiguous()[..., None].reshape(-1)
    return flat.view(torch.uint8)


def num_samples(batch: Batch) -> int:
    """Return the first dimension of the first tensor in a nested batch."""
    for tensor in tensors_of(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError(
        "the batch has no tensor with a first dimension that counts samples: override `weight()`"
    )


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply `function` to every tensor and keep the nesting.

    Other leaves are left as they are.

    A mapping becomes a copy of the same type that keeps its other attributes
    (such as the encodings of a BatchEncoding); an immutable mapping becomes a
    dict.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    parts = parts_of(batch)
    if parts is None:
        return batch
    mapped = [(key, map_tensors(function, value)) for key, value in parts]
    if isinstance(batch, PackedSequence):
        return PackedSequence(batch_sizes=batch.batch_sizes, **dict(mapped))
    if isinstance(batch, (tuple, list)):
        values = [value for _, value in mapped]
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return type(batch)(values)
    if isinstance(batch, Mapping):
        return _with_items(batch, mapped)
    given = dict(mapped)
    for field in dataclasses.fields(batch):
        if not field.init:
            del given[field.name]
    return dataclasses.replace(batch, **given)


def _with_items(
    mapping: Mapping[Any, Any], items: list[tuple[Any, Any]]
) -> Mapping[Any, Any]:
    """Return a copy of the mapping with other values.

    The constructor is not called, because its arguments are unknown.
    """
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return dict(items)
    copied = copy.copy(mapping)
    for key, value in items:
        copied[key] = value
    return copied


def fetch(
    dataset: Dataset[Any], indices: Sequence[int] | Rows, collate: Collate
) -> Batch:
    """Return one batch of a map-style dataset.

    It is read with a single call if the dataset has `__getitems__`, or is a
    TensorDataset with torch's own collate.

    Raises:
        ConfigError: The batch's tensors require a gradient: a loader's process
            would drop gradients silently, and a throw-away pass would change
            the data.
    """
    rows = np.asarray(indices, dtype=np.int64)
    # Not a subclass, which may give something else.
    if type(dataset) is TensorDataset and collate is default_collate:
        _require_data(dataset.tensors, dataset)
        chosen = torch.from_numpy(rows)
        # Copies row by row; indexing with [] copies number by number, ten
        # times slower.
        return tuple(
            tensor.index_select(0, chosen) for tensor in dataset.tensors
        )
    batch = _read(dataset, rows, collate)
    _require_data(tensors_of(batch), dataset)
    return batch


def _require_data(tensors: Sequence[Tensor], dataset: Dataset[Any]) -> None:
    if any(tensor.requires_grad for tensor in tensors):
        raise ConfigError(
            "dataset",
            type(dataset).__name__,
            "gives tensors that require a gradient, which cannot flow back through the reading of samples",
            "detach() them; to differentiate with respect to inputs, call requires_grad_() in forward()",
        )


def _read(dataset: Dataset[Any], rows: Rows, collate: Collate) -> Batch:
    numbers: list[int] = rows.tolist()
    if not hasattr(dataset, "__getitems__"):
        return collate([dataset[number] for number in numbers])
    # A list of samples (torch's protocol) or, faster, a batch that is ready.
    fetched = dataset.__getitems__(numbers)
    if isinstance(fetched, list):
        return collate(fetched)
    return fetched
