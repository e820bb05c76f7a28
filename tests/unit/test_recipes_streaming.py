"""Hugging Face `datasets` over Parquet, tars and JSON lines, streamed: a plain
loop's curve, also cut and resumed.
"""

import io
import itertools
import json
import logging
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from tests.unit.test_loop import assert_same_run, train
from tests.unit.test_recipes import SEED, SETTINGS, curve, descend

FILES = 3
ROWS = 700
BATCH = 40
STEPS = 40
"""Two passes and more; a state of the stream's own is kept at row 1,000, after
25 steps.
"""
datasets = pytest.importorskip("datasets")

from trainers.task import Task  # noqa: E402


class Words(Task):
    """Which letter a word ends in, decoded in `collate`."""

    def __init__(self, directory, kind, shuffle=False):
        self.directory = directory
        self.kind = kind
        self.shuffle = shuffle

    def model(self):
        return nn.Sequential(
            nn.Embedding(27, 6), nn.Flatten(), nn.Linear(30, 3)
        ).double()

    def stream(self, split):
        files = sorted(map(str, self.directory.glob(f"{split}-*.{self.kind}")))
        reader = {"jsonl": "json", "tar": "webdataset"}.get(
            self.kind, self.kind
        )
        cache = str(self.directory / "cache")
        stream = datasets.load_dataset(
            reader,
            data_files=files,
            split="train",
            streaming=True,
            cache_dir=cache,
        )
        return (
            stream.shuffle(seed=SEED, buffer_size=64)
            if self.shuffle and split == "train"
            else stream
        )

    def collate(self, samples):
        texts = [sample["txt"] for sample in samples]
        tokens = torch.tensor(
            [[ord(letter) - 96 for letter in text] for text in texts]
        )
        return {"tokens": tokens, "label": tokens[:, -1] % 3}

    def forward(self, model, batch):
        return model(batch["tokens"])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["label"])


def write(path, texts):
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"txt": texts}), path, row_group_size=50)
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps({"txt": text}) + "\n" for text in texts)
        )
    else:
        with tarfile.open(path, "w") as file:
            for number, text in enumerate(texts):
                member = tarfile.TarInfo(f"{number:06d}.txt")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("words")
    draw = torch.Generator().manual_seed(0)
    for split, number in itertools.product(("train", "val"), range(FILES)):
        count = ROWS // FILES + number if split == "train" else 7
        codes = torch.randint(26, (count, 5), generator=draw).tolist()
        texts = ["".join(chr(97 + code) for code in row) for row in codes]
        for suffix in ("parquet", "jsonl", "tar"):
            write(made / f"{split}-{number}.{suffix}", texts)
    return made


def plain(task):
    """A loop as the library's documentation has it, pass after pass."""
    torch.manual_seed(SEED)
    model = task.model()
    stream = task.stream("train")
    optimizer = SGD(model.parameters(), 0.2)

    def samples():
        for epoch in itertools.count():
            stream.set_epoch(epoch)
            yield from stream

    passes = samples()
    losses = []
    for _ in range(STEPS):
        batch = task.collate(list(itertools.islice(passes, BATCH)))
        losses.append(
            descend(
                optimizer,
                F.cross_entropy(model(batch["tokens"]), batch["label"]),
            )
        )
    return losses


@pytest.mark.parametrize(
    ("kind", "shuffle"), [("tar", False), ("jsonl", True)]
)
def test_it_trains_as_a_plain_loop_does(directory, tmp_path, kind, shuffle):
    task = Words(directory, kind, shuffle)
    steps = {"epochs": None, "max_steps": STEPS, "global_batch_size": BATCH}
    losses = curve(
        task, tmp_path / "run", 20, **steps, data={"num_workers": 1}
    )
    assert losses == pytest.approx(plain(task), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "shuffle"), [("parquet", False), ("jsonl", True)]
)
def test_cut_and_resumed_it_goes_on_to_the_bit(
    directory, tmp_path, kind, shuffle, caplog
):
    caplog.set_level(logging.INFO)
    settings = SETTINGS | {
        "epochs": None,
        "global_batch_size": BATCH,
        "evaluate": {"every_steps": 10},
    }
    train(
        tmp_path / "whole",
        Words(directory, kind, shuffle),
        **settings,
        max_steps=STEPS,
    )
    for last in (10, 30, STEPS):  # in the first pass, and in the second one
        train(
            tmp_path / "parts",
            Words(directory, kind, shuffle),
            **settings,
            max_steps=last,
        )
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert shuffle or "loads its own state_dict" in caplog.text
