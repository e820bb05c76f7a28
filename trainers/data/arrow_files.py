"""Parquet and Arrow files wherever they lie, as uncompressed Arrow IPC files that this machine maps into memory.

An uncompressed Arrow IPC file on this machine is mapped as it is. Anything else (Parquet, compressed, on an object
store, columns to be stacked) is converted once into a cache directory and mapped from there, so that all workers and
loader processes of a node share one copy, in the page cache.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainers.errors import MISSING, ConfigError, PacelineError, StorageError, did_you_mean, first_line
from trainers.storage import Storage

logger = logging.getLogger(__name__)

Entry = tuple[str, ...]
"""What one tensor is made of: a column, or several to be stacked."""

DAMAGED = (pa.ArrowException, EOFError, ValueError, LookupError, TypeError, ArithmeticError)
"""What Arrow raises for a file that says what cannot be, besides OSError."""
SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc")
_FORMAT = 1  # of the cached files: part of their names
_ROWS = 65_536  # of one converted record batch


def find_files(files: str | Path | Sequence[str | Path]) -> list[Storage]:
    """Return each file of a path, URI, glob or directory (with all below it), or of a list of them, sorted within each.

    Raises ConfigError when there is none.
    """
    return [Storage(directory.locate(name)) for directory, name, _ in listed(files, SUFFIXES)]


def listed(
    files: str | Path | Sequence[str | Path], suffixes: tuple[str, ...]
) -> list[tuple[Storage, str, fs.FileInfo]]:
    """Return a directory, the name in it, and what the filesystem says of each file; of a directory those that end in
    `suffixes`.
    """
    locations = [files] if isinstance(files, (str, Path)) else list(files)
    found = [file for location in locations for file in _found(str(location), suffixes)]
    if not found:
        raise ConfigError("files", locations, "names no file", f"give files that end in {', '.join(suffixes)}")
    return found


def _found(location: str, suffixes: tuple[str, ...]) -> list[tuple[Storage, str, fs.FileInfo]]:
    remote = "://" in location
    location, mark, options = location.partition("?") if remote else (location, "", "")
    place = location if remote else os.path.abspath(os.path.expanduser(location))  # noqa: PTH100, PTH111 (no symlink is resolved)
    magic = "*" if remote else "*?["
    parts = place.split("/")
    first = next((i for i, part in enumerate(parts) if any(sign in part for sign in magic)), len(parts))
    base, pattern = Storage(("/".join(parts[:first]) or "/") + mark + options), PurePosixPath(*parts[first:])
    with _explained(base.uri):
        info = base.filesystem.get_file_info(base.path or "/")
        if info.type == fs.FileType.File and first == len(parts):
            return [(base.parent, base.name, info)]
        if info.type == fs.FileType.NotFound:
            raise ConfigError("files", location, "is not there", "check its name")
        inside = base.filesystem.get_file_info(fs.FileSelector(base.path or "/", recursive=True))
    infos = {i.path[len(base.path) :].lstrip("/"): i for i in inside if i.type == fs.FileType.File}
    names = sorted(infos)
    if first == len(parts):
        chosen = [name for name in names if name.endswith(suffixes)]
    else:
        depth = len(pattern.parts)
        chosen = [n for n in names if len(PurePosixPath(n).parts) == depth and PurePosixPath(n).match(str(pattern))]
    return [(base, name, infos[name]) for name in chosen]


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever Arrow raises for a damaged file as an error of ours."""
    try:
        yield
    except PacelineError:
        raise
    except DAMAGED as error:
        words = first_line(error).rstrip(".")
        raise ConfigError("files", name, f"cannot be read ({words})", "give whole Parquet or Arrow files") from error
    except OSError as error:
        raise StorageError(f"could not read {name}: {first_line(error)}") from error


@contextlib.contextmanager
def _opened(file: Storage) -> Iterator[Any]:
    """Open a pq.ParquetFile, or a reader of an Arrow IPC file or stream."""
    with file.parent.reader(file.name) as stream, _explained(file.uri):
        head = stream.read(6)
        stream.seek(0)
        yield open_reader(stream, head)


def open_reader(source: Any, head: bytes) -> Any:
    """Return a pq.ParquetFile, or a reader of an Arrow IPC file or stream, by the first bytes of `source`."""
    if head[:4] == b"PAR1":
        return pq.ParquetFile(source)
    return (pa.ipc.open_file if head == b"ARROW1" else pa.ipc.open_stream)(source)


