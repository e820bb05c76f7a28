"""Parquet and Arrow files wherever they lie, as uncompressed Arrow IPC files that this
machine maps into memory.

An uncompressed Arrow IPC file on this machine is mapped as it is. Anything else
(Parquet, compressed, on an object store, columns to be stacked) is converted once into
a cache directory and mapped from there, so that all workers and loader processes of a
node share one copy, in the page cache.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainers.errors import (
    MISSING,
    ConfigError,
    PacelineError,
    StorageError,
    did_you_mean,
    first_line,
)
from trainers.storage import Storage

logger = logging.getLogger(__name__)

Entry = tuple[str, ...]
"""What one tensor is made of: a column, or several to be stacked."""

_DAMAGED = (
    pa.ArrowException,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
)
"""What Arrow raises for a file that says what cannot be, besides OSError."""
_SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
_FORMAT = 1  # of the cached files: part of their names
_ROWS = 65_536  # of one converted record batch


def find_files(files: str | Path | Sequence[str | Path]) -> list[Storage]:
    """Return each file of a path, URI, glob or directory (with all below it), or of a
    list of them, sorted within each.

    Raises ConfigError when there is none.
    """
    locations = [files] if isinstance(files, (str, Path)) else list(files)
    found = [file for location in locations for file in _found(str(location))]
    if not found:
        raise ConfigError(
            "files",
            locations,
            "names no file",
            f"give files that end in {', '.join(_SUFFIXES)}",
        )
    return found


def _found(location: str) -> list[Storage]:
    is_remote = "://" in location
    place, mark, options = location.partition("?") if is_remote else (location, "", "")
    if not is_remote:
        place = os.path.abspath(os.path.expanduser(place))  # noqa: PTH100, PTH111 (no symlink is resolved)
    parts = place.split("/")
    magic = "*" if is_remote else "*?["
    first = next(
        (
            number
            for number, part in enumerate(parts)
            if any(sign in part for sign in magic)
        ),
        len(parts),
    )
    base = Storage(("/".join(parts[:first]) or "/") + mark + options)
    info = base.info()
    if info.type == fs.FileType.NotFound:
        raise ConfigError("files", location, "is not there", "check its name")
    if info.type == fs.FileType.File and first == len(parts):
        return [base]
    inside = base.filesystem.get_file_info(
        fs.FileSelector(base.path or "/", recursive=True)
    )
    names = sorted(
        i.path[len(base.path) :].lstrip("/")
        for i in inside
        if i.type == fs.FileType.File
    )
    if first == len(parts):
        names = [name for name in names if name.endswith(_SUFFIXES)]
    else:
        depth = len(parts) - first
        pattern = "/".join(parts[first:])
        names = [
            name
            for name in names
            if name.count("/") + 1 == depth and PurePosixPath(name).match(pattern)
        ]
    return [Storage(base.locate(name)) for name in names]


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever Arrow raises for a damaged file as an error of ours."""
    try:
        yield
    except PacelineError:
        raise
    except _DAMAGED as error:
        words = first_line(error).rstrip(".")
        raise ConfigError(
            "files",
            name,
            f"cannot be read ({words})",
            "give whole Parquet or Arrow files",
        ) from error
    except OSError as error:
        raise StorageError(f"could not read {name}: {first_line(error)}") from error


@contextlib.contextmanager
def _opened(file: Storage) -> Iterator[Any]:
    """Open a pq.ParquetFile, or a reader of an Arrow IPC file or stream, by the first
    bytes of the file.
    """
    with file.parent.reader(file.name) as stream, _explained(file.uri):
        head = stream.read(6)
        stream.seek(0)
        if head[:4] == b"PAR1":
            yield pq.ParquetFile(stream)
        else:
            yield (pa.ipc.open_file if head == b"ARROW1" else pa.ipc.open_stream)(
                stream
            )


def column_names(file: Storage) -> list[str]:
    """Return all columns of a file, in its order."""
    with _opened(file) as reader:
        return list(
            (
                reader.schema_arrow
                if isinstance(reader, pq.ParquetFile)
                else reader.schema
            ).names
        )


def _check_columns(file: Storage, wanted: Sequence[str]) -> None:
    """Raise ConfigError when a column is not in the file, or is in it twice."""
    names = column_names(file)
    for name in wanted:
        if names.count(name) != 1:
            rule = (
                f"is no column of {file.uri}"
                if name not in names
                else f"is more than once in {file.uri}"
            )
            has = f"it has {', '.join(names[:20])}"
            raise ConfigError(
                "columns",
                name,
                rule,
                has if name in names else did_you_mean(name, names, has),
            )


def mapped_batches(
    file: Storage, entries: Sequence[Entry], cache: Path | None
) -> list[pa.RecordBatch]:
    """Return the record batches with rows of a file, in mapped memory, with a column
    for each entry.

    Raises ConfigError for a damaged file and for columns that are not there or cannot
    be stacked, StorageError for storage or a disk that fails.
    """
    _check_columns(file, [name for entry in entries for name in entry])
    if file.is_local and all(len(entry) == 1 for entry in entries):
        found = _in_place(
            Path(file.path), [name for entry in entries for name in entry]
        )
        if found is not None:
            return found
    path = _converted(file, entries, cache)
    found = _in_place(path, [str(number) for number in range(len(entries))])
    if found is None:
        raise StorageError(f"{path}, the copy of {file.uri}, is damaged: delete it")
    return found


