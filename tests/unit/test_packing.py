"""Packed sequences: each once, none too long, and a language model trains on them as on the sequences alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.unit.test_loop import Context, Power, assert_same_run, config
from trainers import PackedDataset, segment_mask
from trainers.data.packing import pack
from trainers.errors import ConfigError
from trainers.loop.fit import fit
from trainers.task import Task

ROW, WORDS, WIDTH = 16, 11, 8
LENGTHS = [random.Random(5).randint(2, ROW) for _ in range(40)]
SEQUENCES = [torch.randint(1, WORDS, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_in_one_row_that_holds_it(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.randint(1, 100) for _ in range(chance.randint(1, 400))]
    rows = pack(lengths, 100)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert max(filled) <= 100
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 100) + 4  # decreasing best fit, beside what no packing beats


@pytest.mark.parametrize("length", [0, 17])
def test_a_sequence_that_no_row_holds_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="sequence 1 ") as raised:
        pack([3, length], 16)
    assert "must be 1 to 16" in str(raised.value)


def test_a_row_says_what_is_where() -> None:
    row = PackedDataset([torch.tensor([7, 8]), torch.tensor([4, 5, 6])], [2, 3], row_length=7, padding=-1)[0]
    assert {name: part.tolist() for name, part in row.items()} == {
        "tokens": [4, 5, 6, 7, 8, -1, -1],
        "segments": [1, 1, 1, 2, 2, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0],
    }
    mask = segment_mask(row["segments"][None])
    assert mask.shape == (1, 1, 7, 7)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert segment_mask(row["segments"][None], causal=False)[0, 0].int().sum() == 9 + 4 + 4


class Attention(nn.Module):
    """One layer of a language model, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(ROW, WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, tokens: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        q, k, v = (part[:, None] for part in self.mixed(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, segment_mask(segments))
        logits: Tensor = self.out(x + attended[:, 0])
        return logits


class Packed(Task):
    """Predicts the next token of its own sequence; the loss is a mean over targets."""

    def model(self) -> nn.Module:
        return Attention()

    def dataset(self, split: str) -> Dataset[Any]:
        return PackedDataset(SEQUENCES, LENGTHS, ROW)

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        follows = (batch["segments"][:, 1:] == batch["segments"][:, :-1]) & (batch["segments"][:, 1:] > 0)
        return batch["tokens"][:, 1:].where(follows, -100)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        summed = F.cross_entropy(outputs[:, :-1].flatten(0, 1), self.targets(batch).flatten(), reduction="sum")
        return summed / self.weight(batch).clamp(min=1)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.targets(batch) != -100).sum().double()


def plain(steps: int) -> list[float]:
    """The same rows, a sequence at a time without packing or mask, in a loop of torch's own."""
    torch.manual_seed(3)
    model, rows, losses = Attention(), pack(LENGTHS, ROW), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for number in [number for row in rows[4 * step : 4 * step + 4] for number in row]:
            tokens = SEQUENCES[number][None]
            logits = model(tokens, torch.ones_like(tokens), torch.arange(tokens.shape[1])[None])
            total = total + F.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")
            count += tokens.shape[1] - 1
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    return losses


OF_PLAIN = {
    "global_batch_size": 4,
    "max_steps": 5,
    "data": {"shuffle": False},
    "optimizer": {"name": "sgd", "lr": 0.3},
    "lr_schedule": {"name": "constant"},
    "clip_grad_norm": None,
}


@pytest.mark.parametrize("microbatch", [1, 3, 4])
def test_a_packed_language_model_trains_as_on_the_sequences_alone(microbatch: int, tmp_path: Path) -> None:
    assert len(pack(LENGTHS, ROW)) >= 20
    settings = config(**OF_PLAIN, microbatch_size=microbatch)
    context = Context(tmp_path)
    fit(Packed(), settings, context)
    ours = [row["train_loss"] for row, checkpoint in context.reports if checkpoint]
    assert ours == pytest.approx(plain(5), rel=1e-12)


def test_it_resumes_bit_equal(tmp_path: Path) -> None:
    settings = config(epochs=2, global_batch_size=6, microbatch_size=2)
    fit(Packed(), settings, Context(tmp_path / "whole"))
    with pytest.raises(Power):
        fit(Packed(), settings, Context(tmp_path / "cut", cut_at_step=5))
    fit(Packed(), settings, Context(tmp_path / "cut"))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
