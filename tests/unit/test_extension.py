"""A sweep goes on with another configuration: which records stay, which trials
go on, and what is refused.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.specs import REPOSITORY, dotted, error_of
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError, StorageError
from trainers.lease import held
from trainers.storage import Storage
from tune.__main__ import main
from tune.sweeps import sweep as sweep_module
from tune.sweeps.spec import (
    SAVED,
    Interrupted,
    is_complete,
    num_missing,
    prepare,
    read_kept,
    read_saved,
    read_sweep,
)
from tune.sweeps.steer import apply_extension, order_extension, steer
from tune.sweeps.sweep import (
    SweepInterrupted,
    pending_extension,
    run_to_answer,
)
from tune.trials.journal import (
    PROGRESS,
    Journal,
    Live,
    Running,
    read_live,
    write_live,
)
from tune.trials.record import BY_BUDGET, TrialRecord, trial_id

TRAIN: dict[str, Any] = {
    "task": "tests.tasks:Blobs",
    "task_dir": str(REPOSITORY),
    "epochs": 4,
    "optimizer": {"lr": 0.1},
    "launcher": "local",
}
REACHED = [0.5, 0.7, 0.8, 0.9]
NEVER = [0.5, 0.6, 0.6, 0.7]


def begin(tmp_path, train=None, **keys):
    """A sweep in its directory."""
    space = {"global_batch_size": [8, 16]}
    tree = {
        "name": "many",
        "storage_path": str(tmp_path),
        "train": TRAIN | (train or {}),
        "space": space,
    } | keys
    (tmp_path / "sweep.yaml").write_text(dump_yaml(tree))
    spec = read_sweep(str(tmp_path / "sweep.yaml"), {})
    prepare(spec, fresh=False)
    return spec


def record(config, accuracies, status="done", purpose="trial"):
    """A trial that was evaluated after each epoch, of a second and ten steps."""
    curve = [
        {
            "step": 10.0 * epoch,
            "epoch": float(epoch),
            "train_time_s": float(epoch),
            "val_accuracy": accuracy,
        }
        for epoch, accuracy in enumerate(accuracies, 1)
    ]
    name = trial_id(config, purpose)
    return TrialRecord(
        name,
        config,
        status,
        1.0,
        2.0,
        curve=curve,
        metrics=dict(curve[-1]),
        purpose=purpose,
    )


def extended(spec, records, **keys):
    """The records that are left once the sweep is extended; dots are `__`."""
    journal = Journal(spec.storage)
    for one in records:
        journal.append(one)
    before = spec.storage.read(SAVED)
    longer = order_extension(
        spec.uri,
        dotted(keys),
    )
    apply_extension(longer)
    once = by_id(journal.records())
    after = spec.storage.read(SAVED)
    spec.storage.write(
        SAVED, before
    )  # as if it had been killed just before it was written
    apply_extension(longer)
    assert by_id(journal.records()) == once
    assert spec.storage.read(SAVED) == after
    assert num_missing(longer.config, list(once.values())) == num_missing(
        read_saved(spec.uri).config, journal.records()
    )
    return once


def by_id(records):
    return {one.id: one for one in records}


def test_more_points_leave_what_is_known(tmp_path):
    spec = begin(tmp_path)
    known = [record({"global_batch_size": size}, NEVER) for size in (8, 16)]
    left = extended(
        spec, known, space__global_batch_size=[8, 16, 32], budget__trials=3
    )
    assert left == by_id(known)
    again = read_saved(spec.uri)
    assert again.config.space["global_batch_size"] == [8, 16, 32]
    assert num_missing(again.config, known) == 1
    with pytest.raises(
        ConfigError
    ) as raised:  # the file that it was begun with is another sweep by now
        prepare(read_sweep(str(tmp_path / "sweep.yaml"), {}), fresh=False)
    assert f"python -m tune {spec.uri}" in str(raised.value)


def test_trials_are_longer_that_were_trained_to_their_end(tmp_path):
    """Those that ended early by their own evaluations, by the search, by hand
    or by an error would end so again.
    """
    spec = begin(
        tmp_path, {"global_batch_size": 8}, space={"seed": [1, 2, 3, 4, 5, 6]}
    )
    whole, early = (
        record({"seed": seed}, NEVER[:epochs])
        for seed, epochs in ((1, 4), (2, 3))
    )
    failed = record({"seed": 3}, NEVER[:2], "error")
    stopped = record({"seed": 4}, NEVER[:2], "stopped")
    clone = record({"seed": 1}, NEVER, purpose="clone")
    left = extended(
        spec, [whole, early, failed, stopped, clone], train__epochs=8
    )
    assert left == by_id([early, failed, stopped])
    kept = [
        name for name in spec.storage.names("before") if name.endswith(".json")
    ]
    assert {name.partition("-")[0] for name in kept} == {whole.id, clone.id}
    assert read_saved(spec.uri).train["epochs"] == 8


@pytest.mark.parametrize(
    ("budget_s", "is_kept"), [(5.0, True), (10.0, True), (60.0, False)]
)
def test_a_larger_budget_is_for_what_the_old_one_cut_off(
    tmp_path, budget_s, is_kept
):
    spec = begin(tmp_path, budget={"time_s": 10})
    whole = record({"global_batch_size": 8}, NEVER)
    cut = record({"global_batch_size": 16}, NEVER[:2], "stopped")
    cut = replace(cut, message=BY_BUDGET)
    known = extended(spec, [whole, cut], budget__time_s=budget_s, lanes=1)
    assert whole.id in known
    assert (cut.id in known) is is_kept


def test_a_length_of_the_space_stays_that_of_its_trials(tmp_path):
    spec = begin(tmp_path, space={"epochs": [3, 4], "global_batch_size": [8]})
    known = [
        record({"epochs": epochs, "global_batch_size": 8}, NEVER[:epochs])
        for epochs in (3, 4)
    ]
    assert extended(spec, known, space__epochs=[3, 4, 8]) == by_id(known)


@pytest.mark.parametrize(
    ("then", "now", "goes_on"),
    [
        (
            ("val_accuracy", None),
            ("time_to_target", 0.7),
            False,
        ),  # 16 was trained to its end, and nothing more is known
        (("time_to_target", 0.9), ("time_to_target", 0.8), False),
        (
            ("time_to_target", 0.8),
            ("time_to_target", 0.9),
            True,
        ),  # it ended at the target of then
        (("time_to_target", 0.8), ("val_accuracy", None), True),
    ],
)
def test_another_objective_looks_at_what_was_recorded(
    tmp_path, then, now, goes_on
):
    def objective(of):
        metric, target = of
        if target is None:
            return {"metric": metric}
        return {"metric": metric, "target": {"val_accuracy": target}}

    spec = begin(tmp_path, objective=objective(then), usd_per_hour=3600.0)
    end = 3 if then[1] == 0.8 else 4
    reached = record({"global_batch_size": 8}, REACHED[:end])
    if then[1] is not None:
        reached = replace(reached, time_to_target_s=float(end))
    missed = record({"global_batch_size": 16}, [*NEVER[:3], 0.65])
    changes = {
        f"objective__{key}": value for key, value in objective(now).items()
    }
    left = extended(spec, [reached, missed], **changes)
    assert missed.id in left
    assert (reached.id not in left) is goes_on
    for one in left.values():
        expected = None
        if one.id == reached.id and now[1] is not None:
            expected = REACHED.index(now[1]) + 1
        assert one.time_to_target_s == expected
        assert one.metrics.get("usd_to_target") == expected


def test_a_function_goes_on_that_ended_at_the_target_of_then(
    tmp_path, monkeypatch
):
    train = {"train_func": "tests.tasks:Blobs", "train_loop_config": {"a": 1}}
    monkeypatch.setitem(globals(), "TRAIN", train)
    objective = {"metric": "time_to_target", "target": {"val_accuracy": 0.8}}
    trial = {"train_loop_config.a": 1}
    space = {"train_loop_config.a": [1]}
    spec = begin(tmp_path, objective=objective, space=space)
    reached = replace(record(trial, REACHED[:3]), time_to_target_s=3.0)
    assert not extended(spec, [reached], objective__metric="val_accuracy")


@pytest.mark.parametrize(
    ("then", "usd_per_hour", "usd"),
    [
        ("time_to_target", 3600.0, 3.0),
        ("time_to_target", 7200.0, 6.0),
        ("usd_to_target", 7200.0, 6.0),
    ],
)
def test_dollars_are_those_of_the_lanes_and_price_of_now(
    tmp_path, then, usd_per_hour, usd
):
    """The record of a trial that was stopped as beaten names no lane."""
    objective = {"metric": then, "target": {"val_accuracy": 0.8}}
    spec = begin(tmp_path, objective=objective, usd_per_hour=3600.0)
    reached = record({"global_batch_size": 8}, REACHED)
    reached = replace(
        reached, lane=0, metrics=reached.metrics | {"usd_to_target": 3.0}
    )
    beaten = record({"global_batch_size": 16}, NEVER, "stopped")
    left = extended(
        spec,
        [reached, beaten],
        objective__metric="usd_to_target",
        usd_per_hour=usd_per_hour,
    )
    assert left[reached.id].metrics["usd_to_target"] == usd
    assert "usd_to_target" not in left[beaten.id].metrics


def test_a_new_key_of_the_space_has_the_value_that_each_trial_had(tmp_path):
    sections = [{"name": "sgd", "lr": 0.1}, {"name": "adamw", "lr": 0.01}]
    train = {"global_batch_size": 8}
    spec = begin(tmp_path, train, space={"optimizer": sections})
    known = [record({"optimizer": section}, NEVER) for section in sections]
    space = {"space__optimizer.lr": [0.1, 0.01]}
    left = extended(spec, known, space__global_batch_size=[8], **space)
    configs = [
        train | {"optimizer": section, "optimizer.lr": section["lr"]}
        for section in sections
    ]
    assert left.keys() == set(map(trial_id, configs))
    assert num_missing(read_saved(spec.uri).config, list(left.values())) == 2


def test_a_clone_that_has_ended_is_not_trained_again(tmp_path):
    """Neither after an extension that adds a key to the space nor after the next."""
    spec = begin(tmp_path, space={"global_batch_size": [8]})
    trial = record({"global_batch_size": 8}, NEVER)
    Journal(spec.storage).append(trial)
    clone = steer(spec.uri, "clone", trial.id, seed=3)
    cloned = record(trial.config | {"seed": 3}, NEVER, purpose="clone")
    assert cloned.id == clone
    left = extended(spec, [cloned], **{"space__optimizer.lr": [0.1]})
    assert left[clone].config == cloned.config | {"optimizer.lr": 0.1}
    assert is_complete(read_saved(spec.uri))
    left = extended(spec, [], space__precision=["fp32"])
    assert left[clone].config["precision"] == "fp32"
    assert is_complete(read_saved(spec.uri))


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"train.epochs": 3}, "train.epochs"),
        ({"train.max_steps": 100}, "train.epochs"),
        ({"train.optimizer.lr": 0.2}, "train.optimizer"),
        ({"name": "other"}, "name"),
        ({"search": "random", "budget.trials": 9}, "search"),
        ({"space.global_batch_size": [0]}, "space.global_batch_size"),
        ({"space.max_steps": [40]}, "train.epochs"),
    ],
)
def test_what_would_be_another_sweep_is_refused_before_anything_is_written(
    tmp_path, keys, field
):
    spec = begin(tmp_path)
    before = spec.storage.names()
    with error_of(field):
        order_extension(spec.uri, keys)
    assert spec.storage.names() == before
    assert not is_complete(spec)


def test_the_last_extension_wins_whoever_applies_it(tmp_path, monkeypatch):
    """Each is in the directory before the process that has the lease applies
    it, which may be another one. Clocks may go back.
    """
    spec = begin(tmp_path)
    monkeypatch.setattr("time.time_ns", itertools.count(9, -1).__next__)
    whole = {"budget": {"trials": 2}, "train.epochs": 8}
    for keys in ({"budget.trials": 1}, whole, {"budget.trials": 3}):
        extension = order_extension(spec.uri, keys)
    apply_extension(read_saved(spec.uri))
    for again in (extension, read_saved(spec.uri)):
        assert (again.train["epochs"], again.config.budget.trials) == (8, 3)


def test_what_is_added_after_the_last_look_is_done_too(tmp_path):
    """Its command found the directory in use, as while the report was written."""
    spec = begin(tmp_path)
    for size, curve in ((8, NEVER), (16, REACHED)):
        Journal(spec.storage).append(
            record({"global_batch_size": size}, curve)
        )
    order_extension(spec.uri, {"objective.metric": "val_accuracy"})
    result = run_to_answer(spec, fresh=False, checked=False)
    assert result.best.config == {"global_batch_size": 16}
    assert result.spec.config.objective.metric == "val_accuracy"
    assert read_kept(spec.uri).config.objective.metric == "val_accuracy"


def test_an_extension_of_earlier_does_not_go_on_beyond_the_budget_of_a_file(
    tmp_path,
):
    spec = begin(tmp_path)
    order_extension(spec.uri, {"budget.time_s": 600})
    apply_extension(read_saved(spec.uri))
    again = read_sweep(str(tmp_path / "sweep.yaml"), {"budget.time_s": 60})
    assert pending_extension(again) is None
    order_extension(spec.uri, {"budget.time_s": 900})
    following = pending_extension(again)
    assert following is not None
    assert following.config.budget.time_s == 900


def test_the_last_state_is_written_though_storage_fails_once(
    tmp_path, monkeypatch
):
    spec = begin(tmp_path)
    for size in (8, 16):
        Journal(spec.storage).append(
            record({"global_batch_size": size}, REACHED)
        )
    write = Storage.writer
    failures = [StorageError("the network is away")]

    def failing(storage, name):
        if name == PROGRESS and failures:
            raise failures.pop()
        return write(storage, name)

    monkeypatch.setattr(Storage, "writer", failing)
    run_to_answer(spec, fresh=False, checked=False)
    assert not failures
    assert read_live(spec.storage) == Live("ended")


def test_a_start_does_not_show_what_the_one_before_left(tmp_path, monkeypatch):
    spec = begin(tmp_path)
    trial = {"global_batch_size": 8}
    run = Running(trial_id(trial), 0, 1.0, trial)
    write_live(spec.storage, Live("running", 2, 1, [run]))
    shown = []

    def run_to_end(spec, *more):
        shown.append(read_live(spec.storage))
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(sweep_module, "_run_to_end", run_to_end)
    with pytest.raises(SweepInterrupted):
        run_to_answer(spec, fresh=False, checked=False)
    assert shown == [Live("running")]
    assert read_live(spec.storage) == Live("cut off")


def test_the_command_extends_a_sweep_and_answers(tmp_path, capsys):
    """All that it needs is known: no cluster is started for it.

    One that runs is told, and goes on by itself.
    """
    spec = begin(tmp_path, space={"global_batch_size": [8]})
    for size, curve in ((8, NEVER), (16, REACHED)):
        Journal(spec.storage).append(
            record({"global_batch_size": size}, curve)
        )
    keys = [
        "--space.global_batch_size",
        "[8, 16]",
        "--objective.metric",
        "val_accuracy",
    ]
    assert main([spec.uri, *keys]) == 0
    told = capsys.readouterr()
    assert "many is extended: the results of 2 trials are kept" in (
        told.out + told.err
    ).replace(spec.uri, "many")
    assert spec.storage.read_json("summary.json", dict[str, Any])["best"][
        "id"
    ] == trial_id({"global_batch_size": 16})
    with held(spec.storage, SAVED):
        assert main([spec.uri, "--train.epochs", "6"]) == 0
        assert main(["resume", spec.uri]) == 2
    assert (
        "; the sweep continues with train.epochs once its trials have ended"
        in capsys.readouterr().out
    )
    assert read_saved(spec.uri).train["epochs"] == 6


def test_a_report_is_written_where_the_sweep_could_not_run(tmp_path):
    spec = begin(tmp_path, objective={"metric": "val_accuracy"})
    Journal(spec.storage).append(record({"global_batch_size": 8}, NEVER))
    elsewhere = spec.storage.read(SAVED).replace(b"tests.tasks", b"absent")
    spec.storage.write(SAVED, elsewhere)
    assert main([spec.uri]) == 2
    assert main([spec.uri, "--report"]) == 0
    assert spec.storage.exists("report.html")