def _in_place(path: Path, names: list[str]) -> list[pa.RecordBatch] | None:
    """Return the record batches of an Arrow IPC file on this machine; None where their
    values do not lie in it as they are: Parquet, compressed, of another byte order,
    damaged.
    """
    try:
        whole = pa.memory_map(str(path)).read_buffer()
        reader = (
            pa.ipc.open_file
            if bytes(whole.slice(0, 6)) == b"ARROW1"
            else pa.ipc.open_stream
        )(whole)
        batches = [
            batch
            for batch in reader.read_all().select(names).to_batches()
            if batch.num_rows
        ]
        end = whole.address + whole.size
        for column in [column for batch in batches for column in batch.columns]:
            _validate(column)
            if any(
                not whole.address <= buffer.address < end
                for buffer in column.buffers()
                if buffer and buffer.size
            ):
                return None
    except (*_DAMAGED, OSError):
        return None
    rows = sum(batch.num_rows for batch in batches)
    return batches if rows <= 8 * whole.size else None  # no more rows than bits


def _validate(column: pa.Array) -> None:
    """Look at sizes and offsets, which Arrow trusts later on: a few bytes a row, and
    none of the values.
    """
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.view(
            pa.binary() if pa.types.is_string(kind) else pa.large_binary()
        )
    is_fixed = pa.types.is_primitive(kind) or isinstance(
        kind, (pa.FixedSizeListType, pa.BaseExtensionType)
    )
    column.validate(full=not is_fixed)


def _converted(file: Storage, entries: Sequence[Entry], cache: Path | None) -> Path:
    """Write the file's entries as the columns "0", "1", ... of an Arrow IPC file in the
    cache, unless it is there.

    Its name is made from the file's place, size and time of change and from the
    entries, so that a file that was written anew is converted anew.
    """
    info = file.info()
    key = json.dumps([_FORMAT, file.uri, info.size, info.mtime_ns, entries])
    name = f"{PurePosixPath(file.name).stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.arrow"
    directory = cache or _own_directory()
    target = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(
                lock, fcntl.LOCK_EX
            )  # one process of the node converts, the others wait for it
            if not target.exists():
                _convert(file, entries, target)
    except OSError as error:
        raise StorageError(
            f"could not write {target}: {error}; give `cache=` a directory with room"
        ) from error
    return target


def _own_directory() -> Path:
    """Make a directory of this user's own below the system's temporary one: on the
    node, and not kept for ever.
    """
    directory = Path(tempfile.gettempdir(), f"paceline-arrow-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise ConfigError(
            "cache",
            str(directory),
            "belongs to another user",
            "give `cache=` a directory of your own",
        )
    return directory


def _convert(file: Storage, entries: Sequence[Entry], target: Path) -> None:
    aside = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    labels = [str(number) for number in range(len(entries))]
    try:
        with _opened(file) as reader:
            writer = None
            for batch in _read_batches(
                reader, list(dict.fromkeys(name for entry in entries for name in entry))
            ):
                made = pa.RecordBatch.from_arrays(
                    [_column(batch, entry, file) for entry in entries], labels
                )
                writer = writer or pa.ipc.new_file(str(aside), made.schema)
                writer.write_batch(made)
            if writer is None:
                writer = pa.ipc.new_file(
                    str(aside), pa.schema([(label, pa.null()) for label in labels])
                )
            writer.close()
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    logger.info(
        "%s is kept as %s (%.0f MB)", file.uri, target, target.stat().st_size / 1e6
    )


def _read_batches(reader: Any, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the record batches with rows, after a look at every value."""
    if isinstance(reader, pq.ParquetFile):
        batches = reader.iter_batches(batch_size=_ROWS, columns=names)
    elif isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches = (
            reader.get_batch(number) for number in range(reader.num_record_batches)
        )
    else:
        batches = reader
    for batch in batches:
        if batch.num_rows:
            chosen = batch.select(names)
            chosen.validate(full=True)
            yield chosen


def _column(batch: pa.RecordBatch, entry: Entry, file: Storage) -> pa.Array:
    arrays = [batch.column(name) for name in entry]
    if len(arrays) == 1:
        array = arrays[0]
        return (
            array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        )
    for name, array in zip(entry, arrays, strict=True):
        check_nulls(array, name, file.uri)
        if array.type != arrays[0].type or not (
            pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
        ):
            rule = f"cannot be stacked with column {entry[0]}, which is {arrays[0].type}, in {file.uri}"
            raise ConfigError(
                f"column {name}",
                str(array.type),
                rule,
                "stack number columns of one type",
            )
    stacked = np.stack([array.to_numpy() for array in arrays], axis=1)
    return pa.FixedSizeListArray.from_arrays(pa.array(stacked.reshape(-1)), len(arrays))


def check_nulls(array: pa.Array, column: str, file: str) -> None:
    """Raise ConfigError when a value is missing: no tensor can hold that."""
    if array.null_count:
        raise ConfigError(
            f"column {column}",
            MISSING,
            f"of {file} has nulls",
            "fill or drop those rows",
        )
