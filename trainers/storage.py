"""Storage: a directory of named files on any filesystem of pyarrow.fs.

JSON files are checked against a type when they are read.

Environment read: PACELINE_STORAGE, where runs are kept if `storage_path` is
not set; PACELINE_FILE_MODE, the mode of new files (octal; default 600);
RAY_JOB_CONFIG_JSON_ENV_VAR, which Ray sets inside a job.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from pydantic import TypeAdapter, ValidationError

from trainers.errors import (
    CheckpointError,
    ConfigError,
    LeaseError,
    StorageError,
    disk_is_full,
    first_line,
    holds_secret,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

P = ParamSpec("P")

_WAITS_S = (0.5, 1.0, 2.0)
# Errors that another try would meet again.
_FINAL = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    }
    | {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
)
_SINGLE_PUTS = "allow_delayed_open"
_ASIDE = re.compile(r"\.[0-9a-f]{8}\.tmp")


def storage_uri(storage_path: str | None) -> str:
    """Return the absolute path or URI of `storage_path`, or of its default.

    Raises ConfigError for a relative path inside a Ray job: it would lie in
    the job's package directory, which exists on one node only and is deleted
    with the job. Also raises ConfigError for syntax that only a shell would
    expand, unless a directory has that very name.
    """
    path = storage_path or os.environ.get("PACELINE_STORAGE") or "results"
    found = re.match(r"(?s)(?:file://)?(.*(\$(?:\w+|\{[^}]*\}?))[^/]*)", path)
    if found and not os.path.exists(os.path.expanduser(found[1])):  # noqa: PTH110, PTH111 (no error for any text)
        # Not expanded here: the same file would mean another place on another
        # machine, or when the run resumes.
        rule = f"contains {found[2]}, which is not expanded here"
        raise _refused(path, rule, "write the path itself")
    if found := re.match(r"([A-Za-z][\w+.-]+):/(?!/)", path):
        slashes = "///" if found[1].lower() == "file" else "//"
        fix = f"write {found[1]}:{slashes}{path[found.end() :]}"
        raise _refused(path, "is not a URI: its scheme needs two slashes", fix)
    if "://" in path:
        return path
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        rule = "names the home of an unknown user"
        raise _refused(path, rule, "write the whole path") from error
    if not expanded.is_absolute() and inside_ray_job():
        rule = "is relative: inside a Ray job, it would be lost with the job's package"
        fix = "give a path or URI that all nodes share, or set PACELINE_STORAGE on the cluster"
        raise _refused(path, rule, fix)
    return str(Path(os.path.abspath(expanded)))  # noqa: PTH100 (no symlink is resolved)


def _refused(place: str, rule: str, fix: str) -> ConfigError:
    return ConfigError("storage_path", place, rule, fix)


def inside_ray_job() -> bool:
    """Whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def _file_mode() -> int:
    text = os.environ.get("PACELINE_FILE_MODE", "600")
    if not re.fullmatch("0?[67][0-7][0-7]", text):
        rule = "must be the mode of a file in octal, at least 600"
        fix = (
            "write 640 to let the files' group read them, or 644 for everybody"
        )
        raise ConfigError("PACELINE_FILE_MODE", text, rule, fix)
    return int(text, 8)


def retrying(action: Callable[P, T]) -> Callable[P, T]:
    """Try `action` up to four times, unless it fails for good (a full disk)."""

    @functools.wraps(action)
    def tried(*args: P.args, **kwargs: P.kwargs) -> T:
        for wait_s in _WAITS_S:
            try:
                return action(*args, **kwargs)
            except LeaseError:
                raise
            except StorageError as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and cause.errno in _FINAL:
                    raise
                logger.warning("%s; trying again in %.1f s", error, wait_s)
                time.sleep(wait_s)
        return action(*args, **kwargs)

    return tried


