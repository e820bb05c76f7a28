"""The search space: every value is a training run, and Tune gets what was written."""

from __future__ import annotations

import importlib.util
import math
import types
from typing import Any

import pytest

from trainers.config.model import build
from trainers.errors import ConfigError
from tune.config import SweepConfig
from tune.objective import Objective
from tune.search.ray_search import BeatenScheduler, as_result, searcher, tune_space
from tune.search.space import Suggestion, check_space, grid, planned_trials, trial_config, unwrap, wrap
from tune.trials.record import TrialRecord

TRAIN: dict[str, Any] = {
    "task": "t:T",
    "epochs": 1,
    "global_batch_size": 8,
    "optimizer": {"name": "adamw", "lr": 0.1},
    "evaluate": {"every_epochs": 1},
}


def make(space: dict[str, Any], **more: Any) -> SweepConfig:
    tree = {"train": TRAIN, "space": space, "objective": {"metric": "val_loss"}, **more}
    return build(SweepConfig, tree, "sweep.yaml")


def random(space: dict[str, Any], trials: int = 5) -> SweepConfig:
    return make(space, search="random", budget={"trials": trials})


def test_a_grid_is_every_combination_in_order() -> None:
    config = make({"global_batch_size": [8, 16], "precision": ["fp32", "bf16"], "seed": [0]})
    assert grid(config) == [
        {"global_batch_size": 8, "precision": "fp32", "seed": 0},
        {"global_batch_size": 8, "precision": "bf16", "seed": 0},
        {"global_batch_size": 16, "precision": "fp32", "seed": 0},
        {"global_batch_size": 16, "precision": "bf16", "seed": 0},
    ]
    assert grid(random({"seed": [1, 2]})) == []


def test_how_many_trials_there_will_be() -> None:
    space = {"seed": [0, 1, 2], "precision": ["fp32", "bf16"]}
    assert planned_trials(make(space)) == 6
    assert planned_trials(make(space, budget={"trials": 4})) == 4
    assert planned_trials(make(space, budget={"trials": 40})) == 6
    assert planned_trials(random(space, 7)) == 7
    assert planned_trials(make(space, search="optuna", budget={"trials": 7})) == 7


def test_a_trial_is_the_run_with_its_values() -> None:
    config = trial_config(
        TRAIN, {"optimizer.lr": 0.5, "max_steps": 7, "evaluate.every_steps": 3, "clip_grad_norm": None}
    )
    assert (config.optimizer.lr, config.max_steps, config.epochs, config.clip_grad_norm) == (0.5, 7, None, None)
    assert (config.evaluate.every_steps, config.evaluate.every_epochs) == (3, None)
    assert TRAIN["optimizer"] == {"name": "adamw", "lr": 0.1}


@pytest.mark.parametrize(
    "config",
    [
        make({"global_batch_size": [1, 1000], "compile": ["off", "default"], "microbatch_size": ["auto", 4]}),
        make({"clip_grad_norm": [None, 1.0], "batch_size_per_worker": [4]}),
        random({"optimizer.lr": {"loguniform": [1e-5, 1.0]}, "global_batch_size": {"min": 1, "max": 4096}}),
        random({"optimizer.weight_decay": {"uniform": [0.0, 0.5]}, "optimizer.name": {"choice": ["sgd", "adam"]}}),
        random({"task_args.width": [1, 2], "lr_schedule.warmup": [0.1, 5]}),
    ],
    ids=lambda config: ",".join(config.space),
)
def test_a_good_space_passes(config: SweepConfig) -> None:
    check_space(config, TRAIN, "sweep.yaml")


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        (make({"optimizer.lr": [0.1, -1]}), "space.optimizer.lr", "greater than 0"),
        (make({"precison": ["fp32"]}), "space.precison", "did you mean `precision`?"),
        (make({"optimizer.momentom": [0.9]}), "space.optimizer.momentom", "there is no such key"),
        (make({"precision": ["fp32", "fp4"]}), "space.precision", "must be one of"),
        (make({"global_batch_size": [8, 0]}), "space.global_batch_size", "at least 1"),
        (random({"optimizer.lr": {"uniform": [-1.0, 1.0]}}), "space.optimizer.lr", "greater than 0"),
        (random({"global_batch_size": {"uniform": [8.0, 16.0]}}), "space.global_batch_size", "whole number"),
        (make({"scaling.num_workers": [1, 2]}), "space.scaling.num_workers", "cannot vary inside a sweep"),
        (make({"launcher": ["local"]}), "space.launcher", "cannot vary inside a sweep"),
        (make({"name": ["a"]}), "space.name", "cannot vary inside a sweep"),
    ],
)
def test_a_value_that_cannot_be_is_said_before_any_trial(config: SweepConfig, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_space(config, TRAIN, "sweep.yaml")
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"sweep.yaml: `{field}")
    assert words in line


