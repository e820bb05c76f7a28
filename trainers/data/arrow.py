"""Parquet / Arrow files as a map-style dataset, memory-mapped; a whole batch is one gather for each column.

    data = ArrowDataset("s3://bucket/train/*.parquet", ["features", "label"])
    data[0]                      # (Tensor [n], Tensor [])
    data.__getitems__([5, 2])    # (Tensor [2, n], Tensor [2]); `gather` is the same for an array, as the loader asks

Nothing in a file is run: no pickle, no pandas metadata.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor
from torch.utils.data import Dataset

from trainers.data.arrow_columns import Array, NotMappedError, Numbers, Values, column_of, place
from trainers.data.arrow_files import DAMAGED, Entry, check_columns, column_names, converted, find_files, mapped_batches
from trainers.errors import ConfigError, StorageError, did_you_mean
from trainers.storage import Storage

Decode = Callable[[list[Any]], Any]


class ArrowDataset(Dataset[Any]):
    """Rows of Parquet or Arrow (IPC, Feather 2) files.

    Number columns give tensors [B], fixed-size lists [B, n, ...] (fixed-size binary: bytes [B, n]); text, bytes and
    lists of other lengths (1-D tensors) stay Python lists of B values.

    `files`: paths, URIs, globs or directories. `columns`: what a batch is made of, a sequence for a tuple, a mapping
    for a dict; an entry that is a list of columns is stacked to [B, len]; None: a dict of all columns.
    `shapes`: a column's shape of one sample, where its list is flat. `decode`: a column's function from its list of B
    values to what the batch holds (images from bytes, padded tokens); must be picklable for loader processes.
    `cache`: the directory for what cannot be mapped as it is (see trainers/data/arrow_files.py).

    Raises ConfigError for what is not there, cannot be read, or has nulls; StorageError for storage that fails.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        columns: Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]] | None = None,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        decode: Mapping[str, Decode] | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self._given, sources = str(files), find_files(files)
        if columns is None:
            columns = {name: name for name in column_names(sources[0])}
        elif isinstance(columns, str):
            columns = [columns]
        self._keys = tuple(columns) if isinstance(columns, Mapping) else None
        chosen = list(columns.values()) if isinstance(columns, Mapping) else list(columns)
        self._entries: list[Entry] = [(entry,) if isinstance(entry, str) else tuple(entry) for entry in chosen]
        self._names = list(self._keys or ["+".join(entry) for entry in self._entries])
        self._decode, self._shapes = dict(decode or {}), {k: tuple(v) for k, v in (shapes or {}).items()}
        for argument, given in (("decode", self._decode), ("shapes", self._shapes)):
            for name in given:
                if name not in self._names:
                    fix = did_you_mean(name, self._names, f"they are {', '.join(self._names)}")
                    raise ConfigError(argument, name, "is not among the columns of a batch", fix)
        self._sources, self._cache = sources, Path(cache) if cache is not None else None
        for source in sources:
            check_columns(source, [name for entry in self._entries for name in entry])
        found = self._open()
        opened = [file for file in found if file.rows]  # without a writer's empty parts
        self._sources = [source for source, file in zip(sources, found, strict=True) if file.rows]
        self._files: list[_MappedFile] | None = opened
        self._starts = np.cumsum([0, *(file.rows for file in opened)])
        self._length = int(self._starts[-1])
        self._check(opened)

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None}  # another process maps the files itself

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = self.__getitems__([index % len(self)])
        return {key: value[0] for key, value in batch.items()} if self._keys else tuple(value[0] for value in batch)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch, ready: B samples in the order of their indices."""
        return self.gather(np.asarray(indices, dtype=np.int64))

    def gather(self, rows: Array) -> Any:
        """Return the same for an int64 array."""
        if len(rows) and rows.view(np.uint64).max() >= self._length:  # seen as unsigned, a negative one is too large
            raise IndexError(f"samples {rows.min()} to {rows.max()} of {len(self)}")
        files = self._files or self._open()
        if len(files) == 1:
            values = files[0].take(rows)
        else:
            owner = np.searchsorted(self._starts, rows, "right") - 1
            offsets = rows - self._starts[owner]
            values = [column.empty(len(rows)) for column in files[0].columns]
            for number in np.unique(owner):
                at = np.flatnonzero(owner == number)
                for into, part in zip(values, files[number].take(offsets[at]), strict=True):
                    place(into, at, part)
        if self._decode or self._shapes:
            values = [self._finished(name, value) for name, value in zip(self._names, values, strict=True)]
        return dict(zip(self._keys, values, strict=True)) if self._keys else tuple(values)

    def _finished(self, name: str, value: Tensor | list[Any]) -> Any:
        if isinstance(value, list):
            return self._decode[name](value) if name in self._decode else value
        return value.view(len(value), *self._shapes[name]) if name in self._shapes else value

    def _open(self) -> list[_MappedFile]:
        self._files = [_mapped(source, self._entries, self._cache) for source in self._sources]
        return self._files

    def _check(self, opened: list[_MappedFile]) -> None:
        if not opened:
            raise ConfigError("files", self._given, "hold no row", "give files with samples")
        for index, name in enumerate(self._names):
            column = opened[0].columns[index]
            for file in opened[1:]:
                other = file.columns[index].kind
                if other != column.kind:
                    rule = f"in {file.name} differs from {column.kind} in {opened[0].name}"
                    raise ConfigError(f"column {name}", other, rule, "write it alike in all files")
            if name in self._decode and not isinstance(column, Values):
                raise ConfigError("decode", name, "is a column of tensors already", "decode text, bytes or lists")
            if name in self._shapes:
                shape = self._shapes[name]
                size = math.prod(column.shape) if isinstance(column, Numbers) else -1
                if math.prod(shape) != size:
                    rule = f"does not fit {column.kind}"
                    raise ConfigError(f"shapes.{name}", list(shape), rule, "give the sample's shape")


def _mapped(source: Storage, entries: Sequence[Entry], cache: Path | None) -> _MappedFile:
    names = [entry[0] for entry in entries]
    if source.is_local and all(len(entry) == 1 for entry in entries):
        with contextlib.suppress(NotMappedError):
            return _MappedFile(Path(source.path), names, names, source.uri)
    path = converted(source, entries, cache)
    names = ["+".join(entry) for entry in entries]
    try:
        return _MappedFile(path, [str(index) for index in range(len(entries))], names, source.uri)
    except NotMappedError as error:
        raise StorageError(f"{path}, the copy of {source.uri}, is damaged: delete it") from error


class _MappedFile:
    """The record batches of one Arrow IPC file, in place."""

    def __init__(self, path: Path, columns: list[str], names: list[str], name: str) -> None:
        self.name = name
        try:
            whole = pa.memory_map(str(path)).read_buffer()
            batches = mapped_batches(whole, columns)
        except (*DAMAGED, OSError) as error:
            raise NotMappedError from error
        self.rows = sum(batch.num_rows for batch in batches)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])[:-1]
        self._several = len(batches) > 1
        sizes = {batch.num_rows for batch in batches[:-1]}
        self._even = max(sizes) if len(sizes) == 1 and batches[-1].num_rows <= max(sizes) else 0
        arrays = zip(*(batch.columns for batch in batches), strict=True)
        self.columns = [column_of(list(parts), whole, shown, name) for parts, shown in zip(arrays, names, strict=False)]

    def take(self, rows: Array) -> list[Tensor | list[Any]]:
        """Return the values of some rows, a column each."""
        pieces = None
        if self._several:
            # Record batches are of one size, but for the last, as nearly all writers leave them.
            pieces = rows // self._even if self._even else np.searchsorted(self._starts, rows, "right") - 1
            rows = rows - self._starts[pieces]
        return [column.take(pieces, rows) for column in self.columns]
