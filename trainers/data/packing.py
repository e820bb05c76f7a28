"""Sequences of different lengths in rows of one length, without padding between them.

    packed = PackedDataset(sequences, lengths, row_length=1024)
    packed[0]     # {"tokens": [L], "segments": [L], "positions": [L]}: stacked to [B, L] as ever

Every sequence is in exactly one row. A model must not look from one into another: `segment_mask` gives the mask for
torch's scaled_dot_product_attention, `positions` begin anew in each. `Task.weight` then counts what `Task.loss` divides
by, the tokens that have a target.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainers.errors import ConfigError


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of `row_length` tokens, each of whole sequences of a map-style dataset.

    `sequences[i]` is a tensor [n] of `lengths[i]` tokens. The sequences of a row are its segments 1, 2, ...; `padding`
    fills the rest, segment 0. Raises ConfigError for a sequence that no row holds.
    """

    def __init__(self, sequences: Any, lengths: Sequence[int] | Tensor, row_length: int, padding: int = 0) -> None:
        self._sequences, self._row_length, self._padding = sequences, row_length, padding
        self._rows = pack(torch.as_tensor(lengths).tolist(), row_length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one row: tokens, int64 segments and int64 positions, [row_length] each."""
        parts = [torch.as_tensor(self._sequences[number]) for number in self._rows[index]]
        tokens = parts[0].new_full((self._row_length,), self._padding)
        segments, positions = torch.zeros(2, self._row_length, dtype=torch.int64)
        end = 0
        for number, part in enumerate(parts, 1):
            at = slice(end, end + len(part))
            tokens[at], segments[at], positions[at] = part, number, torch.arange(len(part))
            end += len(part)
        return {"tokens": tokens, "segments": segments, "positions": positions}


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the numbers of the sequences in each row: the longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of a row, and its number; sorted
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[number]
        if not 0 < length <= row_length:
            rule = f"must be 1 to {row_length} for sequence {number} to fit into a row"
            raise ConfigError("lengths", length, rule, "leave it out, cut it, or make rows longer")
        at = bisect_left(room, (length, -1))
        left, row = room.pop(at) if at < len(room) else (row_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if left > length:
            insort(room, (left - length, row))
    return rows


def segment_mask(segments: Tensor, causal: bool = True) -> Tensor:
    """Bool [B, 1, L, L]: whether a position (first L) may look at another, one of its own segment and, if `causal`, not
    after it.

    Padding looks at padding, for attention over nothing is NaN.
    """
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    return mask.tril() if causal else mask
