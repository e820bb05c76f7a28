"""Reads samples of shards by their rows: counts them, has their shards fetched ahead, and stands in for bad ones."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainers.data.batch import Rows
from trainers.data.shard_cache import ShardCache
from trainers.data.shard_files import Shard
from trainers.data.shard_formats import count, open_shard
from trainers.data.shard_listing import ShardFile, counts_beside
from trainers.errors import ShardError
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_OPEN = 64  # shards that a process has open at once
_THREADS = 8
_TRIES = 100  # samples in a row that may be bad where they are skipped
_LOOK_AHEAD = 256  # batches
_BAD = -1  # in place of the size of a shard that is left out
_NAMED = 10  # bad samples that are named


class ShardReader:
    """What reads the samples of Shards: no dataset, so that throw-away passes leave alone what it has open.

    Rows are numbered through all shards as they are listed. Raises as Shards does.
    """

    def __init__(
        self,
        files: list[ShardFile],
        decode: Callable[[dict[str, Any]], Any] | None,
        cache: Path | None,
        cache_bytes: int | None,
    ) -> None:
        self._files, self._decode, self.skip_bad = files, decode, False
        self._cache, self._pid = ShardCache(files, cache, cache_bytes, self.check), os.getpid()
        self._sizes: Rows | None = None
        self._starts = np.zeros(1, np.int64)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._held: deque[list[int]] = deque()
        self._skipped: list[str] = []
        self.num_skipped = 0
        self._bad: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict(), "_held": deque()}  # another process opens shards itself

    @property
    def sizes(self) -> Rows:
        """int64 [shards]."""
        if self._sizes is None:
            self.set_sizes(self.counted(None, lambda: None))
        assert self._sizes is not None
        return self._sizes

    @property
    def length(self) -> int:
        """Samples of all shards."""
        return int(self.sizes.sum())

    def set_sizes(self, sizes: Rows | None) -> None:
        """Take the samples of each shard, as `counted` gave them on rank 0."""
        assert sizes is not None
        self.num_skipped = int((sizes == _BAD).sum())
        self._sizes = sizes.clip(0)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])

    def counted(self, storage: Storage | None, beat: Callable[[], None]) -> Rows:
        """Return the samples of each shard: as it was kept, by metadata, or by reading each shard."""
        found = hashlib.sha256("".join(file.key for file in self._files).encode()).hexdigest()[:16]
        name = f"shards-{found}{'-good' if self.skip_bad else ''}.json"
        if storage is not None and storage.exists(name):
            kept: list[int] = storage.read_json(name, list[int])
            if len(kept) == len(self._files):
                return np.asarray(kept, np.int64)
        known = counts_beside(self._files)
        with ThreadPoolExecutor(_THREADS) as pool:
            sizes = []
            for number, size in enumerate(pool.map(lambda shard: self._count(shard, known), range(len(self._files)))):
                beat()
                sizes.append(size)
                if number % 1000 == 999:
                    logger.info("counted the samples of %d of %d shards", number + 1, len(self._files))
        if storage is not None:
            storage.write(name, json.dumps(sizes).encode())
        return np.asarray(sizes, np.int64)

    def _count(self, shard: int, known: dict[str, int]) -> int:
        file = self._files[shard]
        try:
            if (size := known.get(file.name)) is None:
                size = count(file.storage)
            if size is None:
                self._cache.hold(shard)
                try:
                    with contextlib.closing(self._opened(shard)) as opened:
                        size = len(opened)
                finally:
                    self._cache.release(shard)
            return size
        except ShardError as error:
            if not self.skip_bad:
                raise
            logger.warning("%s: it is left out", error)
            return _BAD

    def _opened(self, shard: int) -> Shard:
        index = self._cache.index(shard)
        opened = open_shard(self._cache.path(shard), self._files[shard].name, index)
        if index is None and opened.index is not None:
            self._cache.keep_index(shard, opened.index)
        return opened

    def read(self, rows: Rows) -> list[Any]:
        """Return the samples of some rows."""
        rows, held = self._placed(rows) if os.getpid() == self._pid else (rows, [])  # a loader's process has them held
        owners = np.searchsorted(self._starts, rows, "right") - 1
        samples: list[Any] = [None] * len(rows)
        try:
            for shard in np.unique(owners).tolist():
                at = np.flatnonzero(owners == shard)
                taken = self._take(shard, (rows[at] - self._starts[shard]).tolist())
                for position, sample in zip(at.tolist(), taken, strict=True):
                    samples[position] = sample
        finally:
            self._let_go(held)
        return samples

    def check(self, shard: int) -> None:
        """Raise ShardError for a shard that cannot be read, or is not as it was counted."""
        with contextlib.closing(self._opened(shard)) as opened:
            if self._sizes is not None and len(opened) != self._sizes[shard]:
                words = f"has {len(opened)} samples, and had {self._sizes[shard]} when they were counted"
                raise ShardError(f"{self._files[shard].name} {words}")

    def _take(self, shard: int, rows: list[int]) -> list[Any]:
        opened = self._open.pop(shard, None) or self._opened(shard)
        self._open[shard] = opened
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)[1].close()
        if not self.skip_bad:
            return self._decoded(shard, rows, opened.take(rows))
        return [self._good(shard, row, opened) for row in rows]

    def _decoded(self, shard: int, rows: list[int], samples: list[dict[str, Any]]) -> list[Any]:
        if self._decode is None:
            return samples
        decoded = []
        for row, sample in zip(rows, samples, strict=True):
            try:
                decoded.append(self._decode(sample))
            except Exception as error:
                error.add_note(f"in decode() of sample {row} of {self._files[shard].name}")
                raise
        return decoded

    def _good(self, shard: int, row: int, opened: Shard) -> Any:
        """Return a sample, or the next good one of its shard in its place."""
        size = int(self.sizes[shard])
        for other in itertools.islice(itertools.chain(range(row, size), range(row)), _TRIES):
            try:
                return self._decoded(shard, [other], opened.take([other]))[0]
            except MemoryError:  # says nothing of the sample
                raise
            except Exception as error:
                last = error
                self._skipped.append(f"sample {other} of {self._files[shard].name} ({type(error).__name__}: {error})")
        raise last

    def held(self, batches: Iterable[Rows]) -> Iterator[Rows]:
        """Yield the rows of each batch once their shards are here."""
        source, coming = iter(batches), deque[Rows]()
        asked: OrderedDict[int, int] = OrderedDict()  # shards of the coming batches, and in how many of them
        wanted: deque[int] = deque()  # those that are not requested yet
        while True:
            for rows in itertools.islice(source, _LOOK_AHEAD - len(coming)):
                coming.append(rows)
                for shard in self._shards_of(rows):
                    if shard not in asked:
                        wanted.append(shard)
                    asked[shard] = asked.get(shard, 0) + 1
            while wanted and self._cache.request(wanted[0]):
                wanted.popleft()
            if not coming:
                return
            rows = coming.popleft()
            for shard in self._shards_of(rows):
                asked[shard] -= 1
                if not asked[shard]:
                    del asked[shard]
            placed, held = self._placed(rows)
            self._held.append(held)
            yield placed

    def release(self) -> None:
        """Let go of the shards of the oldest batch, but not of the only one: the next needs nearly the same."""
        if len(self._held) > 1:
            self._let_go(self._held.popleft())

    def _let_go(self, held: list[int]) -> None:
        for shard in held:
            self._cache.release(shard)

    def _shards_of(self, rows: Rows) -> list[int]:
        shards: list[int] = np.unique(np.searchsorted(self._starts, rows, "right") - 1).tolist()
        return shards

    def _placed(self, rows: Rows) -> tuple[Rows, list[int]]:
        """Hold the shards of some rows and return the rows, in place of a bad shard's those of the next good one, and
        what is held.
        """
        held: list[int] = []
        try:
            for shard in self._shards_of(rows):
                other = self._hold_good(shard)
                held.append(other)
                if other != shard:
                    rows = rows.copy()
                    at = (rows >= self._starts[shard]) & (rows < self._starts[shard + 1])
                    rows[at] = self._starts[other] + (rows[at] - self._starts[shard]) % self.sizes[other]
        except BaseException:
            self._let_go(held)
            raise
        return rows, held

    def _hold_good(self, shard: int) -> int:
        """Hold a shard, or the first good one that follows where bad ones are skipped; return which."""
        for other in itertools.chain(range(shard, len(self._files)), range(shard)):
            if other in self._bad or not self.sizes[other]:
                continue
            try:
                self._cache.hold(other)
            except ShardError as error:
                if not self.skip_bad:
                    raise
                self._bad.add(other)
                self._skipped.append(str(error))
            else:
                return other
        raise ShardError(f"all {len(self._files)} shards are damaged or missing")

    def take_skipped(self) -> list[str]:
        """Return what was skipped in this process since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def count_skipped(self, skipped: list[str]) -> None:
        """Count what was skipped, and name the first ones."""
        for words in skipped[: max(0, _NAMED - self.num_skipped)]:
            logger.warning("skipped: %s", words)
        self.num_skipped += len(skipped)

    def close(self) -> None:
        """Let go of all shards."""
        self._held.clear()
        self._cache.close()
        while self._open:
            self._open.popitem()[1].close()
