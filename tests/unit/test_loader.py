"""Batches: the same ones by every way that data can take, in the order that
was asked for.
"""

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from trainers.config.sections import DataConfig
from trainers.data import feed as loader
from trainers.data.batch import tensors_of
from trainers.errors import ConfigError
from trainers.task import Task, task_feed

CPU = torch.device("cpu")
SIZE = 23
INPUTS = torch.arange(SIZE * 3, dtype=torch.float32).reshape(SIZE, 3)
LABELS = torch.arange(SIZE)
ASKED = [
    torch.tensor([3, 1, 22]),
    torch.tensor([0]),
    torch.tensor([5, 5, 7, 2]),
]


class Samples(Dataset[Any]):
    """One sample at a time."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return INPUTS[index], LABELS[index]


class WholeBatches(Samples):
    """A batch at a time, ready."""

    def __getitems__(self, indices):
        return INPUTS[indices], LABELS[indices]


class Lists(Samples):
    """torch's protocol: a list of samples."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Dicts(Samples):
    def __getitem__(self, index):
        return {"inputs": INPUTS[index], "labels": LABELS[index]}


class Marked(Task):
    """Its transform shows what it was told."""

    def __init__(self):
        self.seen = []

    def transform(self, batch, training):
        assert not torch.is_grad_enabled()
        self.seen.append(training)
        return batch


def feed(dataset, **options):
    return task_feed(
        dataset, Marked(), DataConfig(**options), CPU, sharers=1, seed=0
    )


def collect(source, asked=ASKED):
    found = [
        tensors_of(batch) for batch in source.batches(asked, training=True)
    ]
    source.close()
    return found


WAYS = {
    "tensors, resident": (TensorDataset(INPUTS, LABELS), {}),
    "samples": (Samples(), {}),
    "whole batches": (WholeBatches(), {}),
    "lists": (Lists(), {}),
    "dicts": (Dicts(), {}),
    "a subset": (
        torch.utils.data.Subset(TensorDataset(INPUTS, LABELS), range(SIZE)),
        {},
    ),
    "a loader process": (Samples(), {"num_workers": 1, "prefetch_factor": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_batches_asked_for(way):
    dataset, options = WAYS[way]
    found = collect(feed(dataset, **options))
    assert len(found) == len(ASKED)
    for (inputs, labels), asked in zip(found, ASKED, strict=True):
        assert torch.equal(inputs, INPUTS[asked])
        assert torch.equal(labels, LABELS[asked])


def test_a_loader_process_serves_one_epoch_after_another():
    source = feed(Samples(), num_workers=1)
    for asked in (ASKED, ASKED[::-1], ASKED[:1]):
        rows = [
            batch[1].tolist()
            for batch in source.batches(asked, training=False)
        ]
        assert rows == [indices.tolist() for indices in asked]
    source.close()


def test_auto_keeps_small_tensor_datasets_only(monkeypatch):
    small = TensorDataset(INPUTS, LABELS)
    bytes_of_it = INPUTS.numel() * 4 + LABELS.numel() * 8
    assert feed(small).resident is not None
    assert feed(Samples()).resident is None
    assert feed(small, num_workers=1).resident is None
    monkeypatch.setattr(
        loader, "total_memory_bytes", lambda _: 10 * bytes_of_it
    )
    assert feed(small).resident is not None
    shared = task_feed(
        small, Marked(), DataConfig(), CPU, sharers=2, seed=0
    )  # twice the data on one host
    assert shared.resident is None
    monkeypatch.setattr(
        loader, "total_memory_bytes", lambda _: 10 * bytes_of_it - 10
    )
    assert feed(small).resident is None
    assert feed(small, resident=True).resident is not None


def test_resident_data_is_a_tensor_dataset():
    with pytest.raises(ConfigError, match="needs a TensorDataset"):
        feed(Samples(), resident=True)
    config = DataConfig(resident=True)
    with pytest.raises(ConfigError, match="without collate"):
        task_feed(
            TensorDataset(INPUTS), Changing(), config, CPU, sharers=1, seed=0
        )


def test_resident_tensors_that_a_task_changes_are_copied_again():
    data = TensorDataset(INPUTS.clone(), LABELS)
    source = feed(data, resident=True)
    for change in (
        lambda: data.tensors[0].mul_(2),
        lambda: setattr(data, "tensors", (INPUTS * 3, LABELS)),
    ):
        change()
        [(inputs, _)] = source.batches(ASKED[:1], training=True)
        assert torch.equal(inputs, data.tensors[0][ASKED[0]])


class Factor:
    by = 1


class Product(Dataset[Any]):
    """A sample is the product of all that a task may change."""

    def __init__(self):
        self.level = 1
        self.transforms = [Factor()]
        self.tensor = torch.ones(3)
        self.array = np.ones(3)
        self.words = ["1"] * 300

    def __len__(self):
        return 4

    def __getitem__(self, row):
        whole = self.level * self.transforms[0].by * int(self.words[-1])
        return self.tensor[0] * float(self.array[0]) * whole


class Changing(Task):
    def __init__(self):
        self.data = Product()
        self.scale = 1

    def collate(self, samples):
        return torch.stack(samples) * self.scale


CHANGES = {
    "attribute": lambda task: setattr(task.data, "level", 2),
    "a transform's": lambda task: setattr(task.data.transforms[0], "by", 2),
    "tensor in place": lambda task: task.data.tensor.mul_(2),
    "tensor": lambda task: setattr(task.data, "tensor", task.data.tensor * 2),
    "array in place": lambda task: task.data.array.__imul__(2),
    "end of a list": lambda task: task.data.words.__setitem__(-1, "2"),
    "collate's": lambda task: setattr(task, "scale", 2),
}


@pytest.mark.parametrize("options", [{"num_workers": 1}, {}])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_task_changes_is_seen_by_the_next_batches(change, options):
    """As in a plain loop, whose loaders copy the dataset anew each epoch
    (pytorch#97326, Lightning#20407).
    """
    task = Changing()
    source = task_feed(
        Subset(task.data, [0, 2, 3]),
        task,
        DataConfig(**options),
        CPU,
        sharers=1,
        seed=0,
    )
    found = []
    for _ in range(2):
        found += [
            batch.tolist()
            for batch in source.batches([torch.arange(3)], training=True)
        ]
        change(task)
    source.close()
    assert found == [[1.0] * 3, [2.0] * 3]


def test_closing_ends_loader_processes():
    import multiprocessing

    source = feed(Samples(), num_workers=1)
    next(iter(source.batches(ASKED, training=True)))
    assert multiprocessing.active_children()
    source.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_ends_no_loader_process(number):
    """It signals all processes of the command, again and again; the loop
    decides when to stop.
    """
    one = feed(Samples(), num_workers=1)
    batches = one.batches(ASKED, training=True)
    first = next(batches)
    [process] = one._loader._iterator._workers
    for _ in range(3):
        os.kill(process.pid, number)
    assert [batch[1].tolist() for batch in (first, *batches)] == [
        at.tolist() for at in ASKED
    ]
    assert process.is_alive()
    one.close()
