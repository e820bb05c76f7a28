"""MosaicML's MDS shards, version 2, read at random and without their library.

A file is the number of samples N (u32, as all sizes, little-endian), where each begins and the last ends [N + 1], a
JSON object of the columns, and the samples: the sizes of the columns whose size is not fixed, then all values. That
object is also the shard's entry in index.json, so a shard alone is enough.
Source: github.com/mosaicml/streaming, docs/source/preparing_datasets/dataset_format.md and its reader, 0.13.
"""

import functools
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from trainers.data.shard_files import Sample, Shard, explained
from trainers.errors import ConfigError
from trainers.json_data import parse_json

Decode = Callable[[bytes], Any]

_SIZED = ((8, "uint8 int8"), (16, "uint16 int16 float16"), (32, "uint32 int32 float32"), (64, "uint64 int64 float64"))
# By the number that an ndarray names its type with.
_TYPES = {first + i: name for first, names in _SIZED for i, name in enumerate(names.split())}


class _Columns(BaseModel):
    """What Paceline reads of a shard's own description."""

    version: Literal[2]
    format: Literal["mds"]
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[NonNegativeInt | None]


def _array(data: bytes, dtype: str | None, shape: tuple[int, ...] | None) -> Any:
    """An ndarray: what its encoding does not say goes before the values: one byte of type, the shape."""
    at = 0
    if dtype is None:
        dtype, at = _TYPES[data[0]], 1
    if shape is None:
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(np.frombuffer(data, f"<u{width}", axes, at + 1).tolist())
        at += 1 + axes * width
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape).copy()


def _number(data: bytes, dtype: str) -> Any:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(())[()]


_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(("bytes", "jpeg", "png", "jpeg_array", "jpegarray"), bytes),
    **{name: functools.partial(_number, dtype=name) for name in _TYPES.values()},
    "int": lambda data: int(_number(data, "int64")),
    "str": bytes.decode,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": lambda data: json.loads(data.decode()),
}


def _decoder(encoding: str) -> Decode | None:
    name, *options = encoding.split(":")
    if name != "ndarray" or len(options) > 2 or (options and options[0] not in _TYPES.values()):
        return _DECODERS.get(encoding)
    axes = options[1].split(",") if len(options) == 2 else []
    if not all(axis.isdecimal() for axis in axes):
        return None
    return functools.partial(_array, dtype=options[0] if options else None, shape=tuple(map(int, axes)) or None)


class MdsShard(Shard):
    """The samples of an MDS shard: a value a column; images stay the bytes that they are.

    Raises ConfigError for an encoding that is not read here: a pickle, which would run code, or an image's raw memory.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        with explained(name):
            self._rows = int.from_bytes(self._read(0, 4), "little")
            self._offsets = np.frombuffer(self._read(4, 4 * (self._rows + 1)), "<u4")
            start, first, last = 4 * (self._rows + 2), int(self._offsets[0]), int(self._offsets[-1])
            if first < start or last != self._size or (self._offsets[1:] < self._offsets[:-1]).any():
                raise ValueError("its offsets do not add up to its size")
            columns = parse_json(self._read(start, first - start), _Columns)
            names, encodings, sizes = columns.column_names, columns.column_encodings, columns.column_sizes
            if not len(set(names)) == len(names) == len(encodings) == len(sizes):
                raise ValueError("its columns are not described one for one")
            self._columns = []
            for column, encoding, size in zip(names, encodings, sizes, strict=True):
                decode = _decoder(encoding)
                if decode is None:
                    fix = "write it as a number, str, bytes, json, ndarray, jpeg or png"
                    raise ConfigError(f"column {column}", encoding, f"is no encoding that {name} may have", fix)
                self._columns.append((column, size, decode))
        self._num_sizes = sum(not size for size in sizes)  # a 0 is no fixed size, either

    def _sample(self, row: int) -> Sample:
        start, end = self._offsets[row : row + 2].tolist()
        data = self._read(start, end - start)
        given = np.frombuffer(data, "<u4", self._num_sizes).tolist()
        at, sizes = 4 * len(given), iter(given)
        sample = {}
        for name, size, decode in self._columns:
            start, at = at, at + (size or next(sizes))
            if at > len(data):
                break
            sample[name] = decode(data[start:at])
        if at != len(data):
            raise ValueError(f"its columns do not add up to its {len(data):,} bytes")
        return sample
