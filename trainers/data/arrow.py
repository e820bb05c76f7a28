"""Parquet and Arrow files as a map-style dataset, memory-mapped; a whole batch is one
gather for each column.

    data = ArrowDataset("s3://bucket/train/*.parquet", ["features", "label"]) data[0]
    # (Tensor [n], Tensor []) data.__getitems__([5, 2])    # (Tensor [2, n], Tensor
    [2]); `gather` is the same for an array, as the loader asks

Nothing in a file is run: no pickle, no pandas metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainers.data.arrow_files import (
    Entry,
    check_nulls,
    column_names,
    find_files,
    mapped_batches,
)
from trainers.errors import ConfigError, did_you_mean

Array = np.ndarray[Any, Any]
Decode = Callable[[list[Any]], Any]


class ArrowDataset(Dataset[Any]):
    """Rows of Parquet or Arrow (IPC, Feather 2) files.

    Number columns give tensors [B], fixed-size lists [B, n, ...] (fixed-size binary:
    bytes [B, n]); text, bytes and lists of other lengths (1-D tensors) stay Python
    lists of B values.

    `files`: paths, URIs, globs or directories. `columns`: what a batch is made of, a
    sequence for a tuple, a mapping for a dict; an entry that is a list of columns is
    stacked to [B, len]; None: a dict of all columns. `decode`: a column's function from
    its list of B values to what the batch holds (images from bytes, padded tokens);
    must be picklable for loader processes. `cache`: the directory for what cannot be
    mapped as it is (see trainers/data/arrow_files.py).

    Raises ConfigError for what is not there, cannot be read, or has nulls; StorageError
    for storage that fails.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        columns: Sequence[str | Sequence[str]]
        | Mapping[str, str | Sequence[str]]
        | None = None,
        *,
        decode: Mapping[str, Decode] | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self._sources = find_files(files)
        self._cache = Path(cache) if cache is not None else None
        if columns is None:
            columns = {name: name for name in column_names(self._sources[0])}
        elif isinstance(columns, str):
            columns = [columns]
        self._keys = list(columns) if isinstance(columns, Mapping) else None
        chosen = columns.values() if isinstance(columns, Mapping) else columns
        self._entries: list[Entry] = [
            (entry,) if isinstance(entry, str) else tuple(entry) for entry in chosen
        ]
        self._names = self._keys or ["+".join(entry) for entry in self._entries]
        self._decode = dict(decode or {})
        for name in self._decode:
            if name not in self._names:
                fix = did_you_mean(
                    name, self._names, f"they are {', '.join(self._names)}"
                )
                raise ConfigError(
                    "decode", name, "is not among the columns of a batch", fix
                )
        self._starts = np.zeros(1, np.int64)
        self._columns: list[_Numbers | _Values] | None = self._open()
        if not len(self):
            raise ConfigError(
                "files", str(files), "hold no row", "give files with samples"
            )
        for name, column in zip(self._names, self._columns, strict=True):
            if name in self._decode and isinstance(column, _Numbers):
                raise ConfigError(
                    "decode",
                    name,
                    "is a column of tensors already",
                    "decode text, bytes or lists",
                )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_columns": None
        }  # another process maps the files itself

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = self.__getitems__([index % len(self)])
        if self._keys is not None:
            return {key: value[0] for key, value in batch.items()}
        return tuple(value[0] for value in batch)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch, ready: B samples in the order of their indices."""
        return self.gather(np.asarray(indices, dtype=np.int64))

    def gather(self, rows: Array) -> Any:
        """Return the same for an int64 array."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"samples {rows.min()} to {rows.max()} of {len(self)}")
        if self._columns is None:
            self._columns = self._open()
        part = np.searchsorted(self._starts, rows, "right") - 1
        within = rows - self._starts[part]
        values = []
        for name, column in zip(self._names, self._columns, strict=True):
            value: Any = column.take(part, within)
            values.append(self._decode[name](value) if name in self._decode else value)
        return (
            dict(zip(self._keys, values, strict=True))
            if self._keys is not None
            else tuple(values)
        )

    def _open(self) -> list[_Numbers | _Values]:
        """Map all files: their record batches are the parts of each column."""
        batches: list[tuple[str, pa.RecordBatch]] = []
        for source in self._sources:
            batches += [
                (source.uri, batch)
                for batch in mapped_batches(source, self._entries, self._cache)
            ]
        self._starts = np.cumsum([0, *(batch.num_rows for _, batch in batches)])
        columns = []
        for number, name in enumerate(self._names if batches else ()):
            parts = [
                _column_of(batch.column(number), name, file) for file, batch in batches
            ]
            for (file, _), part in zip(batches, parts, strict=True):
                if part.kind != parts[0].kind:
                    rule = f"in {file} differs from {parts[0].kind} in {batches[0][0]}"
                    raise ConfigError(
                        f"column {name}", part.kind, rule, "write it alike in all files"
                    )
            joined = parts[0]
            for part in parts[1:]:
                joined.parts += part.parts
            columns.append(joined)
        return columns


