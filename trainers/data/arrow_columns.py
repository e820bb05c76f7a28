"""The columns of memory-mapped Arrow record batches: some rows of them as one tensor or one list."""

import math
import warnings
from typing import Any, NoReturn, Union

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trainers.data.arrow_files import check_nulls
from trainers.errors import ConfigError, StorageError

Array = np.ndarray[Any, Any]
Column = Union["Numbers", "Bits", "Values"]

_SHARED_BYTES = 2**20
"""Of a batch: from here on torch's threads gather it together; below, numpy's gather costs less than handing it out."""


def place(into: Tensor | list[Any], at: Array, part: Tensor | list[Any]) -> None:
    """Put the values `part` to the positions `at` of a batch."""
    if isinstance(into, list):
        for position, value in zip(at.tolist(), part, strict=True):
            into[position] = value
    else:
        into.numpy()[at] = part


class NotMappedError(Exception):
    """Not an Arrow IPC file, or one whose values do not lie in it as they are."""


def column_of(parts: list[pa.Array], whole: pa.Buffer, column: str, file: str) -> Column:
    """Return a column of the record batches that lie in `whole`, the mapped file.

    Raises NotMappedError when its values are not in it as they are, ConfigError for nulls and for unknown types.
    """
    for part in parts:
        for buffer in part.buffers():
            if buffer is not None and buffer.size and not 0 <= buffer.address - whole.address < whole.size:
                raise NotMappedError  # compressed, or of another byte order
    if pa.types.is_boolean(parts[0].type):
        check_nulls(parts, column, file)
        return Bits(parts, whole)
    flat = parts
    shape: tuple[int, ...] = ()
    while isinstance(flat[0].type, (pa.FixedSizeListType, pa.BaseExtensionType)):
        check_nulls(flat, column, file)
        if isinstance(flat[0].type, pa.FixedSizeListType):
            shape = (*shape, flat[0].type.list_size)
            flat = [part.values.slice(part.offset * shape[-1], len(part) * shape[-1]) for part in flat]
        else:
            order = getattr(flat[0].type, "permutation", None)  # of a fixed-shape tensor
            if order is not None and list(order) != sorted(order):
                rule = f"of {file} has its axes permuted"
                raise ConfigError(f"column {column}", str(flat[0].type), rule, "write them in order")
            flat = [part.storage for part in flat]
    kind = flat[0].type
    if pa.types.is_fixed_size_binary(kind):
        shape, dtype = (*shape, kind.byte_width), np.dtype(np.uint8)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
    elif shape:
        _refuse(parts[0].type, column, file)
    else:
        return Values(parts, column, file)
    check_nulls(flat, column, file)
    if isinstance(parts[0].type, pa.FixedShapeTensorType):
        shape = tuple(parts[0].type.shape)
    return Numbers(flat, whole, dtype, shape)


def _refuse(kind: pa.DataType, column: str, file: str) -> NoReturn:
    raise ConfigError(f"column {column}", str(kind), f"of {file} fits no tensor", "cast it to numbers, or leave it out")


