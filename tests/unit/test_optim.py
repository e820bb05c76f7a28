"""Optimizer, schedule and batch-size rules, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.sections import ScheduleConfig
from trainers.model.optimizer import build_optimizer, built_lr, lr_factor


def config(optimizer: dict[str, Any] | None = None, **changes: Any) -> TrainConfig:
    tree = {"task": "t:T", "epochs": 1, "global_batch_size": 64, "optimizer": {"lr": 0.1, **(optimizer or {})}}
    return build(TrainConfig, tree | changes, "f")


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [
        ("none", 256, 0.1),
        ("linear", 256, 0.4),
        ("linear", 32, 0.05),
        ("sqrt", 256, 0.2),
        ("sqrt", 16, 0.05),
        ("sqrt", 64, 0.1),
    ],
)
def test_the_learning_rate_follows_the_batch_size(rule: str, batch: int, expected: float) -> None:
    scaling = {"rule": rule, "base_batch_size": 64}
    assert built_lr(config(global_batch_size=batch, lr_scaling=scaling)) == pytest.approx(expected)


def factors(total: int, **schedule: Any) -> list[float]:
    return [lr_factor(ScheduleConfig(**schedule), step, total) for step in range(total)]


def test_warm_up_reaches_one_at_its_last_step() -> None:
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(6, warmup=0.5) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0])
    assert factors(3, warmup=10) == pytest.approx([0.1, 0.2, 0.3])


def test_cosine_is_half_a_cosine() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert factors(8, name="cosine") == pytest.approx(expected)
    assert factors(10, name="cosine", warmup=2)[2:] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "cls", "expected"),
    [
        ({}, torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}),
        ({"name": "adamw", "weight_decay": 0.5, "betas": [0.8, 0.9], "eps": 1e-4}, torch.optim.AdamW,
         {"weight_decay": 0.5, "betas": (0.8, 0.9), "eps": 1e-4}),
        ({"name": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ({"name": "sgd"}, torch.optim.SGD, {"momentum": 0, "nesterov": False, "weight_decay": 0.0}),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)  # fmt: skip
def test_the_configured_optimizer_is_built(options: dict[str, Any], cls: type, expected: dict[str, Any]) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), config(options))
    assert type(optimizer) is cls
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.1
    assert group["fused"] is True
    assert {name: group[name] for name in expected} == expected


def test_frozen_parameters_are_there_for_later_and_weights_of_bits_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model[0].bias = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    (group,) = build_optimizer(model, config()).param_groups
    assert [tuple(parameter.shape) for parameter in group["params"]] == [(3, 2), (1, 3), (1,)]
