"""One shard on this machine, read at random: a WebDataset tar, JSON lines, or an Arrow IPC file.

What had to be searched for is kept in an int64 array, the shard's `index`; its first item is the size of the file.
Files are read with pread, or mapped by Arrow: both go on after a fork, and in several threads.
"""

import bisect
import contextlib
import json
import mmap
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainers.data.arrow_files import DAMAGED, mapped_batches
from trainers.errors import FIX, CheckpointError, ConfigError, SampleError, ShardError, first_line

Index = np.ndarray[Any, np.dtype[np.int64]]
Sample = dict[str, Any]

_BROKEN = (*DAMAGED, OSError, RecursionError, tarfile.TarError, CheckpointError)
_PIECE = 4 << 20  # bytes of JSON lines that are searched at once
_BOM = b"\xef\xbb\xbf"


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what readers raise for a damaged shard into ShardError; errors of the system, which have a number, go on."""
    try:
        yield
    except ConfigError:
        raise
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ShardError(f"shard {name} is damaged: {_words(error)}{FIX}or leave it out") from error


def _words(error: Exception) -> str:
    words = first_line(error).rstrip(".")
    return f"{type(error).__name__} {words}" if isinstance(error, LookupError) else words


class Shard(ABC):
    """The samples of one file, by row.

    `index` is what the next `open_shard` of the same file need not search for; None where nothing is searched for.
    """

    index: Index | None = None

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._rows = 0
        self._file = path.open("rb", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def __len__(self) -> int:
        return self._rows

    def take(self, rows: Sequence[int]) -> list[Sample]:
        """Return the samples of some rows, in that order; raise SampleError for one that cannot be read."""
        samples = []
        for row in rows:
            if not 0 <= row < self._rows:
                raise IndexError(f"sample {row} of {self._rows} in {self.name}")
            try:
                samples.append(self._sample(row))
            except _BROKEN as error:
                which = f"sample {row}{self._called(row)} of shard {self.name}"
                raise SampleError(f"{which} is damaged: {_words(error)}{FIX}or leave it out") from error
        return samples

    def close(self) -> None:
        """Give the file back; samples that were taken stay."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    @abstractmethod
    def _sample(self, row: int) -> Sample: ...

    def _called(self, row: int) -> str:
        return ""

    def _read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes; no more than the file has are ever asked for."""
        data = os.pread(self._file.fileno(), min(size, self._size - offset), offset) if offset < self._size else b""
        if len(data) != size:
            raise EOFError(f"of {size:,} bytes at byte {offset:,}, {len(data):,} can be read")
        return data

    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def _check(self, index: Index) -> Index:
        if index[0] != self._size:
            raise ValueError(f"it has {self._size:,} bytes, and had {index[0]:,} when it was indexed")
        return index


class TarShard(Shard):
    """A WebDataset: consecutive members of one key are a sample, {"__key__": key, field: bytes, ...}.

    The index: size of the file, samples S, members M, fields F; the first member of each sample and M [S + 1]; where
    each key and field ends in the text [1 + S + F]; field, offset and size of each member [M, 3]; the text.
    """

    def __init__(self, path: Path, name: str, index: Index | None) -> None:
        super().__init__(path, name)
        with explained(name):
            self.index = self._scan() if index is None else self._check(index)
            _, self._rows, members, fields = self.index[:4].tolist()
            parts = np.cumsum([self._rows + 1, 1 + self._rows + fields, 3 * members])
            self._firsts, self._ends, flat, text = np.split(self.index[4:], parts)
            self._members, self._text = flat.reshape(members, 3), text.tobytes()
            self._fields = [self._string(self._rows + field) for field in range(fields)]

    def _string(self, number: int) -> str:
        start, end = self._ends[number : number + 2].tolist()
        return self._text[start:end].decode("utf-8", "surrogateescape")

    def _called(self, row: int) -> str:
        return f" ({self._string(row)})"

    def _sample(self, row: int) -> Sample:
        first, last = self._firsts[row : row + 2].tolist()
        sample: Sample = {"__key__": self._string(row)}
        for field, offset, size in self._members[first:last].tolist():
            sample[self._fields[field]] = self._read(offset, size)
        return sample

    def _scan(self) -> Index:
        members: list[tuple[int, int, int]] = []
        firsts: list[int] = []
        keys: list[str] = []
        fields: dict[str, int] = {}
        with self._map() as whole:  # reads no more than there is, whatever size is claimed
            for member in _members(whole):
                key, field = _split(member.name)
                if not key or not member.isreg():
                    continue
                if not keys or key != keys[-1]:
                    keys.append(key)
                    firsts.append(len(members))
                    seen = {"__key__"}
                if field in seen:
                    raise ValueError(f"sample {key} has {field} twice")
                if member.issparse():
                    raise ValueError(f"{member.name} is sparse")
                seen.add(field)
                members.append((fields.setdefault(field, len(fields)), member.offset_data, member.size))
        texts = [text.encode("utf-8", "surrogateescape") for text in (*keys, *fields)]
        ends = np.cumsum([0, *map(len, texts)])
        text = b"".join(texts)
        numbers = [self._size, len(keys), len(members), len(fields), *firsts, len(members)]
        flat = np.array(members, np.int64).reshape(-1)
        return np.concatenate([np.array(numbers), ends, flat, np.frombuffer(text + bytes(-len(text) % 8), np.int64)])


def _members(whole: mmap.mmap) -> Iterator[tarfile.TarInfo]:
    """All of a tar; ValueError unless they end as a tar does, for tarfile takes a damaged header for the end."""
    archive = tarfile.TarFile(fileobj=whole, encoding="utf-8")
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it would keep all
        if not 0 <= member.size <= len(whole) - member.offset_data:
            raise ValueError(f"{member.name} would have {member.size:,} bytes at byte {member.offset_data:,}")
        yield member
    end = whole[archive.offset : archive.offset + tarfile.BLOCKSIZE]
    if end != bytes(tarfile.BLOCKSIZE):
        raise ValueError(f"at byte {archive.offset:,} is neither a member nor the end of a tar")
    if np.frombuffer(whole, np.uint8, offset=archive.offset).any():
        raise ValueError(f"the tar ends at byte {archive.offset:,}, and more follows")


def _split(name: str) -> tuple[str, str]:
    """Key and field, as WebDataset has them; an empty key for what is no part of a sample."""
    directory, slash, base = name.rpartition("/")
    stem, dot, field = base.partition(".")
    top = name.partition("/")[0]
    meta = len(top) > 3 and top.startswith("__") and top.endswith("__")
    return (directory + slash + stem if stem and dot and not meta else ""), field.lower()


class JsonLinesShard(Shard):
    """A JSON object a line. The index: size of the file; offset and size of each line that is not empty [N, 2]."""

    def __init__(self, path: Path, name: str, index: Index | None) -> None:
        super().__init__(path, name)
        with explained(name):
            self.index = self._scan() if index is None else self._check(index)
            self._lines = self.index[1:].reshape(-1, 2)
        self._rows = len(self._lines)

    def _sample(self, row: int) -> Sample:
        return self._parse(*self._lines[row].tolist())

    def _parse(self, offset: int, size: int) -> Sample:
        value = json.loads(self._read(offset, size).decode())
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__} is no object")
        return value

    def _scan(self) -> Index:
        # `start` and `filled` are those of the line that the last piece left open.
        start, filled = (len(_BOM) if self._size >= len(_BOM) and self._read(0, len(_BOM)) == _BOM else 0), False
        found: list[Index] = []
        for at in range(start, self._size, _PIECE):
            piece = np.frombuffer(self._read(at, min(_PIECE, self._size - at)), np.uint8)
            after = np.flatnonzero(piece == ord("\n")) + 1
            # A zero becomes 255: a hole in a file is not an empty line.
            shifted = np.append(piece - np.uint8(1), np.uint8(0))
            dark = np.maximum.reduceat(shifted, np.append(0, after)) >= ord(" ")
            dark[0] |= filled
            edges = np.append(start, at + after)
            found.append(np.stack([edges[:-1], np.diff(edges) - 1], 1)[dark[:-1]])
            start, filled = int(edges[-1]), bool(dark[-1])
        if filled:
            try:
                self._parse(start, self._size - start)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"its last line is cut off ({first_line(error)})") from error
            found.append(np.array([[start, self._size - start]]))
        return np.concatenate([np.array([self._size]), *(lines.reshape(-1) for lines in found)])


class ArrowShard(Shard):
    """Rows of an Arrow IPC file; one that has an index was looked through, and Arrow can trust its offsets."""

    def __init__(self, path: Path, name: str, index: Index | None) -> None:
        super().__init__(path, name)
        with explained(name):
            self.index = np.array([self._size]) if index is None else self._check(index)
            batches = mapped_batches(pa.py_buffer(self._map()))
            names = batches[0].schema.names if batches else []
            if len(set(names)) != len(names):
                raise ValueError(f"of its columns {', '.join(names)}, two have one name")
            for batch in batches if index is None else ():
                batch.validate(full=True)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        self._rows = self._starts[-1]
        self._batches = [list(zip(names, batch.columns, strict=True)) for batch in batches]

    def _sample(self, row: int) -> Sample:
        number = bisect.bisect_right(self._starts, row) - 1
        return {name: _plain(column[row - self._starts[number]]) for name, column in self._batches[number]}

    def close(self) -> None:
        """Give the file and its mapping back."""
        super().close()
        self._batches = []


def _plain(value: pa.Scalar) -> Any:
    """A Python value; numbers in a list, or a tensor, as an array of its own."""
    kind = value.type
    if not value.is_valid:
        return None
    if isinstance(value, pa.FixedShapeTensorScalar):
        return value.to_numpy().copy()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_type
        if (pa.types.is_integer(item) or pa.types.is_floating(item)) and not value.values.null_count:
            return value.values.to_numpy().copy()
    return value.as_py()
