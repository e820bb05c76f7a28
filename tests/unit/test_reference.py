"""The reference has every key that a file may say, with its default and its meaning."""

import pytest

from trainers.command_line import entries, reference
from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig
from trainers.config.model import build, child_model, keys_of, set_key
from trainers.config.yaml import parse_yaml
from tune.config import SweepConfig


def keys(model, prefix=""):
    found = []
    for name in keys_of(model):
        below = child_model(model, name)
        found += keys(below, f"{prefix}{name}.") if below else [prefix + name]
    return found


@pytest.mark.parametrize("model", [TrainConfig, FunctionConfig, SweepConfig])
def test_every_key_is_there_with_its_meaning(model):
    found = {
        key: (default, description)
        for key, default, description in entries(model)
    }
    assert list(found) == keys(model)
    assert all(description for _, description in found.values())
    assert all(key in reference(model) for key in found)


def test_the_defaults_it_shows_are_the_defaults():
    """Written into a file they change nothing."""
    needed = {
        "task": "t:T",
        "epochs": 1,
        "global_batch_size": 1,
        "optimizer": {"lr": 0.1},
    }
    tree = {}
    for key, default, _ in entries(TrainConfig):
        if default != "required":
            set_key(tree, key, parse_yaml(default, "reference"))
    shown = build(
        TrainConfig,
        {**tree, **needed, "optimizer": {**tree["optimizer"], "lr": 0.1}},
        "f",
    )
    assert shown == build(TrainConfig, needed, "f")
