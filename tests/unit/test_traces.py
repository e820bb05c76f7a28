"""Throw-away passes leave nothing: a task that counts every call sees training
and evaluation alone.
"""

import functools
import logging
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from tests.unit.test_loop import train
from trainers.model.precision import resolve_precision
from trainers.step.forward import ForwardPass
from trainers.step.snapshot import throwaway
from trainers.task import Task

CPU = torch.device("cpu")
SERIAL = 0


class Net(nn.Module):
    """Counts in a buffer, an attribute, and one that is made when it is first called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 2),
        )
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.calls += 1
        self.seen += 1
        if not hasattr(self, "noise"):
            self.noise = torch.randn(4)
            self.register_forward_hook(lambda *_: None)
            self.layers[1].eval()
        return self.layers(inputs + self.noise)


class Rows(Dataset[Any]):
    """Counts what is read."""

    def __init__(self):
        self.reads = 0
        self.generator = np.random.default_rng(3)

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.reads += 1
        return torch.full(
            (4,), index + self.generator.random()
        ).float(), index % 2


def counted(method):
    """Count a method's calls in several kinds of places."""
    calls = 0

    @functools.wraps(method)
    def wrapper(self, *args, **options):
        global SERIAL
        nonlocal calls
        SERIAL += 1
        calls += 1
        self.calls[method.__name__] += 1
        self.order.append(method.__name__)
        self.array += 1
        self.tensor.add_(1)
        self.slotted.calls += 1
        type(self).total += 1
        self.nested["list"][0][0] += 1
        self.nested["list"][1][0]["calls"] += 1
        self.drawn = (
            self.generator.random(),
            float(torch.rand((), generator=self.torch_generator)),
        )
        return method(self, *args, **options)

    wrapper.calls = lambda: calls
    return wrapper


class Slotted:
    """State without a dictionary."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Counting(Task):
    """Every hook that a task has, and every kind of place to count in."""

    total = 0

    def __init__(self):
        self.calls = Counter()
        self.order = deque(maxlen=500)
        self.array = np.zeros(3)
        self.tensor = torch.zeros(2)
        self.generator = random.Random(1)
        self.torch_generator = torch.Generator()
        self.drawn = (0.0, 0.0)
        self.optimizer_calls = Counter()
        self.slotted = Slotted()
        self.nested = {"list": [deque([0]), ({"calls": 0},)]}

    @counted
    def model(self):
        self.net = Net()
        return self.net

    @counted
    def dataset(self, split):
        return Rows()

    @counted
    def forward(self, model, batch):
        return model(batch[0])

    @counted
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    @counted
    def weight(self, batch):
        return super().weight(batch)

    @counted
    def metrics(self, outputs, batch):
        return {"accuracy": outputs.argmax(1) == batch[1]}

    @counted
    def transform(self, batch, training):
        return batch

    @counted
    def collate(self, samples):
        return super().collate(samples)

    @counted
    def worst_case_batch(self, dataset, size):
        return super().worst_case_batch(dataset, size)

    @counted
    def optimizer(self, model, config):
        made = AdamW(model.parameters(), lr=0.01, fused=True)
        calls = self.optimizer_calls
        made.register_step_pre_hook(lambda *_: calls.update(["before"]))
        made.register_step_post_hook(lambda *_: calls.update(["after"]))
        made.register_load_state_dict_pre_hook(
            lambda *_: calls.update(["load"])
        )
        made.register_state_dict_pre_hook(lambda *_: calls.update(["save"]))
        return made

    @counted
    def setup(self):
        pass

    @counted
    def state_dict(self):
        return {"array": self.array.tolist()}

    @counted
    def load_state_dict(self, state):
        self.array = np.array(state["array"])


def traces(path, task, **changes):
    """What a run has left in the task, and where its weights have come to."""
    serial, total, losses = SERIAL, Counting.total, Counting.loss.calls()
    result = train(
        path, task, epochs=2, checkpoint={"every_epochs": 1}, **changes
    )
    return {
        "global": SERIAL - serial,
        "class": Counting.total - total,
        "closure": Counting.loss.calls() - losses,
        "calls": dict(task.calls),
        "order": list(task.order),
        "numbers": [task.array[0], task.tensor[0].item()],
        "nested": [task.slotted.calls, task.nested],
        "drawn": task.drawn,
        "model": [
            task.net.calls,
            float(task.net.seen),
            task.net.noise.tolist(),
            len(task.net._forward_hooks),
        ],
        "optimizer": dict(task.optimizer_calls),
        "weights": [parameter.tolist() for parameter in task.net.parameters()],
        "loss": result.metrics["train_loss"],
    }


@pytest.mark.parametrize("microbatch", ["auto", 3])
def test_a_task_that_counts_every_call_sees_training_alone(
    microbatch, tmp_path, monkeypatch
):
    found = traces(tmp_path / "all", Counting(), microbatch_size=microbatch)
    size = 3 if microbatch == 3 else 99
    monkeypatch.setattr(
        "trainers.loop._dry_run.choose_microbatch",
        lambda wanted, share, *_: min(share, size),
    )
    monkeypatch.setattr("trainers.loop._dry_run.count_flops", lambda *_: None)
    monkeypatch.setattr("trainers.loop._dry_run.check_loss", lambda *_: None)
    assert found == traces(
        tmp_path / "none", Counting(), microbatch_size=microbatch
    )
    assert found["model"][0] == (
        12 if microbatch == "auto" else 20
    )  # 10 steps, 8 of them of two parts; 2 evaluations


def test_what_is_too_large_to_be_copied_is_named(caplog):
    class Average(Task):
        def __init__(self, kept):
            self.average = torch.zeros(600, 600)
            self.kept = kept

        def state_dict(self):
            return {"average": self.average} if self.kept else {}

    for kept in (False, True):
        caplog.clear()
        task = Average(kept)
        forward = ForwardPass(
            nn.Linear(1, 1), task, resolve_precision("fp32", CPU), CPU
        )
        with caplog.at_level(logging.WARNING), throwaway(forward):
            task.average += 1
        assert ("Average.average" in caplog.text) is not kept
        assert bool(task.average.any()) is not kept


def test_every_kind_of_change_is_named_and_taken_back():
    class Kept(Task):
        def __init__(self):
            self.seen = {1}
            self.array = np.zeros(3)
            self.slotted = Slotted()
            self.drawn = random.Random(1)
            self.torchs = torch.Generator()

    task = Kept()
    forward = ForwardPass(
        nn.Linear(1, 1), task, resolve_precision("fp32", CPU), CPU
    )
    changes = {
        "seen.2": lambda: task.seen.add(2),
        "array": lambda: task.array.__iadd__(1),
        "slotted.calls": lambda: setattr(task.slotted, "calls", 5),
        "drawn": task.drawn.random,
        "torchs": lambda: torch.rand((), generator=task.torchs),
    }
    for name, change in changes.items():
        with throwaway(forward) as snapshot:
            assert snapshot.changes.first() is None
            change()
            assert snapshot.changes.first() == f"Kept.{name}"
    assert (task.seen, task.slotted.calls, task.array.any()) == ({1}, 0, False)
