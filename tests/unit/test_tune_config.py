"""SweepConfig: what fits together, and one sentence for what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import ConfigError
from tune.config import SweepConfig
from tune.objective import Objective

BASE: dict[str, Any] = {
    "train": "train.yaml",
    "space": {"global_batch_size": [16, 32]},
    "objective": {"metric": "val_loss"},
}


def make(**changes: Any) -> SweepConfig:
    return build(SweepConfig, BASE | changes, "sweep.yaml")


def random(**space: Any) -> dict[str, Any]:
    return {"space": space, "search": "random", "budget": {"trials": 3}}


def test_the_defaults_are_a_sweep() -> None:
    config = make()
    assert (config.search, config.scheduler, config.lanes, config.isolation) == ("grid", "none", "auto", "warm")


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"space": {}}, "space", "write"),
        ({"space": {"seed": []}}, "space.seed", "has no values"),
        ({"space": {"seed": 3}}, "space.seed", "a list of values, or a range"),
        (
            {"space": {"optimizer.lr": {"unifrom": [1, 2]}}},
            "space.optimizer.lr.unifrom",
            "did you mean `space.optimizer.lr.uniform`?",
        ),
        ({"space": {"optimizer.lr": {}}}, "space.optimizer.lr", "exactly one of"),
        ({"space": {"optimizer.lr": {"min": 1}}}, "space.optimizer.lr", "min with max"),
        ({"space": {"optimizer.lr": {"uniform": [1]}}}, "space.optimizer.lr.uniform", "at least 2"),
        ({"space": {"optimizer.lr": {"uniform": [2, 1]}}}, "space.optimizer.lr.uniform", "must rise"),
        ({"space": {"optimizer.lr": {"loguniform": [0, 1]}}}, "space.optimizer.lr.loguniform", "above 0"),
        ({"space": {"optimizer.lr": {"uniform": [1, 2], "choice": [1]}}}, "space.optimizer.lr", "exactly one of"),
        ({"space": {"global_batch_size": {"min": 8, "max": 8}}}, "space.global_batch_size.max", "greater than min"),
        ({"space": {"global_batch_size": {"min": 0, "max": 8}}}, "space.global_batch_size.min", "at least 1"),
        ({"space": {"optimizer.lr": {"uniform": [0.1, 0.2]}}}, "search", "search: random"),
        (
            {
                "search": "frontier",
                "objective": {"metric": "time_to_target", "target": {"val_loss": 1.0}},
                "space": {"global_batch_size": [8, "auto"]},
            },
            "space.global_batch_size",
            "no size",
        ),
        ({"search": "random"}, "budget.trials", "how many"),
        ({"search": "optuna"}, "budget.trials", "how many"),
        ({"search": "gird"}, "search", "'grid', 'random', 'optuna' or 'frontier'"),
        ({"objective": {"metric": "usd_to_target"}}, "objective.target", "usd_to_target counts to"),
        ({"objective": {"metric": "usd_to_target", "target": {"val_loss": 1.0}}}, "usd_per_hour", "is needed for"),
        ({"budget": {"usd": 5.0}}, "usd_per_hour", "is needed for budget.usd"),
        ({"budget": {"usd": 0}, "usd_per_hour": 1.0}, "budget.usd", "greater than 0"),
        ({"usd_per_hour": -1}, "usd_per_hour", "greater than 0"),
        ({"lanes": 0}, "lanes", "auto or a whole number"),
        ({"train": 3}, "train", "the name of a file, or a mapping"),
        ({"objective": {}}, "objective.target", "time_to_target"),
        ({"objective": {"metric": "my_score"}}, "objective.mode", "mode: min"),
        ({"objective": {"metric": "val_loss", "target": {"score": 1}}}, "objective.target", "must name a metric"),
        ({"objective": {"metric": "val_loss", "target": {"val_loss": "low"}}}, "objective.target.val_loss", "number"),
        ({"objective": {"metric": "val_loss", "target": {"a_loss": 1, "b_loss": 2}}}, "objective.target", "at most 1"),
        ({"budget": {"trials": 0}}, "budget.trials", "at least 1"),
        ({"budget": {"time_s": 0}}, "budget.time_s", "greater than 0"),
        ({"name": "a/b"}, "name", "letters, digits"),
        ({"objektive": {}}, "objektive", "did you mean `objective`?"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(**changes)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"sweep.yaml: `{field}`"), line
    assert words in line


@pytest.mark.parametrize(
    "changes",
    [
        {},
        random(**{"optimizer.lr": {"loguniform": [1e-4, 1e-2]}, "global_batch_size": {"min": 8, "max": 64}}),
        random(clip_grad_norm={"choice": [None, 1.0]}, precision=["fp32", "bf16"]),
        {"space": {"clip_grad_norm": [None, 1.0], "compile": ["off"]}, "lanes": 2, "seed": 5},
        {"objective": {"metric": "time_to_target", "target": {"val_accuracy": 0.97}}, "scheduler": "asha"},
        {"train": {"task": "t:T", "task_args": {"x": None}}},
        {"search": "optuna", "budget": {"trials": 3, "usd": 2.5}, "usd_per_hour": 10.0},
        {"objective": {"metric": "usd_to_target", "target": {"val_accuracy": 0.97}}, "usd_per_hour": 10.0},
    ],
)
def test_its_plain_data_builds_it_again(changes: dict[str, Any]) -> None:
    config = make(**changes)
    tree = config.model_dump(mode="json", exclude_none=True)
    assert build(SweepConfig, parse_mapping(dump_yaml(tree), "f"), "f") == config


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("val_loss", "min"),
        ("val_error", "min"),
        ("val_perplexity", "min"),
        ("val_accuracy", "max"),
        ("val_f1", "max"),
        ("samples_per_s", "max"),
        ("step_time_s", "min"),
        ("usd_to_target", "min"),
    ],
)
def test_the_direction_of_known_metrics(metric: str, direction: str) -> None:
    target = {"val_loss": 1.0}
    assert Objective(metric=metric, target=target).direction == direction
    assert Objective(metric=metric, target=target, mode="max").direction == "max"


@pytest.mark.parametrize(
    ("target", "metrics", "reached"),
    [
        ({"val_accuracy": 0.9}, {"val_accuracy": 0.9}, True),
        ({"val_accuracy": 0.9}, {"val_accuracy": 0.95}, True),
        ({"val_accuracy": 0.9}, {"val_accuracy": 0.89}, False),
        ({"val_loss": 0.5}, {"val_loss": 0.5}, True),
        ({"val_loss": 0.5}, {"val_loss": 0.6}, False),
        ({"val_loss": 0.5}, {"val_loss": math.nan}, False),
        ({"val_accuracy": 0.9}, {"val_accuracy": math.nan}, False),
        ({"val_accuracy": 0.9}, {"val_loss": 0.1}, False),
        (None, {"val_loss": 0.1}, False),
    ],
)
def test_when_a_target_is_reached(target: dict[str, float] | None, metrics: dict[str, float], reached: bool) -> None:
    assert Objective(metric="val_loss", target=target).reached(metrics) is reached


def test_overrides_mean_keys_of_the_sweep() -> None:
    changed = override(SweepConfig, BASE, {"lanes": 2, "objective.metric": "val_accuracy", "budget.trials": 4})
    config = build(SweepConfig, changed, "f")
    assert (config.lanes, config.objective.metric, config.budget.trials) == (2, "val_accuracy", 4)


@pytest.mark.parametrize(
    ("budget", "time_s"),
    [
        ({}, None),
        ({"time_s": 100}, 100),
        ({"usd": 2.0}, 720),
        ({"usd": 2.0, "time_s": 100}, 100),
        ({"trials": 3}, None),
    ],
)
def test_a_budget_of_dollars_is_one_of_time(budget: dict[str, float], time_s: float | None) -> None:
    assert make(budget=budget, usd_per_hour=10.0).time_budget_s == time_s
