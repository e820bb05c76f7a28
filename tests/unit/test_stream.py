"""Streams: the n-th sample is row n, whoever reads it, from wherever the run goes on."""

import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    get_worker_info,
)

from trainers.data.stream import Rereadable, Stream, digest
from trainers.errors import ConfigError
from trainers.task import Task, load_split

SIZE = 700  # samples of a pass
ROWS = 4000
BATCH = 64


class Counted(IterableDataset[Any]):
    """Every pass in another order, which `set_epoch` gives; no state of its own."""

    size = SIZE

    def __init__(self):
        self.epoch = 0
        self.epochs = []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)

    def order(self):
        return random.Random(self.epoch).sample(range(self.size), self.size)

    def __iter__(self):
        for number in self.order():
            yield {
                "number": number,
                "data": torch.tensor([number, self.epoch]),
            }


class Exact(Counted):
    """Its state is where it is: the dict itself, which goes on changing."""

    def __init__(self):
        super().__init__()
        self.at = {"next": 0}
        self.given = []

    def __iter__(self):
        self.at = {"next": getattr(self, "_loaded", 0)}
        self._loaded = 0
        samples = list(super().__iter__())
        while self.at["next"] < self.size:
            sample = samples[self.at["next"]]
            self.at["next"] += 1
            self.given.append(sample["number"])
            yield sample

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self._loaded = state["next"]


class OwnOrder:
    """Its passes follow from one another, and its state is of one pass alone:
    torchdata's loader with a generator.
    """

    def __init__(self):
        self.drawn = random.Random(3)
        self.state = {"next": 0, "order": []}

    def __iter__(self):
        at = self.state
        self.state = {"next": 0, "order": []}
        order = at["order"] or self.drawn.sample(range(SIZE), SIZE)
        for number in range(at["next"], SIZE):
            self.state = {"next": number + 1, "order": order}
            yield {"number": order[number]}
        self.state = {"next": 0, "order": []}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class OneBehind(Exact):
    """The state is set after the sample was asked back for: the common mistake."""

    def state_dict(self):
        return {"next": max(0, self.at["next"] - 1)}


class Shuffled(Exact):
    """A buffer that its state leaves out, as Hugging Face's
    `shuffle(buffer_size)` has it.
    """

    buffer = 200

    def __iter__(self):
        kept = []
        drawn = random.Random(self.epoch)
        for sample in super().__iter__():
            kept.append(sample)
            if len(kept) == self.buffer:
                yield kept.pop(drawn.randrange(self.buffer))
        yield from drawn.sample(kept, len(kept))


class ForLoaders(Exact):
    """LitData's and MosaicML's are asked by their own loaders."""

    def state_dict(self, num_samples):
        return {"next": num_samples}


class LosesOneLater(Exact):
    """After loading it goes on alike for longer than any proof, and then
    leaves out one.
    """

    def __iter__(self):
        is_loaded = getattr(self, "_loaded", 0) > 100
        for count, sample in enumerate(super().__iter__()):
            if not (is_loaded and count == 60):
                yield sample


class Returned(Exact):
    """An iterator in itself that begins anew, as LitData's."""

    def __iter__(self):
        self._samples = super().__iter__()
        return self

    def __next__(self):
        return next(self._samples)


class Rows:
    """Ray's Dataset."""

    def __iter__(self):
        raise TypeError("`Dataset` objects aren't iterable")

    def iter_rows(self):
        return iter([{"number": number} for number in range(SIZE)])


def spent():
    """A generator has one pass."""
    for number in range(SIZE):
        yield {"number": number}


KINDS = [
    spent,
    Counted,
    Exact,
    OwnOrder,
    OneBehind,
    Shuffled,
    ForLoaders,
    Returned,
    Rows,
]


def unbroken(kind):
    source = kind()
    found = []
    passes = 0
    while len(found) < ROWS:
        if hasattr(source, "set_epoch"):
            source.set_epoch(passes)
        found += map(
            digest,
            source.iter_rows() if hasattr(source, "iter_rows") else source,
        )
        passes += 1
        source = kind() if kind is spent else source
    return found[:ROWS]


def read(stream, first, end=ROWS, rank=0, ranks=1):
    """Row and digest of this rank's share of each step."""
    found = []
    for start in range(first, end, BATCH):
        size = min(BATCH, end - start)
        rows = list(
            range(
                start + size * rank // ranks,
                start + size * (rank + 1) // ranks,
            )
        )
        found += zip(rows, map(digest, stream.__getitems__(rows)), strict=True)
        state = stream.state()
        assert state is None or state["row"] <= rows[-1] + 1
    return found