class Storage:
    """Files below one directory.

    A write is complete or absent: a file is written under another name and
    renamed; an object appears when its upload is complete.
    """

    def __init__(
        self, uri: str | Path, guard: Callable[[], None] | None = None
    ) -> None:
        """Open nothing yet; `guard` is called before each write and deletion."""
        place = uri = str(uri)
        if holds_secret(uri):
            rule = "must hold no key or password, since the URI is printed and saved with the run"
            fix = "pass it through the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ...), a profile or a role"
            raise _refused(uri, rule, fix)
        self._guard = guard
        if "://" in uri:
            # What follows `?` are options of the filesystem (region,
            # endpoint), not part of the path.
            place = uri.partition("?")[0]
        self._place = place.rstrip("/") or "/"
        self._options = uri.removeprefix(place)
        self.uri = self._place + self._options

    def __reduce__(self) -> tuple[type[Storage], tuple[Any, ...]]:
        return (Storage, (self.uri, self._guard))

    @functools.cached_property
    def _resolved(self) -> tuple[Any, str]:
        # Imported late: it takes 0.1 s, which would delay the report of a
        # mistake.
        from pyarrow import fs

        try:
            if self._place.endswith(":"):
                raise ValueError("it names no bucket")
            if "://" not in self.uri:
                return fs.LocalFileSystem(), self.uri
            if "#" in self.uri:
                raise ValueError(
                    "what follows its `#` would be lost; write %23"
                )
            if self.is_local and self._options:
                raise ValueError(
                    f"{self._options} has no meaning for files; write %3F for a question mark in a name"
                )
            return tuple(fs.FileSystem.from_uri(_with_single_puts(self.uri)))
        except (OSError, ValueError) as error:
            rule = f"cannot be opened ({first_line(error)})"
            fix = "use a directory or a URI such as s3://bucket/path"
            raise _refused(self.uri, rule, fix) from error

    @property
    def filesystem(self) -> Any:
        """The pyarrow.fs.FileSystem that contains the directory."""
        return self._resolved[0]

    @property
    def path(self) -> str:
        """The directory's path inside `filesystem`."""
        return self._resolved[1].rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether this is a directory on this machine (or mounted on it)."""
        return "://" not in self.uri or self.uri.startswith("file://")

    def child(self, *names: str) -> Storage:
        """Return a directory below this one."""
        place = "/".join([self._place.rstrip("/"), *names])
        return Storage(place + self._options, self._guard)

    @property
    def parent(self) -> Storage:
        """The directory above this one."""
        return Storage(self._place.rpartition("/")[0] + self._options)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._place.rpartition("/")[2]

    @contextlib.contextmanager
    def beside(self) -> Iterator[Storage]:
        """Yield a sibling directory with a new name; delete it after the block."""
        place = self.parent.child(f"{self.name}-{uuid.uuid4().hex}")
        try:
            yield place
        finally:
            place.delete("")

    def locate(self, name: str) -> str:
        """Return the location of the file `name`, as shown to users."""
        return f"{self._place.rstrip('/')}/{name}{self._options}"

    @contextlib.contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """Yield a binary stream; the file only appears if the block succeeds."""
        target = f"{self.path}/{name}"
        aside = (
            f"{target}.{uuid.uuid4().hex[:8]}.tmp" if self.is_local else target
        )
        if self._guard is not None:
            self._guard()
        with _explained(f"write {self.locate(name)}"):
            if self.is_local:
                mode = _file_mode()
                # Whoever may read the files may enter the directory.
                Path(target).parent.mkdir(
                    mode | (mode & 0o444) >> 2, parents=True, exist_ok=True
                )
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                    with os.fdopen(
                        os.open(aside, flags, mode), "wb"
                    ) as stream:
                        yield stream
                        stream.flush()
                        os.fsync(stream.fileno())
                    Path(aside).replace(target)
                except BaseException:
                    Path(aside).unlink(missing_ok=True)
                    raise
            else:
                put = self.filesystem.open_output_stream(target)
                is_whole = False
                try:
                    yield put
                    is_whole = True
                    put.close()
                except BaseException:
                    # A failed upload leaves the old object, or the new one if
                    # only the response was lost. If the block failed, pyarrow
                    # cannot abandon the upload: closing it creates the object,
                    # which is then deleted.
                    with contextlib.suppress(OSError):
                        if not is_whole:
                            put.close()
                            self.filesystem.delete_file(target)
                    raise

    @retrying
    def write(self, name: str, data: bytes) -> None:
        """Write one whole file; retry if that may help."""
        with self.writer(name) as stream:
            stream.write(data)

    @contextlib.contextmanager
    def reader(self, name: str) -> Iterator[BinaryIO]:
        """Yield a seekable binary stream of an existing file."""
        path = f"{self.path}/{name}"
        with (
            _explained(f"read {self.locate(name)}"),
            self.filesystem.open_input_file(path) as stream,
        ):
            yield stream

    @retrying
    def read(self, name: str) -> bytes:
        """Return the content of a file; StorageError if it does not exist."""
        with self.reader(name) as stream:
            return stream.read()

    def read_json(self, name: str, kind: type[T]) -> T:
        """Return a JSON file's content as `kind`; CheckpointError if damaged."""
        data = self.read(name)
        try:
            return parse_json(data, kind)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.locate(name)} is damaged: {error}"
            ) from None

    @retrying
    def info(self, name: str = "") -> Any:
        """Return the pyarrow.fs.FileInfo of a path, which need not exist."""
        with _explained(f"look for {self.locate(name)}"):
            return self._info(name)

    def exists(self, name: str = "") -> bool:
        """Whether the file or directory exists."""
        return str(self.info(name).type.name) != "NotFound"

    @retrying
    def names(self, directory: str = "") -> list[str]:
        """Return the sorted names directly below a directory; none if it is missing.

        Temporary files of writers are left out.
        """
        from pyarrow import fs

        base = f"{self.path}/{directory}".rstrip("/")
        with _explained(f"list {self.locate(directory)}"):
            below = fs.FileSelector(base, allow_not_found=True)
            names = [
                info.base_name for info in self.filesystem.get_file_info(below)
            ]
        return sorted(name for name in names if not name.endswith(".tmp"))

    def clear_aside(self, directory: str = "", idle_s: float = 0.0) -> None:
        """Delete killed writers' temporary files that were unchanged for `idle_s`.

        Use 0 only if no process can be writing: a live writer's files look the
        same.
        """
        if not self.is_local:
            return
        for file in Path(self.path, directory).glob("*.tmp"):
            with contextlib.suppress(OSError):
                untouched_s = time.time() - file.stat().st_mtime
                if _ASIDE.fullmatch(file.name[-13:]) and untouched_s >= idle_s:
                    file.unlink()

    @retrying
    def delete(self, name: str) -> None:
        """Delete a file, or a directory with all its content, if it exists."""
        if self._guard is not None:
            self._guard()
        path = f"{self.path}/{name}".rstrip("/")
        # Another process may delete it first.
        with (
            _explained(f"delete {self.locate(name)}"),
            contextlib.suppress(FileNotFoundError),
        ):
            kind = self._info(name).type.name
            if kind == "Directory":
                self.filesystem.delete_dir(path)
            elif kind == "File":
                self.filesystem.delete_file(path)

    def prove_writable(self) -> None:
        """Write, read and delete a test file; raise ConfigError if that fails."""
        name = f".writable.{uuid.uuid4().hex[:8]}.tmp"
        try:
            self.write(name, b"paceline")
            self.read(name)
            self.delete(name)
        except StorageError as error:
            rule = f"cannot be written ({error})"
            fix = "give a place that this user may write to"
            if disk_is_full(error):
                fix = "free space there or raise the quota, or give another place"
            raise _refused(self.uri, rule, fix) from error

    def _info(self, name: str) -> Any:
        return self.filesystem.get_file_info(f"{self.path}/{name}".rstrip("/"))


def _with_single_puts(uri: str) -> str:
    """Return the URI with an option to write a small S3 object in one request."""
    if not uri.startswith("s3://") or f"{_SINGLE_PUTS}=" in uri:
        return uri
    joint = "&" if "?" in uri else "?"
    return f"{uri}{joint}{_SINGLE_PUTS}=true"


@contextlib.contextmanager
def _explained(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"could not {action}: {first_line(error)}"
        ) from error


def parse_json(data: bytes, kind: type[T]) -> T:
    """Parse JSON as `kind`; raises CheckpointError."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"it is not JSON ({first_line(error)})"
        ) from None
    return validated(tree, kind)


def validated(value: Any, kind: type[T]) -> T:
    """Convert plain data to `kind`; CheckpointError names the first invalid part."""
    try:
        found: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, problem["loc"])) or "it"
        words = problem["msg"]
        words = words[:1].lower() + words[1:]
        raise CheckpointError(f"{where[:80]!r}: {words}") from None
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
