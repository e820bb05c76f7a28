"""Shards by the suffix of their name: how many samples one has, its local form, and the reader of that.

A local form is a file that can be read at random: a tar, JSON lines or MDS as they are, without compression, or an
uncompressed Arrow IPC file, for Parquet too.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from trainers.data import arrow_files
from trainers.data.arrow_files import DAMAGED, open_reader, read_batches
from trainers.data.mds import MdsShard
from trainers.data.shard_files import ArrowShard, Index, JsonLinesShard, Shard, TarShard, explained
from trainers.errors import ConfigError, StorageError, first_line
from trainers.storage import Storage

_KINDS = {".tar": "tar", ".jsonl": "jsonl", ".ndjson": "jsonl", ".mds": "mds"}
_CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_FORMATS: dict[str, tuple[str, str | None]] = {
    **{suffix: (kind, None) for suffix, kind in _KINDS.items()},
    **{suffix + end: (kind, codec) for suffix, kind in _KINDS.items() for end, codec in _CODECS.items()},
    ".tgz": ("tar", "gzip"),
    **dict.fromkeys(arrow_files.SUFFIXES, ("arrow", None)),
}
SUFFIXES = tuple(_FORMATS)
"""What the name of a shard ends in."""

MOST_BYTES = 1 << 40
"""Of one shard."""
_PIECE = 4 << 20  # bytes that are decompressed at once
_BATCH_BYTES = 64 << 20  # of Parquet that becomes one record batch
_BATCH_ROWS = 65_536


def _format(name: str) -> tuple[str, str | None]:
    place = name.partition("?")[0] if "://" in name else name  # what follows are options of the filesystem
    for suffix, found in _FORMATS.items():
        if place.endswith(suffix):
            return found
    raise ConfigError("shards", name, "is no shard by its name", f"give files that end in {', '.join(SUFFIXES)}")


def kind_of(name: str) -> str:
    """Return "tar", "jsonl", "arrow" (Parquet, too) or "mds"; raise ConfigError for another suffix."""
    return _format(name)[0]


def count(file: Storage) -> int | None:
    """Return how many samples a shard says that it has; None where all of it would have to be read.

    Raises ShardError where it is damaged, StorageError where it cannot be read.
    """
    kind, codec = _format(file.name)
    parquet = file.name.endswith(".parquet")
    if kind != "mds" and not parquet:
        return None
    with file.parent.reader(file.name, MOST_BYTES) as source, explained(file.uri):
        stream = pa.PythonFile(_Source(source, file.uri), "r")
        if parquet:
            return int(pq.ParquetFile(stream).metadata.num_rows)
        head = (pa.CompressedInputStream(stream, codec) if codec else stream).read(4)
        if len(head) < 4:
            raise EOFError("it ends before its number of samples")
        return int.from_bytes(head, "little")


def needs_no_copy(path: Path) -> bool:
    """Whether a local shard is its own local form; what is damaged may not be."""
    kind, codec = _format(path.name)
    if kind != "arrow":
        return codec is None
    with contextlib.suppress(*DAMAGED, OSError):
        whole = pa.memory_map(str(path)).read_buffer()
        columns = pa.ipc.open_file(whole).get_batch(0).columns
        buffers = [buffer for column in columns for buffer in column.buffers() if buffer]
        return all(0 <= buffer.address - whole.address < whole.size for buffer in buffers)  # else they were compressed
    return False


def make_local(source: BinaryIO, name: str, target: Path) -> None:
    """Write the local form of the shard `name` from a seekable stream of it.

    Raises ShardError where it is damaged, StorageError or OSError for a source or disk that fails; `target` is then
    incomplete.
    """
    kind, codec = _format(name)
    if kind != "arrow":
        with target.open("wb") as file:
            if codec is None:
                shutil.copyfileobj(source, file, _PIECE)
            else:
                file.writelines(_pieces(source, name, codec))
        return
    writer = None
    with explained(name):
        for batch in _batches(pa.PythonFile(_Source(source, name), "r")):
            writer = writer or pa.ipc.new_file(str(target), batch.schema)
            writer.write_batch(batch)
        (writer or pa.ipc.new_file(str(target), pa.schema([]))).close()


def open_shard(path: Path, name: str, index: Index | None = None) -> Shard:
    """Open the local form of the shard `name`; `index` is what an earlier reader of the same file had as its `index`.

    Raises ShardError where it is damaged, ConfigError for a column of MDS that cannot be read, OSError for no file.
    """
    match kind_of(name):
        case "tar":
            return TarShard(path, name, index)
        case "jsonl":
            return JsonLinesShard(path, name, index)
        case "mds":
            return MdsShard(path, name)
        case _:
            return ArrowShard(path, name, index)


class _Source:
    """A stream for Arrow: its own errors are told from those of what it holds, and no more is read than there is."""

    closed = False

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.seek, self.tell = stream.seek, stream.tell
        self._size = self.seek(0, os.SEEK_END)
        self.seek(0)

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._stream.read(min(size, self._size - self.tell()))
        except OSError as error:
            raise StorageError(f"could not read {self._name}: {first_line(error)}") from error
        if not self._size:
            raise EOFError("it is empty")  # which a decompressor takes for nothing compressed
        return data

    def close(self) -> None:
        """Leave the stream to who opened it."""


def _pieces(source: BinaryIO, name: str, codec: str) -> Iterator[bytes]:
    with explained(name):
        stream = pa.CompressedInputStream(pa.PythonFile(_Source(source, name), "r"), codec)
        while piece := stream.read(_PIECE):
            yield piece


def _batches(stream: pa.PythonFile) -> Iterator[pa.RecordBatch]:
    """All rows, looked through, without dictionaries: an Arrow IPC file has but one for all of its batches."""
    head = stream.read(6)
    stream.seek(0)
    reader, rows = open_reader(stream, head), _BATCH_ROWS
    if isinstance(reader, pq.ParquetFile):
        whole = reader.metadata
        size = sum(whole.row_group(group).total_byte_size for group in range(whole.num_row_groups))
        rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES * whole.num_rows // max(1, size)))
    for batch in read_batches(reader, None, full=True, most_rows=rows):
        plain = [one.dictionary_decode() if isinstance(one, pa.DictionaryArray) else one for one in batch.columns]
        yield pa.RecordBatch.from_arrays(plain, batch.schema.names)