def through_storage(state):
    written = io.BytesIO()
    torch.save(state, written)
    return torch.load(io.BytesIO(written.getvalue()), weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_the_samples_of_an_unbroken_one(kind):
    ranks = 3
    expected = list(enumerate(unbroken(kind)))
    found = []
    kept = {}
    for rank in range(ranks):
        stream = Stream(kind, "train")
        stream.__getitems__([0, 0, 3, 40])  # a throw-away pass
        stream.begin(0, None)
        for start in range(0, ROWS, 1000):
            found += read(stream, start, start + 1000, rank, ranks)
            if rank == 0:
                kept[start + 1000] = through_storage(stream.state())
    assert sorted(found) == expected
    for row, state in kept.items():
        if row < ROWS:
            again = Stream(kind, "train")
            again.__getitems__([0, 1, 2])
            again.begin(row, state)
            assert read(again, row) == expected[row:]


@pytest.mark.parametrize(
    ("kind", "is_exact"),
    [
        (Counted, False),
        (Exact, True),
        (OwnOrder, True),
        (Returned, True),
        (OneBehind, False),
        (Shuffled, False),
        (ForLoaders, False),
        (Rows, False),
    ],
)
def test_a_state_is_used_where_it_is_proved_and_the_log_says_so(
    kind, is_exact
):
    stream = Stream(kind, "train")
    assert ("loads its own state_dict" in stream.words) == is_exact
    stream.begin(0, None)
    read(stream, 0)
    assert (stream.state() is not None) == is_exact


def trained(kind, rows):
    """A stream as a feed reads it for training."""
    stream = Stream(kind, "train")
    stream.begin(0, None)
    for start in range(0, rows, 20):
        stream.__getitems__([*range(start, start + 20)])
        stream.receive(stream.send())
    return stream


def test_a_state_after_which_a_sample_is_lost_is_left(caplog):
    before = trained(LosesOneLater, 1200)
    kept = before.state_at(1200)
    mark = through_storage(before.mark_at(1200))
    assert mark[0] > kept["row"] + 60
    again = Stream(LosesOneLater, "train")
    again.begin(1200, kept, mark)
    assert read(again, 1200) == list(enumerate(unbroken(LosesOneLater)))[1200:]
    assert "row 1185" in caplog.text


def test_what_lies_before_a_loaded_state_is_not_read():
    made = []

    def make():
        made.append(Exact())
        return made[-1]

    stream = Stream(make, "train")
    stream.begin(0, None)
    read(stream, 0, 2600)
    state = through_storage(stream.state())
    assert state["row"] == 2000
    made.clear()
    again = Stream(make, "train")
    again.begin(2600, state)
    assert again.state() == state  # of a checkpoint before the first step
    read(again, 2600, 2700)
    assert len(made[-1].given) == 700


def test_a_generator_is_begun_once_and_loses_nothing():
    begun = []

    def numbers():
        begun.append(os.getpid())
        for number in range(100):
            yield {"number": number}

    only = numbers()
    stream = Stream(lambda: only, "train")
    assert stream.digest(8) == digest(
        [{"number": number} for number in range(8)]
    )
    for _ in range(3):
        for sample in stream.__getitems__(list(range(20))):
            sample.clear()  # as a collate may do
    stream.begin(0, None)
    found = [
        sample["number"]
        for start in range(0, 100, 10)
        for sample in stream.__getitems__([*range(start, start + 10)])
    ]
    assert found == list(range(100))
    assert len(begun) == 1
    with pytest.raises(ConfigError):
        stream.__getitems__([100])


def test_a_stream_without_samples_is_refused():
    stream = Stream(list, "train")
    with pytest.raises(ConfigError):
        stream.digest(8)


def spoilt():
    yield from range(3)
    raise OSError("a bad record")


def test_an_error_that_a_thrown_away_pass_has_met_comes_again():
    stream = Stream(spoilt, "train")
    for _ in range(2):
        with pytest.raises(OSError, match="a bad record"):
            stream.__getitems__(range(5))


class Asked(Dataset[Any]):
    """What a loader's process reads: batches of a stream, and what it knows of itself."""

    def __init__(self, stream):
        self.stream = stream

    def __getitem__(self, rows):
        return self.stream.__getitems__(rows)


def loader(stream, first, end):
    steps = [
        [*range(start, min(start + 5, end))] for start in range(first, end, 5)
    ]
    return DataLoader(
        Asked(stream),
        batch_size=None,
        sampler=steps,
        num_workers=1,
        collate_fn=lambda batch: batch,
    )


class Lines:
    """Reads a file without a buffer: two processes that had one open file
    would each get some of it.
    """

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with self.path.open("rb", buffering=0) as file:
            while line := file.readline():
                yield int(line), get_worker_info() is None


@pytest.mark.parametrize("anew", [True, False])
def test_a_loaders_process_reads_a_file_from_its_first_line(tmp_path, anew):
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(60)))
    only = iter(Lines(path))
    stream = Stream(lambda: Lines(path) if anew else only, "train")
    head = stream.__getitems__(list(range(7)))
    stream.begin(0, None)
    batches = iter(loader(stream, 0, 60))
    found = next(batches)
    if anew:  # the worker's own file is where it was
        assert stream.__getitems__([7, 8]) == [(7, True), (8, True)]
    found += [sample for batch in batches for sample in batch]
    assert found == [(number, True) for number in range(60)]
    assert head == found[:7]


