"""Optimizer, schedule and batch-size rules, by hand."""

import math
import random

import pytest
import torch
from torch import nn

from tests.specs import error_of
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.sections import ScalingRule, ScheduleConfig
from trainers.model.optimizer import (
    build_optimizer,
    built_lr,
    check_optimizer,
    lr_factor,
    scaled_decay,
)


def config(optimizer=None, **changes):
    tree = {
        "task": "t:T",
        "epochs": 1,
        "global_batch_size": 64,
        "optimizer": {"lr": 0.1, **(optimizer or {})},
    }
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
        ("sde", 256, 0.2),
    ],
)
def test_the_learning_rate_follows_the_batch_size(rule, batch, expected):
    scaling = {"rule": rule, "base_batch_size": 64}
    assert built_lr(
        config(global_batch_size=batch, lr_scaling=scaling)
    ) == pytest.approx(expected)


ADAM = {
    "name": "adamw",
    "weight_decay": 0.5,
    "betas": [0.9, 0.999],
    "eps": 1e-6,
}


def by_sde(size, optimizer):
    """The options of the only group at a batch size, lr 0.1 at 64."""
    made = config(
        optimizer,
        global_batch_size=size,
        lr_scaling={"rule": "sde", "base_batch_size": 64},
    )
    (group,) = build_optimizer(nn.Linear(2, 2), made).param_groups
    return group


def test_sde_by_hand():
    larger = by_sde(256, ADAM)
    assert larger["lr"] == pytest.approx(0.2)
    assert larger["betas"] == pytest.approx(
        (0.6561, 0.996005996)
    )  # 0.9^4, 0.999^4
    assert larger["eps"] == pytest.approx(5e-7)
    assert larger["weight_decay"] == pytest.approx(
        1.0
    )  # lr * weight_decay: 0.05 in 64 samples, 0.2 in 256
    smaller = by_sde(16, {"name": "adam", "weight_decay": 0.5})
    assert smaller["betas"] == pytest.approx(
        (0.974003746, 0.999749906)
    )  # torch's 0.9 and 0.999, to the power 1/4
    assert smaller["eps"] == pytest.approx(2e-8)
    assert smaller["weight_decay"] == 0.5, "L2 is a part of the loss"
    same = by_sde(64, ADAM)
    assert (same["lr"], same["betas"], same["eps"], same["weight_decay"]) == (
        0.1,
        (0.9, 0.999),
        1e-6,
        0.5,
    )


@pytest.mark.parametrize("size", [32, 128, 1024])
def test_betas_by_sde_are_those_of_the_paper_to_the_first_order(size):
    """1 - k (1 - beta), which is below 0 where k is above 10 and beta 0.9."""
    betas = by_sde(size, {"betas": [1 - 1e-5, 1 - 1e-6]})["betas"]
    assert betas == pytest.approx(
        (1 - size / 64 * 1e-5, 1 - size / 64 * 1e-6), abs=2e-8
    )


@pytest.mark.parametrize("seed", range(20))
def test_sde_keeps_every_time_scale_in_samples(seed):
    draw = random.Random(seed)
    base = {
        "betas": [draw.uniform(0.5, 0.99), draw.uniform(0.9, 0.9999)],
        "eps": 10 ** draw.uniform(-10, -4),
        "weight_decay": draw.uniform(0, 1),
    }
    decay = draw.uniform(0.9, 0.9999)
    scales = []
    for size in (64, draw.randint(1, 1000)):
        group = by_sde(size, base)
        sde = ScalingRule(rule="sde", base_batch_size=64)
        forgotten = [
            size / -math.log(kept)
            for kept in (
                *group["betas"],
                scaled_decay(decay, sde, size) or 0.0,
            )
        ]
        noise = math.sqrt(size)  # the inverse of the gradient's
        scales.append(
            [
                *forgotten,
                group["lr"] * group["weight_decay"] / size,
                group["eps"] * noise,
                group["lr"] / noise,
            ]
        )
    assert scales[0] == pytest.approx(scales[1])


def test_an_optimizer_without_betas_is_refused_by_sde():
    parameters = [nn.Parameter(torch.ones(1))]
    with error_of("lr_scaling.rule"):
        check_optimizer(torch.optim.RMSprop(parameters), "Mine", "sde")
    check_optimizer(torch.optim.NAdam(parameters), "Mine", "sde")
    check_optimizer(torch.optim.RMSprop(parameters), "Mine", "sqrt")


def factors(total, **schedule):
    return [
        lr_factor(ScheduleConfig(**schedule), step, total)
        for step in range(total)
    ]


def test_warm_up_reaches_one_at_its_last_step():
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(6, warmup=0.5) == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]
    )
    assert factors(3, warmup=10) == pytest.approx([0.1, 0.2, 0.3])


def test_cosine_is_half_a_cosine():
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
def test_the_configured_optimizer_is_built(options, cls, expected):
    optimizer = build_optimizer(nn.Linear(2, 2), config(options))
    assert type(optimizer) is cls
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.1
    assert group["fused"] is True
    assert {name: group[name] for name in expected} == expected


def test_frozen_parameters_are_there_for_later_and_weights_of_bits_are_not():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model[0].bias = nn.Parameter(
        torch.ones(3, dtype=torch.int8), requires_grad=False
    )
    (group,) = build_optimizer(model, config()).param_groups
    assert [tuple(parameter.shape) for parameter in group["params"]] == [
        (3, 2),
        (1, 3),
        (1,),
    ]
