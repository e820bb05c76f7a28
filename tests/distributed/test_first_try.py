"""Data and losses as users write them at the first try, on two ranks: as on
one, or refused on both.
"""

import pytest
import torch
from torch import nn

from tests.distributed.processes import run_processes
from tests.distributed.test_collectives import run
from tests.specs import curve, logged, ranked, train_on
from tests.tasks import Blobs
from tests.unit.test_first_try import Table
from tests.unit.test_refused import Classes, Contrastive
from trainers.errors import ConfigError


class Graph(nn.Module):
    """A constant that is sparse, as of a graph's edges."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        edges = torch.eye(12).to_sparse()
        self.register_buffer("edges", edges, persistent=False)

    def forward(self, inputs):
        return self.inner((self.edges @ inputs.T).T)


class Sparse(Blobs):
    def model(self):
        return Graph(super().model())


class Experts(nn.Module):
    """Those that no sample of a batch asks for are not called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(12, 4) for _ in range(2))

    def forward(self, inputs):
        chosen = (inputs[:, 0] > 0).long()
        outputs = inputs.new_zeros(len(inputs), 4)
        for number in chosen.unique().tolist():
            rows = chosen == number
            outputs = outputs.index_put(
                (rows,), self.experts[number](inputs[rows])
            )
        return outputs


class Block(nn.Sequential):
    """A single unit of `fsdp`."""


class Mixture(Blobs):
    """With as many samples a step as ranks, each rank calls one expert."""

    def __init__(self, in_block):
        super().__init__()
        self.in_block = in_block

    def model(self):
        experts = Experts()
        return nn.Sequential(Block(experts)) if self.in_block else experts


TASKS = {
    "sparse": Sparse(),
    "random_split": Table("random_split"),
    "constructor": Table("numpy"),
    "entropy": Table("entropy in tensors"),
    "classes": Classes(),
    "contrastive": Contrastive(),
}


def train(rank, world_size):
    found = {}
    changes = {
        "log_every_steps": 4,
        "checkpoint.every_steps": 3,
        "global_batch_size": 12,
    }
    for name, task in TASKS.items():
        try:
            metrics = run(task, rank, world_size, **changes).metrics
            found[name] = metrics["train_loss"], metrics["val_loss"]
        except ConfigError as error:
            found[name] = error.field
    return found


def test_two_ranks_have_the_splits_and_losses_of_one():
    [alone] = run_processes(1, train)
    for found in run_processes(2, train):
        for name in ("random_split", "constructor", "sparse"):
            assert found[name] == pytest.approx(alone[name], rel=1e-5), name
        assert found["entropy"] == 'dataset("train")'
        assert found["classes"] == found["contrastive"] == "loss()"


def mix(rank, world_size):
    found = []
    for strategy, in_block in (
        ("ddp", False),
        ("fsdp", False),
        ("fsdp", True),
    ):
        changes = {
            "strategy": strategy,
            "global_batch_size": 2,
            "max_steps": 20,
        }
        try:
            result = run(Mixture(in_block), rank, world_size, **changes)
            found.append(result.metrics["val_loss"])
        except ConfigError as error:
            found.append(error.field)
    return found


def test_experts_of_some_ranks_are_refused_where_ranks_would_mix_them_up():
    [[alone, *_]] = run_processes(1, mix)
    for found in run_processes(2, mix):
        assert found == [
            pytest.approx(alone, rel=1e-5),
            "strategy",
            "strategy",
        ]


def part(rank, world_size, path, stops):
    """With `stops` it is asked for an end whenever it may be."""
    changes = {
        "max_steps": 8,
        "log_every_steps": 4,
        "evaluate.every_steps": 3,
    }
    context = ranked(rank, world_size, path)
    context.should_stop = lambda elapsed_s: stops
    return train_on(Blobs(dtype="float64"), context, **changes).status


def test_a_window_goes_on_with_another_number_of_ranks(tmp_path):
    assert run_processes(2, part, tmp_path / "moved", True) == ["stopped"] * 2
    for name in ("moved", "whole"):
        assert run_processes(1, part, tmp_path / name, False) == ["done"]
    moved, whole = (
        logged(tmp_path / name, "train_loss") for name in ("moved", "whole")
    )
    assert (
        [row["step"] for row in moved]
        == [row["step"] for row in whole]
        == [4, 8]
    )
    assert [row["train_loss"] for row in moved] == pytest.approx(
        curve(tmp_path / "whole"), rel=1e-12
    )
