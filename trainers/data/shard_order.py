"""The order of samples that lie in shards: index arithmetic, so that any place of an epoch is found at once.

The shards of an epoch are shuffled and laid one after another; that sequence is cut into `interleave` pieces of one
length, which are read side by side, and within a piece each `buffer` samples are shuffled. All of it follows from the
seed, the epoch and the sizes of the shards. A step's samples are sorted by piece, so that each rank reads from few.
"""

import hashlib
import itertools
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from trainers.data.batch import Rows

_NAMED = 1024  # rows of an epoch that are part of its order's name


class ShardOrder:
    """The rows of each epoch by their places in it. Rows are numbered through all shards as they are listed."""

    def __init__(self, sizes: Rows, seed: int, interleave: int, buffer: int) -> None:
        """`sizes`: int64 [shards], samples of each."""
        self._sizes, self._seed, self._buffer = sizes, seed, buffer
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.length = int(self._starts[-1])
        self._pieces = max(1, min(interleave, self.length))
        whole, rest = divmod(self.length, self._pieces)
        self._lengths = whole + (np.arange(self._pieces) < rest)
        self._piece_starts = np.concatenate([[0], np.cumsum(self._lengths)])[:-1]
        self._epoch = -1
        self._shards = self._ends = np.zeros(0, np.int64)
        self._blocks: OrderedDict[tuple[int, int], Rows] = OrderedDict()

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """int64 [stop - start]: what stands at those places of an epoch, sorted by piece."""
        self._begin(epoch)
        places = np.arange(start, min(stop, self.length))
        within, piece = np.divmod(places, self._pieces)
        by_piece = np.argsort(piece, kind="stable")
        piece, within = piece[by_piece], within[by_piece]
        block, inside = np.divmod(within, self._buffer)
        shuffled = np.empty_like(places)
        for first, last in _runs(piece, block):
            permutation = self._block(int(piece[first]), int(block[first]))
            shuffled[first:last] = block[first] * self._buffer + permutation[inside[first:last]]
        place = self._piece_starts[piece] + shuffled
        number = np.searchsorted(self._ends, place, "right")
        shard = self._shards[number]
        return torch.from_numpy(self._starts[shard] + place - self._ends[number] + self._sizes[shard])

    def name(self, epoch: int) -> str:
        """What tells this order from another one: of other shards, another seed, another version of the generator."""
        found = hashlib.blake2b(self._sizes.tobytes(), digest_size=8)
        found.update(self.rows(epoch, 0, _NAMED).numpy().tobytes())
        return f"shards {found.hexdigest()}"

    def _begin(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._shards = self._generator(0).permutation(len(self._sizes))
            self._ends = np.cumsum(self._sizes[self._shards])
            self._blocks.clear()

    def _block(self, piece: int, block: int) -> Rows:
        """The permutation of one block of a piece; those in use are kept."""
        key = (piece, block)
        if key not in self._blocks:
            size = min(self._buffer, int(self._lengths[piece]) - block * self._buffer)
            self._blocks[key] = self._generator(1, piece, block).permutation(size)
            while len(self._blocks) > 2 * self._pieces + 2:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _generator(self, *of: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, self._epoch, *of])


def _runs(piece: Rows, block: Rows) -> list[tuple[int, int]]:
    """From where to where both stay the same."""
    changes = np.flatnonzero((np.diff(piece) != 0) | (np.diff(block) != 0)) + 1
    edges = [0, *changes.tolist(), len(piece)]
    return [(first, last) for first, last in itertools.pairwise(edges) if first < last]
