"""Hugging Face `datasets` in streaming mode, beside a plain loop over the same stream; resumed to the bit."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from tests.unit.test_loop import assert_same_run, train
from tests.unit.test_recipes import BATCH, SEED, SETTINGS, curve

ROWS, STEPS = 33, 14  # two passes and a half
datasets = pytest.importorskip("datasets")

from trainers.task import Task  # noqa: E402


def tokens(sample: dict[str, Any]) -> dict[str, Any]:
    codes = [ord(letter) - 96 for letter in sample["text"]]
    return {"tokens": codes + [0] * (8 - len(codes)), "label": sample["label"]}


class Words(Task):
    """Which letter a word ends in."""

    def __init__(self, directory: str, shuffle: bool) -> None:
        self.directory, self.shuffle = Path(directory), shuffle

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(27, 6), nn.Flatten(), nn.Linear(48, 3)).double()

    def stream(self, split: str) -> Any:
        files = [str(self.directory / f"{split}-{number}.jsonl") for number in range(2)]
        cache = str(self.directory / "cache")
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)
        if self.shuffle and split == "train":
            stream = stream.shuffle(seed=SEED, buffer_size=8)
        return stream.map(tokens, remove_columns=["text"])

    def collate(self, samples: list[Any]) -> Any:
        return {name: torch.tensor([sample[name] for sample in samples]) for name in ("tokens", "label")}

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["tokens"])  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch["label"])


@pytest.fixture
def directory(tmp_path: Path) -> str:
    draw = torch.Generator().manual_seed(0)
    for split, number in itertools.product(("train", "val"), (0, 1)):
        lines = []
        for _ in range(ROWS // 2 + number):
            text = "".join(chr(97 + int(code)) for code in torch.randint(26, (5,), generator=draw))
            lines.append(json.dumps({"text": text, "label": ord(text[-1]) % 3}) + "\n")
        (tmp_path / f"{split}-{number}.jsonl").write_text("".join(lines))
    return str(tmp_path)


def plain(task: Words) -> list[float]:
    """A loop as the library's documentation has it, pass after pass."""
    torch.manual_seed(SEED)
    model, stream, losses = task.model(), task.stream("train"), []
    optimizer = SGD(model.parameters(), 0.2)

    def samples() -> Any:
        for epoch in itertools.count():
            stream.set_epoch(epoch)
            yield from stream

    passes = samples()
    for _ in range(STEPS):
        batch = task.collate(list(itertools.islice(passes, BATCH)))
        loss = F.cross_entropy(model(batch["tokens"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_it_trains_as_a_plain_loop_does(directory: str, tmp_path: Path, shuffle: bool, workers: int) -> None:
    task = Words(directory, shuffle)
    losses = curve(task, tmp_path / "run", 4, epochs=None, max_steps=STEPS, data={"num_workers": workers})
    assert losses == pytest.approx(plain(task), rel=1e-12)


@pytest.mark.parametrize("shuffle", [False, True])
def test_cut_and_resumed_it_goes_on_to_the_bit(
    directory: str, tmp_path: Path, shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = SETTINGS | {"epochs": None, "evaluate": {"every_steps": 5}}
    train(tmp_path / "whole", Words(directory, shuffle), **settings, max_steps=STEPS)
    for last in (5, 10, STEPS):
        train(tmp_path / "parts", Words(directory, shuffle), **settings, max_steps=last)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert ("loads its own state_dict" in caplog.text) is not shuffle, "its shuffle buffer is in no state"
