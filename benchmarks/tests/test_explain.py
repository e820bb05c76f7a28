"""The planted slowdowns: each builds a configuration, and the score counts what it is to count."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.explain import PLANTS, TASKS, summary, tree
from benchmarks.planted import SlowData, work
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.launch.find_task import load_task


@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_is_a_configuration_that_can_run(name: str, tmp_path: Path) -> None:
    plant, rng = PLANTS[name], random.Random(0)
    for task in plant.tasks:
        slow, around = plant.draw(rng, 0.01), plant.around(rng)
        config = build(TrainConfig, tree(task, slow | around, str(tmp_path), 40), "test")
        assert load_task(config.task, config.task_args, "test")
        is_same = tree(task, slow | around, str(tmp_path), 40) == tree(task, {}, str(tmp_path), 40)
        assert is_same is ("neighbours" in slow)


def test_every_task_has_a_healthy_configuration(tmp_path: Path) -> None:
    for task in TASKS:
        assert build(TrainConfig, tree(task, {}, str(tmp_path), 40), "test").batch_size == TASKS[task]["batch"]


def test_the_score_leaves_out_what_was_no_slowdown() -> None:
    right = {"kind": "slow loader", "right": True, "within_20_percent": True, "verified": 0.3, "profiler_right": False}
    wrong = {"kind": "slow loader", "right": False, "profiler_right": True}
    healthy = {"kind": None, "right": True, "profiler_right": True}
    rows = [{"busy": 0.0, **row} for row in (right, wrong, wrong | {"void": True}, healthy)]
    score = summary(rows)
    assert (score["cases"], score["void"], score["right_first"], score["within_20_percent"]) == (2, 1, 0.5, 1.0)
    assert (score["healthy_without_advice"], score["profiler_right_first"], score["busy"]) == (1.0, 0.5, 0.0)


def test_a_slow_dataset_gives_the_samples_of_the_task(tmp_path: Path) -> None:
    config = build(TrainConfig, tree("digits", {"plant.fetch_work_s": 1e-9}, str(tmp_path), 40), "test")
    task = load_task(config.task, config.task_args, "test")
    slow, plain = task.dataset("train"), type(task)({}).dataset("train")
    assert isinstance(slow, SlowData)
    assert len(slow) == len(plain)
    assert all((one == other).all() for one, other in zip(slow.__getitems__([3, 1]), plain[[3, 1]], strict=True))
    work(0.0)