def _column_of(array: pa.Array, column: str, file: str) -> _Numbers | _Values:
    """Return one record batch's column; ConfigError for nulls and for types that fit
    neither tensor nor list.
    """
    given = array.type
    shape = tuple[int, ...]()
    while isinstance(array.type, (pa.FixedSizeListType, pa.BaseExtensionType)):
        check_nulls(array, column, file)
        if isinstance(array.type, pa.FixedSizeListType):
            size = array.type.list_size
            shape = (*shape, size)
            array = array.values.slice(array.offset * size, len(array) * size)
            continue
        order = getattr(array.type, "permutation", None)  # of a fixed-shape tensor
        if order is not None and list(order) != sorted(order):
            raise ConfigError(
                f"column {column}",
                str(given),
                f"of {file} has its axes permuted",
                "write them in order",
            )
        array = array.storage
    if isinstance(given, pa.FixedShapeTensorType):
        shape = tuple(given.shape)
    kind = array.type
    is_binary = pa.types.is_fixed_size_binary(kind)
    if not (is_binary or pa.types.is_boolean(kind) or _is_number(kind)):
        if shape:
            raise _unfit(given, column, file)
        return _values_of(array, column, file)
    check_nulls(array, column, file)
    if is_binary:
        width = kind.byte_width
        shape = (*shape, width)
        flat = np.frombuffer(array.buffers()[1], np.uint8)[
            array.offset * width : (array.offset + len(array)) * width
        ]
    else:
        flat = array.to_numpy(zero_copy_only=not pa.types.is_boolean(kind))
    return _Numbers(flat.reshape(-1, *shape))


def _values_of(array: pa.Array, column: str, file: str) -> _Values:
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if not _is_number(kind.value_type):
            raise _unfit(kind, column, file)
        check_nulls(array, column, file)
        check_nulls(array.flatten(), column, file)
        return _Values(array, f"list of {kind.value_type}")
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(plain) or pa.types.is_large_string(plain):
        return _Values(array, "text")
    if pa.types.is_binary(plain) or pa.types.is_large_binary(plain):
        return _Values(array, "bytes")
    raise _unfit(kind, column, file)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _unfit(kind: pa.DataType, column: str, file: str) -> ConfigError:
    fix = "cast it to numbers, or leave it out"
    return ConfigError(f"column {column}", str(kind), f"of {file} fits no tensor", fix)


class _Numbers:
    """Numbers, an array [rows, ...] for each record batch, on the mapped file."""

    def __init__(self, part: Array) -> None:
        self.parts = [part]
        self.kind = f"{part.dtype}{list(part.shape[1:])}"

    def take(self, part: Array, rows: Array) -> Tensor:
        """[B, ...]: the given rows of the given parts."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return torch.from_numpy(first.take(rows, 0))
        taken = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for number, at in _by_part(part):
            taken[at] = self.parts[number].take(rows[at], 0)
        return torch.from_numpy(taken)


class _Values:
    """Values of any width, an Arrow array for each record batch: text, bytes, lists of
    numbers as 1-D tensors.
    """

    def __init__(self, part: pa.Array, kind: str) -> None:
        self.parts = [part]
        self.kind = kind

    def take(self, part: Array, rows: Array) -> list[Any]:
        """B values: the given rows of the given parts."""
        values: list[Any] = [None] * len(rows)
        for number, at in _by_part(part):
            taken = self.parts[number].take(pa.array(rows[at]))
            for position, value in zip(at.tolist(), self._plain(taken), strict=True):
                values[position] = value
        return values

    def _plain(self, taken: pa.Array) -> list[Any]:
        if self.kind in ("text", "bytes"):
            found: list[Any] = taken.to_pylist()
            return found
        items = torch.from_numpy(taken.flatten().to_numpy().copy())
        return list(items.split(taken.value_lengths().to_pylist()))


def _by_part(part: Array) -> Iterator[tuple[int, Array]]:
    """Each part that occurs, and at which places of a batch."""
    for number in np.unique(part).tolist():
        yield number, np.flatnonzero(part == number)
