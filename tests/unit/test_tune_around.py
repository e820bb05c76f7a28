"""A rate that is searched around its own value for each batch size: which
trials it takes, and what is said of it.
"""

import math
import random

import pytest

from tests.specs import error_of
from tests.unit.report_records import config, trial
from trainers.config.yaml import parse_mapping
from tune.config import SweepConfig
from tune.report.answer import answer
from tune.search.ray_search import num_samples, searcher, tune_space
from tune.search.space import (
    is_inside,
    known_space,
    next_trials,
    open_trials,
    planned_trials,
    score,
    scores_of,
)
from tune.sweeps.spec import is_complete, sweep_with
from tune.trials.journal import Journal
from tune.trials.record import trial_id

SIZES = [32, 128, 512]
SPACE = {"global_batch_size": SIZES, "optimizer.lr": {"around": 0.004}}
RULE = 0.004


def around(metric="val_loss", **changes):
    return config(
        metric, **{"space": SPACE, "objective": {"target": None}} | changes
    )


def loss(given, best):
    return (
        math.log2(given["optimizer.lr"] / best[given["global_batch_size"]])
        ** 2
    )


def record(given, value, **more):
    metrics = {} if value is None else {"val_loss": value}
    return trial(0, more.pop("status", "done"), given, metrics=metrics, **more)


def run_all(sweep, best, draw, lanes):
    """The trials that Tune would run, several at a time, which end in any order."""
    search = searcher(sweep, lanes)
    running = {}
    found = []
    while True:
        name = str(len(found))
        proposed = search.suggest(name)
        if proposed == "FINISHED":
            assert not running
            return found
        if proposed is not None:
            running[name] = proposed
            found.append(proposed)
            continue
        assert running, "else it would wait for ever"
        ended = draw.choice(list(running))
        value = loss(running.pop(ended), best)
        search.on_trial_complete(
            ended, {"objective": value, "val_loss": value, "status": "done"}
        )


@pytest.mark.parametrize("seed", range(12))
def test_it_ends_with_the_best_rate_of_each_size_between_worse_ones(seed):
    draw = random.Random(seed)
    best = {size: RULE * 2.0 ** draw.uniform(-4.9, 4.9) for size in SIZES}
    found = run_all(around(), best, draw, lanes=draw.randint(1, 5))
    assert len({trial_id(one) for one in found}) == len(found), "none twice"
    records = [record(one, loss(one, best)) for one in found]
    for size in SIZES:
        own = [
            one for one in records if one.config["global_batch_size"] == size
        ]
        first = min(own, key=lambda one: one.metrics["val_loss"])
        assert abs(math.log2(first.config["optimizer.lr"] / best[size])) <= 0.5
        assert is_inside(around(), own, first.config)
        assert len(own) <= 3 + abs(round(math.log2(best[size] / RULE))), (
            "and no more than lead to it"
        )
    in_order = run_all(around(), best, random.Random(0), lanes=1)
    assert sorted(map(trial_id, found)) == sorted(map(trial_id, in_order)), (
        "whichever ends first"
    )


def test_the_rules_rates_come_first_then_their_neighbours():
    trials = next_trials(around(), {})
    assert [one["optimizer.lr"] for one in trials] == [RULE] * 3 + [
        2 * RULE,
        RULE / 2,
    ] * 3
    assert [one["global_batch_size"] for one in trials[:3]] == SIZES
    assert planned_trials(around()) == len(trials)
    assert tune_space(around()) == {}


@pytest.mark.parametrize("direction", [1, -1])
def test_it_gives_up_after_six_doublings(direction):
    best = dict.fromkeys(SIZES, RULE * 2.0 ** (direction * 40))
    found = run_all(around(), best, random.Random(0), lanes=2)
    assert len(found) == 3 * 8
    furthest = max(abs(math.log2(one["optimizer.lr"] / RULE)) for one in found)
    assert furthest == 6


def test_a_failed_trial_is_the_worst_and_without_a_value_the_metric_of_the_target_decides():
    objective = config().objective
    reached = score(objective, 3.0, {"val_accuracy": 0.97})
    near, far = (
        score(objective, None, {"val_accuracy": value})
        for value in (0.96, 0.5)
    )
    nothing = score(objective, math.inf, {"val_accuracy": math.nan})
    assert reached < near < far < nothing
    failed = record(
        {"global_batch_size": 32, "optimizer.lr": RULE}, 0.1, status="diverged"
    )
    assert list(scores_of(around().objective, [failed]).values()) == [nothing]
    assert score(around("val_accuracy").objective, 0.9, {}) < score(
        around("val_accuracy").objective, 0.8, {}
    )


def test_a_search_whose_trials_all_fail_ends():
    search = searcher(around(), 4)
    for number in range(9):
        search.suggest(str(number))
        search.on_trial_complete(str(number), None, error=True)
    assert search.suggest("9") == "FINISHED"


