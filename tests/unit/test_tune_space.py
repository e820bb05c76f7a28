"""The search space: every value is a training run, and Tune gets what was written."""

import math
import types

import pytest

from tests.specs import error_of
from tests.unit.report_records import config as sweep_config
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import ConfigError
from tune.config import SweepConfig
from tune.search.ray_search import (
    AshaScheduler,
    BeatenScheduler,
    searcher,
    so_far,
    tune_space,
)
from tune.search.space import check_space, grid, trial_tree, unwrap
from tune.trials.record import TrialRecord, trial_id

TRAIN = {
    "task": "t:T",
    "epochs": 1,
    "global_batch_size": 8,
    "optimizer": {"name": "adamw", "lr": 0.1},
    "evaluate": {"every_epochs": 1},
}


def make(space, **more):
    tree = {
        "train": TRAIN,
        "space": space,
        "objective": {"metric": "val_loss"},
        **more,
    }
    return build(SweepConfig, tree, "sweep.yaml")


def random(space):
    return make(space, search="random", budget={"trials": 5})


def run_of(trial):
    return build(TrainConfig, trial_tree(TRAIN, trial), "space")


def test_a_grid_is_every_combination_in_order_and_tune_gets_what_the_budget_allows():
    space = {"seed": [0, 1, 0], "precision": ["fp32", "bf16"]}
    trials = [
        {"seed": seed, "precision": precision}
        for seed in (0, 1)
        for precision in ("fp32", "bf16")
    ]
    assert grid(make(space)) == trials
    assert grid(random(space)) == []
    ((key, values),) = tune_space(make(space, budget={"trials": 3})).items()
    assert [unwrap({key: value}) for value in values["grid_search"]] == trials[
        :3
    ]
    assert unwrap({"seed": 1}) == {"seed": 1}, "as Tune draws it, key by key"


def test_a_trial_is_the_run_with_its_values():
    config = run_of(
        {
            "optimizer.lr": 0.5,
            "max_steps": 7,
            "evaluate.every_steps": 3,
            "clip_grad_norm": None,
        }
    )
    assert (
        config.optimizer.lr,
        config.max_steps,
        config.epochs,
        config.clip_grad_norm,
    ) == (0.5, 7, None, None)
    assert (config.evaluate.every_steps, config.evaluate.every_epochs) == (
        3,
        None,
    )
    assert TRAIN["optimizer"] == {"name": "adamw", "lr": 0.1}


def test_a_key_is_set_in_the_section_that_the_same_trial_sets():
    """A trial's id is the same in either order of its keys, and so is its run."""
    section = {"optimizer": {"name": "sgd", "lr": 0.1}}
    for trial in (
        section | {"optimizer.lr": 0.5},
        {"optimizer.lr": 0.5} | section,
    ):
        name = trial_id(trial)
        optimizer = run_of(trial).optimizer
        assert (optimizer.name, optimizer.lr) == ("sgd", 0.5)
        assert trial_id(trial) == name, "the run shares nothing with its trial"


@pytest.mark.parametrize(
    "config",
    [
        make(
            {
                "global_batch_size": [1, 1000],
                "compile": ["off", "default"],
                "microbatch_size": ["auto", 4],
            }
        ),
        make({"clip_grad_norm": [None, 1.0], "batch_size_per_worker": [4]}),
        random(
            {
                "optimizer.lr": {"loguniform": [1e-5, 1.0]},
                "global_batch_size": {"min": 1, "max": 4096},
            }
        ),
        random(
            {
                "optimizer.weight_decay": {"uniform": [0.0, 0.5]},
                "optimizer.name": {"choice": ["sgd", "adam"]},
            }
        ),
    ],
    ids=lambda config: ",".join(config.space),
)
def test_a_good_space_passes(config):
    check_space(config, TRAIN, "sweep.yaml")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (make({"optimizer.lr": [0.1, -1]}), "space.optimizer.lr"),
        (make({"precison": ["fp32"]}), "space.precison"),
        (make({"precision": ["fp32", "fp4"]}), "space.precision"),
        (
            random({"optimizer.lr": {"uniform": [-1.0, 1.0]}}),
            "space.optimizer.lr",
        ),
        (
            random({"global_batch_size": {"uniform": [8.0, 16.0]}}),
            "space.global_batch_size",
        ),
        (make({"scaling.num_workers": [1, 2]}), "space.scaling.num_workers"),
        (make({"task_args.drops": [[{0: 1.0}]]}), "space.task_args.drops"),
        (make({"name": ["a"]}), "space.name"),
        (
            make(
                {
                    "optimizer.name": ["sgd", "adamw"],
                    "optimizer.momentum": [0.9],
                }
            ),
            "space.optimizer.momentum",
        ),
    ],
)
def test_a_value_or_combination_that_cannot_be_is_named_before_any_trial(
    config, field
):
    with pytest.raises(ConfigError) as raised:
        check_space(config, TRAIN, "sweep.yaml")
    assert (raised.value.field, raised.value.source) == (field, "sweep.yaml")


WIDE = {
    "optimizer.lr": {"loguniform": [1e-6, 1.0]},
    "optimizer.weight_decay": {"uniform": [0.0, 0.5]},
    "global_batch_size": {"min": 3, "max": 5},
    "precision": ["fp32", "bf16"],
    "clip_grad_norm": {"choice": [None, 1.0]},
}


