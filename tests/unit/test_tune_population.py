"""The population: the same trials in every start, values that stay in the space, lines that are found again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainers.config.model import build
from trainers.errors import CheckpointError, ConfigError
from trainers.storage import Storage
from tune.config import SweepConfig, may_change
from tune.lanes.mailbox import Mailbox
from tune.lanes.messages import Assignment
from tune.search.population import population, within
from tune.search.ray_search import member_name, population_scheduler, population_space
from tune.search.space import Suggestion, unwrap, wrap
from tune.trials.journal import Journal, Stage
from tune.trials.record import TrialRecord

SPACE: dict[str, Any] = {
    "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
    "optimizer.weight_decay": {"uniform": [0.0, 0.1]},
    "optimizer.betas": {"choice": [[0.9, 0.999], [0.8, 0.99]]},
    "clip_grad_norm": [0.5, 1.0],
    "global_batch_size": {"min": 8, "max": 64},
    "precision": ["fp32", "bf16"],
}


def make(**changes: Any) -> SweepConfig:
    tree = {
        "train": "train.yaml",
        "space": SPACE,
        "objective": {"metric": "val_loss"},
        "search": "random",
        "scheduler": "pbt",
        "budget": {"trials": 40},
    }
    return build(SweepConfig, tree | changes, "sweep.yaml")


CURVE = [{"step": 4.0, "epoch": 1.0, "train_time_s": 0.5, "val_loss": 0.5}]


def stage(trial: str, number: int, **more: Any) -> Stage:
    return Stage(trial, number, {"optimizer.lr": 0.1}, 1.0, **more)


def test_a_population_is_drawn_from_the_space_and_the_same_in_every_start() -> None:
    found = population(make())
    assert found == population(make())
    assert found != population(make(seed=1))
    assert population(make(budget={"trials": 50}))[:40] == found, "a larger budget adds trials"
    assert len({name for name, _ in found}) == 40
    assert {trial["precision"] for _, trial in found} == {"fp32", "bf16"}
    rates = [trial["optimizer.lr"] for _, trial in found]
    assert min(rates) >= 1e-4
    assert max(rates) <= 1e-1
    assert sum(rate < 3e-3 for rate in rates) > 10, "evenly in the logarithm"
    sizes = {trial["global_batch_size"] for _, trial in found}
    assert all(type(size) is int and 8 <= size <= 64 for size in sizes)


def test_trials_that_begin_alike_are_still_two() -> None:
    found = population(make(space={"optimizer.lr": [0.1]}, budget={"trials": 3}))
    assert len({name for name, _ in found}) == 3


def test_a_grid_is_a_population() -> None:
    config = make(space={"optimizer.lr": [0.1, 0.2], "seed": [1, 2]}, search="grid", budget={"trials": 3})
    assert [tuple(trial.values()) for _, trial in population(config)] == [(0.1, 1), (0.1, 2), (0.2, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_what_ray_makes_of_a_trial_stays_in_the_space_and_keeps_what_must_not_change(seed: int) -> None:
    """By Ray's own code, which multiplies by 0.8 or 1.2 without a bound: over many rounds."""
    import random

    from ray.tune.schedulers.pbt import _explore

    config = make(pbt={"resample_probability": 0.1})
    scheduler = population_scheduler(config)
    random.seed(seed)
    name, trial = population(config)[seed]
    tune_config = wrap(Suggestion(trial, member=name))
    seen = set()
    for _ in range(60):
        tune_config, _ = _explore(
            tune_config, scheduler._hyperparam_mutations, 0.1, (1.2, 0.8), scheduler._custom_explore_fn
        )
        assert unwrap(tune_config).member == name
        values = unwrap(tune_config).trial
        assert values == within(config, values)
        assert 1e-4 <= values["optimizer.lr"] <= 1e-1
        assert 0.0 <= values["optimizer.weight_decay"] <= 0.1
        assert values["optimizer.betas"] in SPACE["optimizer.betas"]["choice"]
        assert values["clip_grad_norm"] in (0.5, 1.0)
        assert {key: values[key] for key in values if not may_change(key)} == {
            key: trial[key] for key in trial if not may_change(key)
        }
        seen.add(values["optimizer.lr"])
    assert len(seen) > 20
    assert config.space["optimizer.lr"].loguniform == [1e-4, 1e-1]  # type: ignore[union-attr]


