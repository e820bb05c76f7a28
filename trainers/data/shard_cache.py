"""Local copies of shards: bounded, shared by the processes of a node, and fetched ahead by threads of the worker.

Loader processes find their shards here, held for them by the worker that asks them for batches: the client of an object
store does not survive a fork. A lock on a copy's own file keeps it while a process holds it, and ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainers.data.arrow_files import own_directory
from trainers.data.batch import Rows
from trainers.data.shard_formats import make_local, needs_no_copy
from trainers.data.shard_listing import ShardFile
from trainers.errors import ShardError, StorageError
from trainers.storage import retrying

logger = logging.getLogger(__name__)

_THREADS = 4
_AHEAD = 64  # shards that may be on their way
_FREE_SHARE = 0.5  # of what is free on the cache's disk


class ShardCache:
    """Copies of a list of shards, in the form in which samples are read from them."""

    def __init__(
        self, files: Sequence[ShardFile], directory: Path | None, limit_bytes: int | None, check: Callable[[int], None]
    ) -> None:
        """`limit_bytes`: of all files in `directory`; None: half of what is free on its disk now. `check` looks at a
        shard that is here, and raises ShardError; in a thread where it was fetched ahead.
        """
        self._files, self._check = files, check
        self._directory = directory or own_directory("paceline-shards")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._limit_bytes = limit_bytes or int(_FREE_SHARE * shutil.disk_usage(self._directory).free)
        self._fetching: dict[int, Future[None]] = {}
        self._held: dict[int, tuple[int, int]] = {}  # how often, and the descriptor that has the lock
        self._pool: ThreadPoolExecutor | None = None
        self._checked: set[int] = set()
        self._in_place: dict[int, bool] = {}
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fetching": {}, "_held": {}, "_pool": None}  # another process only reads

    def path(self, shard: int) -> Path:
        """Where a shard is read from, once it is held."""
        file = self._files[shard]
        return file.path if self._is_in_place(shard) else self._directory / f"{file.key}.shard"

    def index(self, shard: int) -> Rows | None:
        """What was found in a shard before (see `keep_index`); None where nothing was kept."""
        try:
            return np.asarray(np.load(self._index_path(shard), allow_pickle=False))
        except (OSError, ValueError, EOFError, SystemError):  # threads that parse at once (cpython 106905)
            return None

    def keep_index(self, shard: int, index: Rows) -> None:
        """Keep for all processes of the node, and later ones, what opening a shard has found."""
        aside = self._aside(self._index_path(shard))
        with contextlib.suppress(OSError):  # it is found anew where it cannot be kept
            try:
                with aside.open("wb") as stream:
                    np.save(stream, index, allow_pickle=False)
                aside.replace(self._index_path(shard))
            finally:
                aside.unlink(missing_ok=True)

    def request(self, shard: int) -> bool:
        """Begin to fetch a shard that will be held soon, and to check it; return whether more may be asked for."""
        self._fetching = {number: one for number, one in self._fetching.items() if not one.done() or one.exception()}
        if len(self._fetching) >= _AHEAD:
            return False
        if shard not in self._fetching and shard not in self._held:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "paceline-shards")
            self._fetching[shard] = self._pool.submit(self._fetch_ahead, shard)
        return True

    def hold(self, shard: int) -> None:
        """Wait until a shard is here, and keep it here until `release` is called as often.

        Raises ShardError for one that is missing or damaged, StorageError for storage or a disk that fails.
        """
        times, descriptor = self._held.get(shard, (0, -1))
        if times == 0:
            if (fetching := self._fetching.pop(shard, None)) is not None:
                fetching.result()
            descriptor = -1 if self._is_in_place(shard) else self._locked(shard)
            try:
                self._check_once(shard)
            except BaseException:
                _unlock(descriptor)
                raise
        self._held[shard] = (times + 1, descriptor)

    def release(self, shard: int) -> None:
        """Let go of a shard that was held: its copy may be deleted for another one."""
        if shard not in self._held:
            return
        times, descriptor = self._held.pop(shard)
        if times > 1:
            self._held[shard] = (times - 1, descriptor)
        else:
            _unlock(descriptor)

    def close(self) -> None:
        """Let go of all shards, and fetch no more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._fetching.clear()
        for _, descriptor in self._held.values():
            _unlock(descriptor)
        self._held.clear()

    def _locked(self, shard: int) -> int:
        """Return a descriptor with a shared lock of the copy, which is fetched if need be."""
        path = self.path(shard)
        while True:
            if not path.exists() and (fetched := self._fetch(shard, is_needed=True)) >= 0:
                return fetched
            with contextlib.suppress(FileNotFoundError):  # deleted in between
                descriptor = os.open(path, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if _is_at(descriptor, path):
                    os.utime(path)  # what was used longest ago is deleted first
                    return descriptor
                _unlock(descriptor)

    def _fetch_ahead(self, shard: int) -> None:
        if not self._is_in_place(shard) and not self.path(shard).exists():
            _unlock(self._fetch(shard, is_needed=False))
        if self.path(shard).exists():
            self._check_once(shard)

    def _check_once(self, shard: int) -> None:
        if shard not in self._checked:
            try:
                self._check(shard)
            except FileNotFoundError as error:
                raise ShardError(f"{self._files[shard].name} is missing") from error
            self._checked.add(shard)

    @retrying
    def _fetch(self, shard: int, is_needed: bool) -> int:
        """Copy a shard here; return a descriptor with a shared lock of it, or -1 where it was here, or has no room. One
        process of the node does it, the others wait.

        Others may have found the same room, and a copy be larger than the shard (compressed): what is too much is
        deleted once it is here.
        """
        file, path = self._files[shard], self.path(shard)
        if not self._make_room(file.size_bytes, is_needed):
            return -1
        lock = path.with_suffix(".lock")
        with lock.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if path.exists():
                return -1
            aside = self._aside(path)
            try:
                with file.directory.reader(file.file, most_bytes=sys.maxsize) as source:
                    make_local(source, file.name, aside)
                descriptor = os.open(aside, os.O_RDONLY)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                aside.replace(path)
                self._make_room(0, is_needed=False)
                return descriptor
            except StorageError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    raise ShardError(f"{file.name} is missing") from error
                if getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                    rule = f"{self._directory}, the cache of shards, is full"
                    raise StorageError(f"{rule}: give `cache=` a directory with room") from error.__cause__
                raise
            finally:
                aside.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int, is_needed: bool) -> bool:
        """Delete copies that nobody holds, those used longest ago first, until there is room; return whether there is.

        What is needed at once is copied even where all others are held.
        """
        found = []
        for entry in os.scandir(self._directory):
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime, entry.stat().st_size, Path(entry.path)))
        excess = sum(size for _, size, _ in found) + size_bytes - self._limit_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return True
            if path.suffix in (".shard", ".npy") and _deleted(path):
                excess -= size
        if excess > 0 and is_needed and not self._has_warned:
            self._has_warned = True
            words = "the shards that one batch needs take more than the %.1f GB that %s may have: raise `cache_bytes`"
            logger.warning(words, self._limit_bytes / 1e9, self._directory)
        return excess <= 0 or is_needed

    def _is_in_place(self, shard: int) -> bool:
        """Whether a shard is read where it is stored."""
        if shard not in self._in_place:
            file = self._files[shard]
            self._in_place[shard] = file.directory.is_local and needs_no_copy(file.path)
        return self._in_place[shard]

    def _index_path(self, shard: int) -> Path:
        return self._directory / f"{self._files[shard].key}.npy"

    def _aside(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def _deleted(path: Path) -> bool:
    """Delete a file unless a process holds it; return whether it is gone."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _is_at(stream.fileno(), path):  # else another has deleted it, and what is there now may be held
            path.unlink()
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    return False


def _unlock(descriptor: int) -> None:
    """Let go of a lock; there is none (-1) where a shard is read in place."""
    if descriptor < 0:
        return
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # said, since a loader process has the same open file
    os.close(descriptor)