def test_a_state_is_loaded_in_a_loaders_process():
    stream = Stream(Exact, "train")
    stream.begin(0, None)
    read(stream, 0, 1100)
    again = Stream(Exact, "train")
    again.digest(8)
    again.begin(1100, stream.state())
    found = [
        digest(sample)
        for batch in loader(again, 1100, 1200)
        for sample in batch
    ]
    assert found == unbroken(Exact)[1100:1200]


@pytest.mark.parametrize(
    "make", [lambda: range(23), lambda: iter(range(23)), Returned]
)
def test_a_validation_stream_is_read_again(make):
    stream = Rereadable(make, "val")
    assert len(stream) == len(list(make()))
    once = [digest(sample) for sample in make()]
    for _ in range(2):
        assert list(
            map(
                digest,
                stream.__getitems__([0, 1, 5, 5])
                + stream.__getitems__([8, 22]),
            )
        ) == [once[row] for row in (0, 1, 5, 5, 8, 22)]
    assert [
        digest(sample) for batch in loader(stream, 0, 23) for sample in batch
    ] == once[:23]


SAMPLES = [
    *(
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(3, 2),
        torch.arange(6).bfloat16(),
        torch.tensor(1),
    ),
    *(
        np.arange(6),
        np.arange(6, dtype=np.int32),
        np.array(["a", None], dtype=object),
        np.float32(1),
    ),
    *(
        b"ab",
        "ab",
        1,
        1.0,
        True,
        None,
        [1, 2],
        (1, 2),
        [[1], 2],
        [b"a", b"b"],
        [b"ab"],
    ),
    *(
        {"a": 1},
        {"a": 2},
        {"b": 1},
        {"x", "y", "zz"},
        Path("a"),
        Path("b"),
        random.Random(1),
        random.Random(2),
        open,
    ),
]


def test_a_digest_tells_samples_apart_in_every_process():
    words = "from tests.unit.test_stream import SAMPLES, digest; print(*map(digest, SAMPLES))"
    done = subprocess.run(
        [sys.executable, "-c", words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == list(
        map(digest, SAMPLES)
    )  # whose hashes of text are others
    assert len(set(map(digest, SAMPLES))) == len(SAMPLES)
    assert digest(np.array([1.0, np.nan])) == digest(np.array([1.0, np.nan]))
    for rows in (1, 5):
        column = torch.rand(rows, 4)[:, 3]
        assert digest(column) == digest(torch.tensor(column.tolist()))


def test_it_is_made_and_read_as_by_the_only_rank(monkeypatch):
    """Each time, in whatever pass; the process has its place again afterwards."""
    names = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PMI_SIZE")
    for name in (*names, "SIZE"):
        monkeypatch.setenv(name, "3")
    seen = []

    class Splits(Task):
        def stream(self, split):
            seen.extend(map(os.environ.get, names))
            assert os.environ["SIZE"] == "3", "the user's own"

            def samples():
                for number in range(SIZE):
                    seen.extend(map(os.environ.get, names))
                    yield number

            return samples()

    stream = load_split(Splits(), "train", True, torch.device("cpu"))
    assert isinstance(stream, Stream)
    stream.begin(0, None)
    stream.__getitems__([0, 5])
    assert seen == [None] * len(seen)
    assert len(seen) > 12
    assert [os.environ[name] for name in names] == ["3"] * 4