def test_a_combination_that_cannot_be_is_named() -> None:
    config = make({"optimizer.name": ["sgd", "adamw"], "optimizer.momentum": [0.9]})
    with pytest.raises(ConfigError) as raised:
        check_space(config, {**TRAIN, "optimizer": {"name": "sgd", "lr": 0.1}}, "sweep.yaml")
    assert "has no effect with optimizer adamw" in str(raised.value)
    assert "space.optimizer.momentum" in str(raised.value) or "optimizer.name: adamw" in str(raised.value)


def test_a_grid_goes_to_tune_as_whole_trials() -> None:
    config = make({"seed": [0, 1, 2], "precision": ["fp32", "bf16"]}, budget={"trials": 4})
    space = tune_space(config)
    (values,) = space.values()
    found = [unwrap(dict.fromkeys(space, value)) for value in values["grid_search"]]
    assert [suggestion.trial for suggestion in found] == grid(config)[:4]


@pytest.mark.parametrize("more", [{}, {"purpose": "probe"}, {"member": "0123456789"}], ids=str)
def test_what_is_wrapped_for_tune_is_unwrapped_again(more: dict[str, Any]) -> None:
    suggestion = Suggestion({"seed": 1}, **more)
    assert unwrap(wrap(suggestion)) == suggestion
    assert unwrap({"seed": 1}) == Suggestion({"seed": 1})


def test_ranges_go_to_tune_with_their_bounds() -> None:
    config = random(
        {
            "optimizer.lr": {"loguniform": [1e-4, 1e-2]},
            "optimizer.weight_decay": {"uniform": [0.0, 0.5]},
            "global_batch_size": {"min": 3, "max": 5},
            "precision": ["fp32", "bf16"],
            "seed": {"choice": [7]},
        }
    )
    space = tune_space(config)
    drawn = [{key: domain.sample() for key, domain in space.items()} for _ in range(200)]
    assert {row["global_batch_size"] for row in drawn} == {3, 4, 5}  # both ends included
    assert {row["precision"] for row in drawn} == {"fp32", "bf16"}
    assert {row["seed"] for row in drawn} == {7}
    assert all(1e-4 <= row["optimizer.lr"] <= 1e-2 and 0 <= row["optimizer.weight_decay"] <= 0.5 for row in drawn)
    below = sum(row["optimizer.lr"] < 1e-3 for row in drawn)
    assert 60 < below < 140  # evenly in the logarithm
    for row in drawn[:20]:
        trial_config(TRAIN, unwrap(row).trial)


WIDE: dict[str, Any] = {
    "optimizer.lr": {"loguniform": [1e-6, 1.0]},
    "optimizer.weight_decay": {"uniform": [0.0, 0.5]},
    "global_batch_size": {"min": 3, "max": 500},
    "precision": ["fp32", "bf16"],
    "clip_grad_norm": {"choice": [None, 1.0]},
}