class Numbers:
    """Numbers of fixed width: each record batch's lie one after another somewhere in the mapped file.

    One window over the whole file serves all record batches: a sample is the n items from its first one on.
    """

    def __init__(self, flat: list[pa.Array], whole: pa.Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self._width = dtype, shape, math.prod(shape)
        self.kind = f"{dtype}{list(shape)}"
        offsets = []
        for part in flat:
            values = part.buffers()[1]
            width = self._width * dtype.itemsize if pa.types.is_fixed_size_binary(part.type) else dtype.itemsize
            offsets.append(0 if values is None else values.address - whole.address + part.offset * width)
        if any(offset % dtype.itemsize for offset in offsets):
            raise NotMappedError
        start = min(offsets)
        self._first = (np.array(offsets, dtype=np.int64) - start) // dtype.itemsize
        items = np.frombuffer(whole, dtype, (whole.size - start) // dtype.itemsize, start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the file is mapped for reading: nothing writes to it
            data = torch.from_numpy(items)
        self._dtype, self._items = data.dtype, items
        size, data = self._width * dtype.itemsize, data.view(torch.uint8)
        # In bytes: not every dtype of torch can be selected from.
        self._window = data.as_strided((max(0, len(items) - self._width + 1), size), (dtype.itemsize, 1))
        count = len(items) // max(1, self._width)
        self._first_part = data.as_strided((count, size), (size, 1))
        if size:
            self._anywhere = np.ndarray(len(self._window), f"V{size}", items.data, strides=(dtype.itemsize,))
        self._first_samples = items[: count * self._width].reshape(count, *shape)

    def empty(self, size: int) -> Tensor:
        """Room for a batch."""
        return torch.empty((size, *self.shape), dtype=self._dtype)

    def take(self, pieces: Array | None, rows: Array) -> Tensor:
        """[B, ...]: the given rows of the given record batches (None: there is but one)."""
        if not self.shape:
            at = rows if pieces is None else self._first[pieces] + rows
            return torch.from_numpy(self._items.take(at))
        window = self._first_part
        small = len(rows) * window.shape[1] < _SHARED_BYTES or torch.get_num_threads() == 1
        if pieces is None and small:
            return torch.from_numpy(self._first_samples.take(rows, 0))
        if pieces is not None:
            window, rows = self._window, self._first[pieces] + rows * self._width
            if small and self._width:
                found = self._anywhere[rows].view(self.dtype)
                return torch.from_numpy(found.reshape(len(rows), *self.shape))
        # A copy a row: several times faster than numpy's indexing with [], and shared by torch's threads.
        gathered = window.index_select(0, torch.from_numpy(rows))
        if self._dtype is not torch.uint8:
            gathered = gathered.view(self._dtype)
        return gathered.view(len(rows), *self.shape) if len(self.shape) > 1 else gathered


class Bits:
    """Booleans, eight in a byte."""

    kind = "bool[]"

    def __init__(self, parts: list[pa.Array], whole: pa.Buffer) -> None:
        self._bytes = np.frombuffer(whole, np.uint8)
        starts = [8 * (part.buffers()[1].address - whole.address) + part.offset if len(part) else 0 for part in parts]
        self._first = np.array(starts, dtype=np.int64)

    def empty(self, size: int) -> Tensor:
        """Room for a batch."""
        return torch.empty(size, dtype=torch.bool)

    def take(self, pieces: Array | None, rows: Array) -> Tensor:
        """[B, ...]: the given rows of the given record batches (None: there is but one)."""
        bits = self._first[0 if pieces is None else pieces] + rows
        return torch.from_numpy((self._bytes[bits >> 3] >> (bits & 7) & 1).astype(np.bool_))


class Values:
    """Values of any width: text, bytes, lists of numbers as 1-D tensors."""

    def __init__(self, parts: list[pa.Array], column: str, file: str) -> None:
        kind = parts[0].type
        self._lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if self._lists:
            item = kind.value_type
            self.kind = f"list of {item}"
            if not (pa.types.is_integer(item) or pa.types.is_floating(item)):
                _refuse(kind, column, file)
            check_nulls((array for part in parts for array in (part, part.flatten())), column, file)
        else:
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            text = pa.types.is_string(plain) or pa.types.is_large_string(plain)
            if not (text or pa.types.is_binary(plain) or pa.types.is_large_binary(plain)):
                _refuse(kind, column, file)
            self.kind = "text" if text else "bytes"
        self._parts, self._damaged = parts, f"column {column} of {file} is damaged: a value lies outside of the file"
        self._offsets = [None if pa.types.is_dictionary(kind) else _offsets(part) for part in parts]

    def empty(self, size: int) -> list[Any]:
        """Room for a batch."""
        return [None] * size

    def take(self, pieces: Array | None, rows: Array) -> list[Any]:
        """B values: the given rows of the given record batches (None: there is but one)."""
        if pieces is None:
            return self._taken(0, rows)
        values = self.empty(len(rows))
        for piece in np.unique(pieces):
            at = np.flatnonzero(pieces == piece)
            place(values, at, self._taken(piece, rows[at]))
        return values

    def _taken(self, piece: int, rows: Array) -> list[Any]:
        offsets, part = self._offsets[piece], self._parts[piece]
        if offsets is not None and len(rows):
            # Arrow trusts the offsets of a file, and looking at all of them at the start would take long.
            starts, ends = offsets[0][rows], offsets[0][rows + 1]
            if starts.min() < 0 or ends.max() > offsets[1] or (ends < starts).any():
                raise StorageError(self._damaged)
        taken = part.take(pa.array(rows))
        if not self._lists:
            return list(taken.to_pylist())
        items = torch.from_numpy(taken.flatten().to_numpy().copy())
        return list(items.split(taken.value_lengths().to_pylist()))


def _offsets(part: pa.Array) -> tuple[Array, int]:
    """Where each value of text, bytes or lists begins and the last ends, and the size of what holds them."""
    large = (pa.types.is_large_list, pa.types.is_large_string, pa.types.is_large_binary)
    kind = np.int64 if any(is_large(part.type) for is_large in large) else np.int32
    _, offsets, *data = part.buffers()
    ends = np.frombuffer(offsets, kind)[part.offset : part.offset + len(part) + 1]
    return ends, len(part.values) if hasattr(part, "values") else len(data[0] or b"")
