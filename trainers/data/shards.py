"""Shards on any filesystem that pyarrow.fs knows, as one dataset whose samples are found by index arithmetic.

    Shards("s3://bucket/train/{000000..000999}.tar", decode=to_tensors)

WebDataset tars, JSON lines, Parquet and Arrow files, MDS; each sample is a dict. A step reads the samples of a few
shards only (trainers/data/shard_order.py), which are fetched ahead into a bounded cache of the node
(trainers/data/shard_reader.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainers.data.batch import Rows
from trainers.data.fed_dataset import FedDataset
from trainers.data.shard_listing import list_shards
from trainers.data.shard_order import ShardOrder
from trainers.data.shard_reader import ShardReader
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.storage import Storage


class Shards(FedDataset):
    """Samples in shards: map-style, and read by the loop in an order that needs few shards at a time.

    `files`: paths, URIs, globs, directories, or WebDataset's numbered braces. `decode`: one sample's dict to what
    `Task.collate` takes; must be picklable for loader processes that are not forked.
    `interleave`: places of an epoch's shards that are read side by side, best a multiple of the nodes, each of which
    then fetches shards of its own; `shuffle_buffer`: samples that are shuffled together at each of them.
    `cache`: directory of this node for copies of shards, `cache_bytes` what it may hold (None: half of what is free).

    The number of samples comes from metadata (Parquet, Arrow, the `index.json` of MDS and WebDataset) or from reading
    each shard once, which is kept with the run. Raises ConfigError for what is not there, ShardError for a damaged
    shard, SampleError for a damaged sample, StorageError for storage that fails.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        *,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        interleave: int = 8,
        shuffle_buffer: int = 10_000,
        cache: str | Path | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        for name, value in (("interleave", interleave), ("shuffle_buffer", shuffle_buffer)):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1", f"leave `{name}` out")
        self._interleave, self._buffer = interleave, shuffle_buffer
        self._reader = ShardReader(list_shards(files), decode, Path(cache) if cache else None, cache_bytes)

    def prepare(self, group: Group, storage: Storage | None, skip_bad: bool, beat: Callable[[], None]) -> None:
        """Count the samples, or read what was counted before from the run's `storage`. Every rank must call it."""
        self._reader.skip_bad = skip_bad
        sizes = self._reader.counted(storage, beat) if group.rank == 0 else None
        self._reader.set_sizes(group.first(sizes))
        if group.rank:  # what was left out counts once
            self._reader.num_skipped = 0

    def order(self, seed: int) -> ShardOrder:
        """Return the shuffled order of the samples in each epoch."""
        return ShardOrder(self._reader.sizes, seed, self._interleave, self._buffer)

    def __len__(self) -> int:
        return self._reader.length

    def __getitem__(self, row: int) -> Any:
        """Return one sample."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"sample {row} of {len(self)}")
        return self.__getitems__([row % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """Return samples, in the order of their rows."""
        asked, length = np.asarray(rows, np.int64), len(self)
        if asked.size and not 0 <= asked.min() <= asked.max() < length:
            raise IndexError(f"rows {asked.min()} to {asked.max()} of {length}")
        return self._reader.read(asked)

    def held(self, batches: Iterable[Rows]) -> Iterator[Rows]:
        """Yield the same rows once their shards are here, while those of the coming batches are on their way."""
        return self._reader.held(batches)

    def release(self) -> None:
        """Let go of the shards of the oldest batch that is held."""
        self._reader.release()

    def send(self) -> list[str]:
        """Return which samples were skipped in this process since the last call."""
        return self._reader.take_skipped()

    def receive(self, told: list[str]) -> None:
        """Count the samples that were skipped, and name the first ones."""
        self._reader.count_skipped(told)

    @property
    def num_skipped(self) -> int:
        """Samples that were skipped in training; a shard that is bad as a whole counts once."""
        return self._reader.num_skipped

    def close(self) -> None:
        """Let go of all shards."""
        self._reader.close()