def test_ranges_go_to_tune_with_their_bounds():
    space = tune_space(random(WIDE))
    other = tune_space(random(dict(reversed(WIDE.items()))))
    assert list(other) == list(space), "the same trials are drawn"
    drawn = [
        {key: domain.sample() for key, domain in space.items()}
        for _ in range(200)
    ]
    assert {row["global_batch_size"] for row in drawn} == {3, 4, 5}, (
        "both ends included"
    )
    assert {row["precision"] for row in drawn} == {"fp32", "bf16"}
    assert {row["clip_grad_norm"] for row in drawn} == {None, 1.0}
    assert all(
        1e-6 <= row["optimizer.lr"] <= 1
        and 0 <= row["optimizer.weight_decay"] <= 0.5
        for row in drawn
    )
    assert 60 < sum(row["optimizer.lr"] < 1e-3 for row in drawn) < 140, (
        "evenly in the logarithm"
    )
    for row in drawn[:20]:
        run_of(unwrap(row))


def optuna_trials(config, count, before):
    """What optuna chooses when a trial's objective is its learning rate's
    distance from 1e-3, in decades.
    """
    search = searcher(config, 2, before)
    assert search.set_search_properties(
        None, None, tune_space(config)
    )  # what the Tuner does
    found = []
    for number in range(count):
        trial = unwrap(search.suggest(str(number)))
        found.append(trial)
        search.on_trial_complete(
            str(number),
            {"objective": distance(trial), "training_iteration": 1},
        )
    return found


def distance(trial):
    return abs(math.log10(trial["optimizer.lr"]) + 3)


def test_optuna_learns_from_trials_and_goes_on_from_those_of_an_earlier_start():
    config = make(WIDE, search="optuna", budget={"trials": 60})
    first = optuna_trials(config, 30, [])
    before = [
        TrialRecord(
            trial_id(trial),
            trial,
            "done",
            0.0,
            1.0,
            metrics={"val_loss": distance(trial)},
        )
        for trial in first
    ]
    before[3] = TrialRecord(before[3].id, first[3], "out_of_memory", 0.0, 1.0)
    outside = {**first[0], "optimizer.lr": 9.0}
    before.append(TrialRecord("outside", outside, "done", 0.0, 1.0))
    resumed = optuna_trials(config, 10, before)
    anew = optuna_trials(config, 10, [])
    assert not any(trial in first for trial in resumed)
    assert anew == first[:10], "the seed decides"
    assert sum(map(distance, resumed)) < 0.6 * sum(map(distance, anew))


def test_optuna_that_is_not_installed_is_said_before_any_trial(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with error_of("search", "pip install"):
        check_space(
            make(WIDE, search="optuna", budget={"trials": 3}),
            TRAIN,
            "sweep.yaml",
        )


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_a_key_that_optuna_takes_for_a_path_is_refused(search):
    key = "task_args.a/b"
    config = make({key: [1, 2]}, search=search, budget={"trials": 3})
    if search == "random":
        check_space(config, TRAIN, "sweep.yaml")
        return
    with error_of(f"space.{key}"):
        check_space(config, TRAIN, "sweep.yaml")


@pytest.mark.parametrize(
    ("trained_s", "finished_s", "accuracy", "goes_on"),
    [
        (100.0, None, 0.5, True),  # nothing has ended yet
        (
            240.0,
            100.0,
            0.5,
            True,
        ),  # runs of one configuration may differ by that
        (260.0, 100.0, 0.5, False),
        (260.0, 100.0, 0.98, True),  # it ends here by itself
        (9.0, 1.0, 0.5, True),  # not worth it
    ],
)
def test_a_trial_is_stopped_once_another_is_certain_to_beat_it(
    trained_s, finished_s, accuracy, goes_on
):
    records = {
        "f": TrialRecord(
            "f", {}, "done", 0.0, 1.0, time_to_target_s=finished_s
        )
    }
    why = {}
    scheduler = BeatenScheduler(sweep_config().objective, records, why)
    row = {"train_time_s": trained_s, "val_accuracy": accuracy}
    found = scheduler.on_trial_result(
        None, types.SimpleNamespace(trial_id="t"), row
    )
    assert (found == "CONTINUE") is goes_on
    assert ("trial f" in why.get("t", "")) is not goes_on


@pytest.mark.parametrize(
    ("losses", "goes_on"),
    [
        ([0.9], True),
        ([1.1], False),
        ([None, 0.9], True),
        ([None, 1.1], False),
        ([None, None], True),
    ],
)
def test_asha_compares_evaluations_of_the_same_number_after_a_resume(
    losses, goes_on
):
    """An ended trial's last loss is 0.1: no other trial has that at its first one."""
    objective = sweep_config("val_loss").objective
    rows = [{"val_loss": 1.0}, {"val_loss": 0.1}]
    known = TrialRecord("known", {}, "done", 0.0, 1.0, curve=rows)
    scheduler = AshaScheduler(objective, {"known": known}, None)
    ended, running = (types.SimpleNamespace(trial_id=name) for name in "ab")
    scheduler.on_trial_add(None, ended)
    scheduler.on_trial_add(None, running)
    last = {"trial": "known", "training_iteration": 1, "objective": 0.1}
    scheduler.on_trial_complete(None, ended, last)
    curve = []
    for count, loss in enumerate(losses, start=1):
        curve.append({} if loss is None else {"val_loss": loss})
        row = {
            "training_iteration": count,
            "objective": so_far(objective, curve, None),
        }
        found = scheduler.on_trial_result(None, running, row)
    assert (found == "CONTINUE") is goes_on


def test_only_a_race_to_a_target_ends_beaten_trials():
    assert sweep_config().ends_beaten
    assert not sweep_config("val_loss").ends_beaten
    assert not sweep_config(scheduler="asha").ends_beaten
    assert not sweep_config(space={"seed": [1, 2]}).ends_beaten
