"""What each strategy puts around a model, and how a sharded state is taken
apart; without a process group.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.model.sharding import shard_units
from trainers.model.strategy import place_model, wrap_model


class Block(nn.Module):
    """Has a Sequential of its own, as a transformer's block has."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Pair(nn.Sequential):
    """A Sequential with a name: a block."""


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def names(model):
    units = shard_units(model)
    return [
        name
        for name, module in model.named_modules()
        if any(module is unit for unit in units)
    ]


def test_repeated_blocks_are_sharded_whole():
    assert names(Language()) == ["blocks.0", "blocks.1"]
    assert names(
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    ) == [
        "0",
        "2",
    ]
    stages = nn.Sequential(
        nn.Sequential(Pair(nn.Linear(2, 2), nn.Linear(2, 2)), Block()),
        nn.Flatten(),
        nn.Linear(2, 2),
    )
    assert names(stages) == ["0.0", "0.1", "2"]
    assert names(nn.Linear(2, 2)) == []
    assert names(Block()) == ["mlp.0", "mlp.2"]


def test_blocks_that_share_a_parameter_stay_with_the_root():
    tied = nn.Sequential(
        nn.Embedding(7, 4), Block(), nn.Linear(4, 7, bias=False)
    )
    tied[2].weight = tied[0].weight
    assert names(tied) == ["1"]
    same = Block()
    assert names(nn.Sequential(same, Block(), same)) == ["1"]
    inside = Block()
    inside.mlp[2] = inside.mlp[0]
    assert names(nn.ModuleList([inside])) == ["0"]


def test_dp_takes_all_gpus_of_its_process(monkeypatch):
    seen = {}

    def build(self, module, device_ids):
        nn.Module.__init__(self)
        self.module = module
        seen["ids"] = device_ids

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(DataParallel, "__init__", build)
    model = nn.Linear(2, 2)
    wrapped = wrap_model(model, Group(0, 1, torch.device("cuda", 0)), "dp")
    assert isinstance(wrapped, DataParallel)
    assert wrapped.module is model
    assert seen["ids"] == [0, 1, 2]


@pytest.mark.parametrize(
    "model",
    [
        nn.ParameterList([torch.ones(())]),
        nn.ParameterList([torch.ones(1, dtype=torch.complex64)]),
        nn.Embedding(2, 2, sparse=True),
    ],
)
def test_what_cannot_be_sharded_is_refused(model):
    with pytest.raises(ConfigError, match="cannot shard a parameter"):
        place_model(model, Group(0, 2, torch.device("cpu")), "fsdp")