def spec(path, **changes):
    tree = {
        "train": {
            "task": "examples.digits.task:Digits",
            "epochs": 1,
            "global_batch_size": 8,
            "optimizer": {"lr": RULE},
        },
        "space": {"global_batch_size": SIZES, "optimizer.lr": "around"},
        "storage_path": str(path),
        **changes,
    }
    return sweep_with(tree, "sweep.yaml", None, {})


def test_a_sweep_is_complete_when_every_best_rate_is_inside_or_the_budget_is_used_up(
    tmp_path,
):
    sweep = spec(tmp_path)
    small = spec(tmp_path, budget={"trials": 4})
    assert sweep.config.space == around().space, (
        "the word has become the run's own rate"
    )
    assert (
        sweep_with(sweep.saved(), "saved", None, {}).config.space
        == sweep.config.space
    ), "as resume reads it"
    assert (
        num_samples(small.config, 0),
        sweep.num_trials,
        small.num_trials,
    ) == (
        4,
        9,
        4,
    )
    best = {32: RULE, 128: RULE * 4, 512: RULE / 2}
    journal = Journal(sweep.storage)
    count = 0
    while wanted := open_trials(sweep.config, journal.records()):
        assert not is_complete(sweep)
        assert is_complete(small) is (count >= 4)
        journal.append(record(wanted[-1], loss(wanted[-1], best)))
        count += 1
    assert is_complete(sweep)
    assert count == 9 + 2 + 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ("space: {global_batch_size: around, optimizer.lr: around}", "space"),
        ("space: {optimizer.lr: {around: -1.0}}", "space.optimizer.lr.around"),
        ("space: {optimizer.lr: {around: near}}", "space.optimizer.lr.around"),
        ("space: {optimizer.lr: arround}", "space.optimizer.lr"),
        ("space: {optimizer.name: around}", "space.optimizer.name"),
        ("space: {clip_grad_norm: around}", "space.clip_grad_norm"),
        ("{search: random, budget: {trials: 3}}", "search"),
        ("objective: {metric: samples_per_s}", "objective.metric"),
        ("space: {optimizer.lr: around, seed: [0, 1]}", "space"),
    ],
)
def test_what_cannot_be_searched_around_is_refused(changes, field, tmp_path):
    with error_of(field):
        spec(tmp_path, **parse_mapping(changes, "test"))


def test_a_functions_rate_is_found_below_its_own_name():
    train = {"train_func": "m:f", "train_loop_config": {"lr": 1}}
    [values] = known_space(
        SweepConfig.model_validate(
            {"train": train, "space": {"train_loop_config.lr": "around"}}
        ).space,
        train,
        "f",
    ).values()
    assert not isinstance(values, list)
    assert values.start == 1.0


def told(times):
    """What is said of the largest size by the times to the target of (size,
    rate as a multiple of the rule's).
    """
    records = [
        trial(
            number,
            "done",
            {"global_batch_size": size, "optimizer.lr": RULE * step},
            time_to_target_s=time_s,
            metrics={
                "val_accuracy": 0.97
                if time_s
                else 0.9 - abs(math.log2(step)) / 10
            },
        )
        for number, ((size, step), time_s) in enumerate(times.items())
    ]
    return answer(config(space=SPACE), records).largest


SMALL = {(32, 0.5): 3.0, (32, 1.0): 2.0, (32, 2.0): 4.0}


@pytest.mark.parametrize(
    ("largest", "words"),
    [
        (
            {(512, 0.5): 9.0, (512, 1.0): 6.0, (512, 2.0): 8.0},
            "lost because of its size, not its lr: with its best lr, 0.004, it needs 6 s.",
        ),
        (
            {(512, 0.5): None, (512, 1.0): None, (512, 2.0): None},
            "lost because of its size, not its lr: with its best lr, 0.004, it does not reach val_accuracy 0.97.",
        ),
        (
            {
                (512, 0.5): None,
                (512, 1.0): 6.0,
                (512, 2.0): 2.1,
                (512, 4.0): 3.0,
            },
            "is as good as the best: its best lr is 0.008, and the search began with 0.004.",
        ),
        (
            {(512, 0.5): 3.0, (512, 1.0): 1.0, (512, 2.0): 3.0},
            "is as good as the best: its best lr is 0.004, and the search began with 0.004.",
        ),
        (
            {(512, 0.5): 9.0, (512, 1.0): 8.0, (512, 2.0): 6.0},
            "lost because of its lr or its size: nothing beyond its best lr, 0.008, was tried.",
        ),
    ],
)
def test_the_answer_says_whether_the_largest_size_lost_to_its_rate(
    largest, words
):
    said = told({**SMALL, **largest})
    assert said.endswith(words)
    assert "largest batch, 512," in said


def test_nothing_is_said_where_the_largest_was_not_tried_or_rates_are_listed():
    assert told(SMALL) == ""
    assert (
        answer(
            config(),
            [
                trial(
                    0, "done", {"global_batch_size": 512}, time_to_target_s=1.0
                )
            ],
        ).largest
        == ""
    )