def test_a_resumed_population_goes_on_with_the_values_that_it_had_last(tmp_path: Path) -> None:
    config, journal = make(budget={"trials": 3}), Journal(Storage(str(tmp_path)))
    first, second, third = (name for name, _ in population(config))
    journal.write_stage(stage(second, 0, ended=True))
    journal.write_stage(replace(stage(second, 1), config={"optimizer.lr": 0.05}))
    space = population_space(config, journal)
    (values,) = space.values()
    members = [dict.fromkeys(space, value) for value in values["grid_search"]]
    assert [unwrap(member).member for member in members] == [first, second, third]
    assert unwrap(members[1]).trial == {"optimizer.lr": 0.05}
    assert unwrap(members[2]).trial == dict(population(config))[third]
    trial = type("Trial", (), {"config": members[1]})
    assert member_name(trial) == second


def test_stages_are_found_again_in_their_order(tmp_path: Path) -> None:
    journal = Journal(Storage(str(tmp_path)))
    assert journal.newest_stage("a") is None
    for number in (0, 9, 10, 100):
        journal.write_stage(stage("a", number, source="b/00003", curve=CURVE))
        journal.stage_directory(f"a/{number:05d}").write("file", b"")
    newest = journal.newest_stage("a")
    assert newest == stage("a", 100, source="b/00003", curve=CURVE)
    ended = replace(newest, ended=True)
    journal.write_stage(ended)
    assert Journal(Storage(str(tmp_path))).newest_stage("a") == journal.stage("a/00100") == ended
    assert journal.records() == []
    with pytest.raises(CheckpointError, match=r"b/00003 is no stage of a trial"):
        journal.stage("b/00003")
    (tmp_path / "population" / "a" / "00100.json").write_text('{"trial": ')
    with pytest.raises(CheckpointError, match="is no stage of a trial"):
        journal.newest_stage("a")


def test_a_record_says_whose_weights_it_has() -> None:
    record = TrialRecord("a", {}, "done", 0.0, 1.0)
    assert record.exploited_from is None
    own = {"trial": "a", "step": 0, "epoch": 0.0, "config": {}}
    assert replace(record, schedule=[own]).exploited_from is None
    assert replace(record, schedule=[{**own, "trial": "b"}, own]).exploited_from == "b"


def test_the_mailbox_knows_which_runs_are_still_begun_with() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        for ticket, source in (("a", "one"), ("b", "two"), ("c", None)):
            await mailbox.submit(Assignment(ticket, ticket, {}, storage=Storage(f"runs/{ticket}"), source=source))
        assert await mailbox.sources() == {"one", "two"}
        await mailbox.take(0, 1)
        assert await mailbox.sources() == {"one", "two"}
        await mailbox.end(0, "a", {"status": "stopped"})
        assert await mailbox.sources() == {"two"}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"space": {"global_batch_size": [8, 16]}}, "scheduler", "needs a key in the space that may change in mid-run"),
        ({"space": {"optimizer.name": ["sgd"]}}, "scheduler", "needs a key in the space"),
        ({"search": "optuna"}, "search", "cannot draw a population"),
        ({"objective": {"metric": "samples_per_s"}}, "objective.metric", "is not known at every evaluation"),
        (
            {"objective": {"metric": "time_to_target", "target": {"val_loss": 1.0}}},
            "objective.metric",
            "is not known at every evaluation",
        ),
        ({"finalists": {"count": 3}}, "finalists.count", "has no effect with scheduler pbt"),
        (
            {"objective": {"metric": "val_loss", "target": {"val_loss": 0.1}, "train_to": "target"}},
            "objective.train_to",
            "no effect",
        ),
        ({"pbt": {"quantile_fraction": 0.6}}, "pbt.quantile_fraction", "0.5"),
        ({"pbt": {"perturbation_interval": 0}}, "pbt.perturbation_interval", "greater than 0"),
        ({"pbt": {"interval": 2}}, "pbt.interval", "there is no such key"),
        ({"scheduler": "asha", "pbt": {"quantile_fraction": 0.5}}, "pbt", "has no effect without PBT"),
    ],
)
def test_what_cannot_be_a_population(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert caught.value.field == field
    assert words in str(caught.value)
