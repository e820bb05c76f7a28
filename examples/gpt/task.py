"""A character language model in plain PyTorch.

The data are lines of text as bytes, the model is a small GPT, and the loss is
a mean over tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from examples.gpt.text import draw_lines
from trainers.errors import ConfigError
from trainers.task import Task

_PADDING = 0
_NEWLINE = 10
_VALIDATION_SEED = 1
_VALIDATION_SHARE = 0.1


class Block(nn.Module):
    """Attention and an MLP over B sequences [B, T, D], each on a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return the new states [B, T, D]."""
        split = self.projections(self.attention_norm(states)).unflatten(
            2, (3, self.heads, -1)
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        states = states + self.merge(mixed.transpose(1, 2).flatten(2))
        return states + self.mlp(self.mlp_norm(states))


class Gpt(nn.Module):
    """A small GPT: bytes [B, T] to logits [B, T, 256] of the byte after each byte.

    Input and output share an embedding.
    """

    def __init__(
        self, context: int, width: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, T, 256].

        Padding comes after a line, so the logits of the line do not depend on it.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.norm(
            self.blocks(self.bytes(tokens) + self.positions(places))
        )
        return F.linear(states, self.bytes.weight)


class CharacterModel(Task):
    """Predict every byte of a line of text, and its newline, from the bytes before.

    `text`: a file on every node; the last tenth of the file's lines is the
    validation split. The default is `lines` training lines that
    examples/gpt/text.py draws, and a tenth as many for validation. Lines longer than
    `context` bytes are cut into pieces. `packed`: cut the whole text into rows
    of `context` bytes without padding, so that a context can span many lines.
    """

    def __init__(
        self,
        text: str | None = None,
        lines: int = 20_000,
        context: int = 80,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        packed: bool = False,
    ) -> None:
        self.text = text
        self.lines = lines
        self.context = context
        self.packed = packed
        self.width = width
        self.heads = heads
        self.layers = layers

    def model(self) -> nn.Module:
        """Return a GPT."""
        return Gpt(self.context, self.width, self.heads, self.layers)

    def dataset(self, split: str) -> TensorDataset:
        """Return rows uint8 [N, context + 1]: a newline, a line, a newline, and padding.

        Packed rows contain only text; each row begins with the last byte of
        the row before.
        """
        held_out = max(1, int(self.lines * _VALIDATION_SHARE))
        if self.text is None:
            lines = (
                draw_lines(held_out, _VALIDATION_SEED)
                if split == "val"
                else draw_lines(self.lines, 0)
            )
        else:
            file = Path(self.text).expanduser()
            if not file.is_file():
                raise ConfigError(
                    "task_args.text",
                    self.text,
                    "does not exist",
                    "name a text file",
                )
            lines = [
                line
                for line in file.read_text(encoding="utf-8").splitlines()
                if line
            ]
            held_out = max(1, int(len(lines) * _VALIDATION_SHARE))
            lines = lines[-held_out:] if split == "val" else lines[:-held_out]
        if self.packed:
            text = torch.frombuffer(
                bytearray("\n".join(["", *lines, ""]).encode()),
                dtype=torch.uint8,
            )
            short = max(0, self.context + 1 - len(text))
            return TensorDataset(
                F.pad(text, (0, short))
                .unfold(0, self.context + 1, self.context)
                .contiguous()
            )
        pieces = [
            piece
            for line in lines
            for piece in self._pieces(line.encode() + b"\n")
        ]
        rows = torch.full(
            (len(pieces), self.context + 1), _PADDING, dtype=torch.uint8
        )
        rows[:, 0] = _NEWLINE
        for row, piece in zip(rows, pieces, strict=True):
            row[1 : 1 + len(piece)] = torch.frombuffer(
                bytearray(piece), dtype=torch.uint8
            )
        return TensorDataset(rows)

    def _pieces(self, line: bytes) -> list[bytes]:
        return [
            line[first : first + self.context]
            for first in range(0, len(line), self.context)
        ]

    def transform(self, batch: Any, training: bool) -> Any:
        """Return tokens [B, T] and the tokens that follow them [B, T], as int64."""
        rows = batch[0].long()
        return rows[:, :-1], rows[:, 1:]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        """Return the cross entropy, nats, as the mean over all tokens except padding."""
        summed = F.cross_entropy(
            outputs.flatten(0, 1),
            batch[1].flatten(),
            ignore_index=_PADDING,
            reduction="sum",
        )
        return summed / self.weight(batch).clamp(
            min=1
        )  # a batch of empty lines has no token

    def weight(self, batch: Any) -> Tensor:
        """Return the number of tokens without padding.

        Lines differ in length, so microbatches and workers are weighted by
        their tokens.
        """
        return (batch[1] != _PADDING).sum()

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        """Return the share of bytes that were predicted right, one value per sample."""
        counted = batch[1] != _PADDING
        right = (outputs.argmax(2) == batch[1]) & counted
        return {"accuracy": right.sum(1) / counted.sum(1).clamp(min=1)}

    def predictions(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        """Return the most likely byte at every position [B, T]."""
        return {"next_byte": outputs.argmax(2)}