def mapped_batches(whole: pa.Buffer, names: Sequence[str] | None = None) -> list[pa.RecordBatch]:
    """Return the columns `names` (None: all) of an Arrow IPC file's record batches, in place.

    Raises ArrowInvalid for another file.
    """
    head = whole.slice(0, min(6, whole.size)).to_pybytes()
    if head[:4] == b"PAR1":
        raise pa.ArrowInvalid("Parquet cannot be mapped")
    batches = list(read_batches(open_reader(whole, head), names, full=False))
    if sum(batch.num_rows for batch in batches) > 8 * whole.size:
        raise pa.ArrowInvalid("more rows than bits")
    return batches


def column_names(file: Storage) -> list[str]:
    """Return all columns of a file, in its order."""
    with _opened(file) as reader:
        return list((reader.schema_arrow if isinstance(reader, pq.ParquetFile) else reader.schema).names)


def check_columns(file: Storage, wanted: Sequence[str]) -> None:
    """Raise ConfigError when a column is not in the file, or is in it twice."""
    names = column_names(file)
    for name in wanted:
        if names.count(name) != 1:
            rule = f"is no column of {file.uri}" if name not in names else f"is more than once in {file.uri}"
            has = f"it has {', '.join(names[:20])}"
            raise ConfigError("columns", name, rule, has if name in names else did_you_mean(name, names, has))


def own_directory(name: str) -> Path:
    """Make a directory of this user's own below the system's temporary one: on the node, and not kept for ever."""
    directory = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise ConfigError("cache", str(directory), "belongs to another user", "give `cache=` a directory of your own")
    return directory


def converted(file: Storage, entries: Sequence[Entry], cache: Path | None) -> Path:
    """Write the file's entries as the columns "0", "1", ... of an Arrow IPC file in the cache, unless it is there.

    Its name is made from the file's place, size and time of change and from the entries, so that a file that was
    written anew is converted anew. Raises ConfigError for what cannot be stacked, StorageError for a full disk.
    """
    with _explained(file.uri):
        info = file.filesystem.get_file_info(file.path)
    key = json.dumps([_FORMAT, file.uri, info.size, info.mtime_ns, entries])
    name = f"{PurePosixPath(file.name).stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.arrow"
    directory = cache or own_directory("paceline-arrow")
    target = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the node converts, the others wait for it
            if not target.exists():
                _convert(file, entries, target)
    except OSError as error:
        raise StorageError(f"could not write {target}: {error}; give `cache=` a directory with room") from error
    return target


def _convert(file: Storage, entries: Sequence[Entry], target: Path) -> None:
    aside = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    try:
        with _opened(file) as reader:
            writer = None
            for batch in read_batches(reader, names, full=True):
                columns = [_column(batch, entry, file) for entry in entries]
                made = pa.RecordBatch.from_arrays(columns, [str(index) for index in range(len(entries))])
                writer = writer or pa.ipc.new_file(str(aside), made.schema)
                writer.write_batch(made)
            (writer or pa.ipc.new_file(str(aside), pa.schema([]))).close()
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    logger.info("%s is kept as %s (%.0f MB)", file.uri, target, target.stat().st_size / 1e6)


def read_batches(
    reader: Any, names: Sequence[str] | None, full: bool, most_rows: int = _ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield those with rows, of Parquet `most_rows` at once.

    `full` looks at every value, not only at the sizes that a damaged file may claim.
    """
    if isinstance(reader, pq.ParquetFile):
        batches = reader.iter_batches(batch_size=most_rows, columns=names)
    elif isinstance(reader, pa.ipc.RecordBatchFileReader):
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        batches = reader
    for batch in batches:
        chosen = batch if names is None else batch.select(names)
        if chosen.num_rows:
            chosen.validate(full=full)
            for column in chosen.columns if not full else ():
                if pa.types.is_dictionary(column.type):
                    column.validate(full=True)  # a few bytes a row
            yield chosen


def _column(batch: pa.RecordBatch, entry: Entry, file: Storage) -> pa.Array:
    arrays = [batch.column(name) for name in entry]
    if len(arrays) == 1:
        array = arrays[0]
        return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    for name, array in zip(entry, arrays, strict=True):
        check_nulls([array], name, file.uri)
        if array.type != arrays[0].type or not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            rule = f"cannot be stacked with column {entry[0]}, which is {arrays[0].type}, in {file.uri}"
            raise ConfigError(f"column {name}", str(array.type), rule, "stack number columns of one type")
    stacked = np.stack([array.to_numpy() for array in arrays], axis=1)
    return pa.FixedSizeListArray.from_arrays(pa.array(stacked.reshape(-1)), len(arrays))


def check_nulls(arrays: Iterable[pa.Array], column: str, file: str) -> None:
    """Raise ConfigError when a value is missing: no tensor can hold that."""
    if any(array.null_count for array in arrays):
        raise ConfigError(f"column {column}", MISSING, f"of {file} has nulls", "fill or drop those rows")