def optuna_trials(
    config: SweepConfig, count: int, before: list[tuple[dict[str, Any], list[float]]]
) -> list[dict[str, Any]]:
    """What optuna chooses when a trial's objective is its learning rate's distance from 1e-3, in decades."""
    search = searcher(config, 2, before)
    assert search.set_search_properties(None, None, tune_space(config))  # what the Tuner does
    found = []
    for number in range(count):
        trial = unwrap(search.suggest(str(number))).trial
        found.append(trial)
        search.on_trial_complete(str(number), {"objective": distance(trial), "training_iteration": 1})
    return found


def distance(trial: dict[str, Any]) -> float:
    return abs(math.log10(trial["optimizer.lr"]) + 3)


def test_optuna_learns_from_trials_and_goes_on_from_those_of_an_earlier_start() -> None:
    config = make(WIDE, search="optuna", budget={"trials": 60})
    first = optuna_trials(config, 30, [])
    for trial in first:
        assert trial_config(TRAIN, trial).optimizer.lr == trial["optimizer.lr"]
    before = [(trial, [distance(trial)]) for trial in first]
    before[3] = (first[3], [math.inf])  # ran out of memory
    resumed, anew = optuna_trials(config, 10, before), optuna_trials(config, 10, [])
    assert not any(trial in first for trial in resumed)
    assert anew == first[:10]  # the seed decides
    assert sum(map(distance, resumed)) < 0.6 * sum(map(distance, anew))


def test_optuna_with_several_objectives_goes_on_from_an_earlier_start() -> None:
    metrics = {"metrics": ["val_loss", "peak_memory_bytes"]}
    config = make(WIDE, search="optuna", budget={"trials": 60}, objective=metrics)

    def tried(count: int, before: list[tuple[dict[str, Any], list[float]]]) -> list[tuple[dict[str, Any], list[float]]]:
        search, found = searcher(config, 2, before), []
        assert search.set_search_properties(None, None, tune_space(config))
        for number in range(count):
            trial = unwrap(search.suggest(str(number))).trial
            values = [distance(trial), float(trial["global_batch_size"])]
            values = [math.inf, math.inf] if number == 3 else values  # ran out of memory
            search.on_trial_complete(str(number), {**as_result(values), "training_iteration": 1})
            found.append((trial, values))
        return found

    first = tried(30, [])
    resumed, anew = tried(15, first), tried(15, [])

    def beaten(rows: list[tuple[dict[str, Any], list[float]]]) -> int:
        return sum(any(a < x and b < y for _, (a, b) in first) for _, (x, y) in rows)

    assert beaten(resumed) < beaten(anew)


def test_optuna_that_is_not_installed_is_said_before_any_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        check_space(make(WIDE, search="optuna", budget={"trials": 3}), TRAIN, "sweep.yaml")
    assert str(raised.value) == (
        'sweep.yaml: `search` is "optuna", but the package optuna is not installed; '
        "run `pip install 'paceline[optuna]'`."
    )
    check_space(random(WIDE), TRAIN, "sweep.yaml")


def test_a_trial_is_stopped_once_a_finished_one_is_certain_to_beat_it() -> None:
    metrics = ["time_to_target", "peak_memory_bytes"]
    objective = Objective.model_validate({"metrics": metrics, "target": {"val_accuracy": 0.9}})
    records: dict[str, TrialRecord] = {}
    why: dict[str, str] = {}
    scheduler, trial = BeatenScheduler(objective, records, None, why), types.SimpleNamespace(trial_id="t")

    def goes_on(time_s: float) -> bool:
        row = {"train_time_s": time_s, "peak_memory_bytes": 100, "val_accuracy": 0.5, "status": "running"}
        return scheduler.on_trial_result(None, trial, row) == "CONTINUE"

    assert goes_on(5.0)
    records["f"] = TrialRecord("f", {}, "done", 0.0, 1.0, time_to_target_s=3.0, peak_memory_bytes=100)
    assert goes_on(5.1)
    assert not goes_on(5.3)
    assert "trial f" in why["t"]
