"""SweepConfig: what fits together, and which field does not."""

import pytest

from trainers.config.model import build
from trainers.config.yaml import parse_mapping
from trainers.errors import ConfigError
from tune.config import Objective, SweepConfig

BASE = {
    "train": "train.yaml",
    "space": {"global_batch_size": [16, 32]},
    "objective": {"metric": "val_loss"},
}
LR = "space.optimizer.lr"
MANY = list(range(101))


def make(**changes):
    return build(SweepConfig, BASE | changes, "sweep.yaml")


def rate(values):
    return f"""
        space: {{optimizer.lr: {{{values}}}}}
        search: random
        budget: {{trials: 3}}
    """


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ("space: {}", "space"),
        ("space: {seed: []}", "space.seed"),
        (f"space: {{seed: {MANY}, max_steps: {MANY}}}", "space"),
        (rate("unifrom: [1, 2]"), f"{LR}.unifrom"),
        (rate(""), f"{LR}.uniform"),
        (rate("min: 1"), f"{LR}.min"),
        (rate("uniform: [1, 2], max: 3"), f"{LR}.max"),
        (rate("uniform: [1, 2], choice: [1]"), f"{LR}.choice"),
        (rate("uniform: [2, 1]"), f"{LR}.uniform"),
        (rate("loguniform: [0, 1]"), f"{LR}.loguniform[0]"),
        (rate("loguniform: [2, 1]"), f"{LR}.loguniform"),
        (rate("min: 8, max: 8"), LR),
        ("space: {optimizer.lr: {uniform: [0.1, 0.2]}}", "search"),
        ("search: gird", "search"),
        ("search: random", "budget.trials"),
        ("objective: {}", "objective.target"),
        ("objective: {metric: my_topk}", "objective.mode"),
        (
            "objective: {metric: val_loss, target: {topk: 1}}",
            "objective.target.mode",
        ),
        (
            "objective: {metric: val_loss, target: {val_loss: low}}",
            "objective.target.val_loss",
        ),
        (
            "objective: {metric: val_loss, target: {a_loss: 1, b_loss: 2}}",
            "objective.target",
        ),
        (
            "objective: {metric: usd_to_target, target: {val_loss: 1.0}}",
            "usd_per_hour",
        ),
        ("budget: {usd: 5.0}", "usd_per_hour"),
        ("objektive: {}", "objektive"),
    ],
)
def test_what_cannot_be_is_an_error_of_its_field(changes, field):
    with pytest.raises(ConfigError) as raised:
        make(**parse_mapping(changes, "test"))
    assert (raised.value.field, raised.value.source) == (field, "sweep.yaml")


@pytest.mark.parametrize(
    ("metric", "ends"), [("time_to_target", True), ("val_accuracy", False)]
)
def test_where_a_trial_ends(metric, ends):
    objective = Objective(metric=metric, target={"val_loss": 1.0})
    assert objective.ends_at_target is ends
    assert objective.watched == (metric, "val_loss")
    assert not Objective(metric="val_loss").reached({"val_loss": 0.1})


@pytest.mark.parametrize(
    ("budget", "time_s"),
    [
        ({"time_s": 100}, 100),
        ({"usd": 2.0}, 720),
        ({"usd": 2.0, "time_s": 100}, 100),
        ({"trials": 3}, None),
    ],
)
def test_a_budget_of_dollars_is_one_of_time(budget, time_s):
    assert make(budget=budget, usd_per_hour=10.0).time_budget_s == time_s
