"""A sweep as plain data: read, checked, kept for its resume, and never mixed
with another one.
"""

import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.specs import dotted, error_of
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from trainers.lease import LEASE, held
from trainers.storage import Storage
from tune.search.space import grid
from tune.sweeps.spec import (
    SAVED,
    is_complete,
    prepare,
    read_saved,
    read_sweep,
)
from tune.sweeps.steer import order_extension
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord, trial_id

MODULE = "task_of_test_tune_spec"
TRAIN = {
    "task": f"{MODULE}:Mine",
    "name": "one-run",
    "epochs": 2,
    "global_batch_size": 8,
    "optimizer": {"lr": 0.1},
    "launcher": "local",
}
SWEEP = {
    "name": "many",
    "train": "train.yaml",
    "space": {"global_batch_size": [8, 16], "precision": ["fp32", "bf16"]},
    "objective": {"metric": "val_loss"},
}


@pytest.fixture
def user(user):
    """With a task and a sweep of it."""
    (user / f"{MODULE}.py").write_text(
        "from trainers.task import Task\n\nclass Mine(Task):\n    pass\n"
    )
    write(user)
    return user


def write(folder, sweep=None, train=None):
    (folder / "train.yaml").write_text(dump_yaml(train or TRAIN))
    (folder / "sweep.yaml").write_text(dump_yaml(SWEEP | (sweep or {})))


def read(user, **overrides):
    return read_sweep(
        str(user / "sweep.yaml"),
        dotted(overrides),
    )


def test_a_file_becomes_a_spec(user, tmp_path):
    spec = read(user)
    assert spec.uri == f"{tmp_path}/cwd/results/many"
    assert spec.path == (str(user),)
    assert spec.source == str(user / "sweep.yaml")
    assert spec.train["task"] == f"{MODULE}:Mine"
    assert "storage_path" not in spec.train


def test_a_sweep_s_uri_names_a_run_beside_it(user):
    write(user, train=TRAIN | {"task_dir": str(user)})
    Path("train.yaml").write_text("epochs: 9")
    for place in ("", f"{user}/", f"file://{user}/"):
        train = {"train": f"{place}train.yaml"}
        spec = read_sweep(f"file://{user}/sweep.yaml", train)
        assert spec.train["epochs"] == 2


def test_overrides_go_to_the_sweep_or_to_the_run(user, tmp_path):
    spec = read(
        user, name="other", storage_path=str(tmp_path / "s"), lanes=2, objective__metric="val_accuracy",
        train__optimizer__lr=0.5, train__max_steps=9,
    )  # fmt: skip
    assert spec.uri == f"{tmp_path}/s/other"
    assert (spec.config.lanes, spec.config.objective.metric) == (
        2,
        "val_accuracy",
    )
    assert (spec.train["optimizer"]["lr"], spec.train["max_steps"]) == (0.5, 9)
    assert "epochs" not in spec.train


@pytest.mark.parametrize(
    ("sweep", "train", "file", "words"),
    [
        ({"space": {"precision": ["fp99"]}}, {}, "sweep.yaml", "precision"),
        (
            {"space": {"precison": ["fp32"]}},
            {},
            "sweep.yaml",
            "did you mean `precision`?",
        ),
        ({"train": "trian.yaml"}, {}, "trian.yaml", "train.yaml"),
        ({}, {"optimizer": {"lr": -1}}, "train.yaml", "greater than 0"),
        ({}, {"task": "nowhere:Mine"}, "train.yaml", "cannot be found"),
    ],
)
def test_a_mistake_names_the_file_that_it_is_in(
    user, sweep, train, file, words
):
    write(user, sweep, TRAIN | train)
    with pytest.raises(ConfigError) as raised:
        read(user)
    assert words in str(raised.value)
    assert str(user / file) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "sweep",
    [
        {
            "lanes": 2,
            "scheduler": "asha",
            "budget": {"trials": 3, "time_s": 60},
            "space": {"clip_grad_norm": [None, 1]},
        },
        {
            "search": "random",
            "budget": {"trials": 3},
            "space": {
                "optimizer.lr": {"loguniform": [1e-4, 1.0]},
                "global_batch_size": {"min": 2, "max": 64},
            },
        },
    ],
)
def test_the_saved_sweep_is_the_same_sweep(user, sweep):
    write(user, sweep)
    spec = read(user)
    assert prepare(spec, fresh=False) == 0
    saved = read_saved(spec.uri)
    assert {
        key: value for key, value in saved.train.items() if key != "task_dir"
    } == spec.train
    assert saved.uri == spec.uri
    assert saved.path == spec.path
    ours, theirs = (
        s.config.model_dump(exclude={"train", "storage_path"})
        for s in (saved, spec)
    )
    assert ours == theirs
    assert prepare(saved, fresh=False) == 0  # resuming it is no other sweep


@pytest.mark.parametrize("values", [
    [math.inf, -math.inf, math.nan, 1e22, -0.0],
    [1, 1.0, True, "1", "1e-3", None, "null", "off", ""],
    [{"a": None}, {"a": {}}, [], [1, [None]]],
])  # fmt: skip
def test_a_saved_sweep_has_the_same_trials_whatever_their_values(user, values):
    spec = read(user, space={"task_args.limit": values})
    prepare(spec, fresh=False)
    saved = read_saved(spec.uri)
    ours, theirs = (
        [trial_id(one) for one in grid(s.config)] for s in (saved, spec)
    )
    assert ours == theirs
    assert len(set(ours)) == len(values)
    assert prepare(saved, fresh=False) == 0
    assert (
        prepare(read(user, space={"task_args.limit": values}), fresh=False)
        == 0
    )


@pytest.mark.parametrize("inside", [True, False])
def test_a_sweep_is_resumed_from_any_directory(
    user, tmp_path, monkeypatch, inside
):
    """Also when it was started in the directory of its task, which is then a
    relative one.
    """
    if inside:
        monkeypatch.chdir(user)
    spec = read(user)
    prepare(spec, fresh=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved = read_saved(spec.uri)
    assert str(user) in saved.path


def test_ended_trials_are_counted(user):
    spec = read(user)
    prepare(spec, fresh=False)
    journal = Journal(spec.storage)
    for seed in range(3):
        config = {"seed": seed}
        journal.append(TrialRecord(trial_id(config), config, "done", 1.0, 2.0))
    longer = read(user, budget__time_s=9)
    assert prepare(longer, fresh=False) == 3
    assert read_saved(spec.uri).config.budget == longer.config.budget
    assert prepare(spec, fresh=True) == 0
    assert journal.records() == []


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"space": {"global_batch_size": [8, 32]}}, "space"),
        ({"train__optimizer__lr": 0.5}, "train.optimizer"),
    ],
)
def test_another_sweep_of_the_same_name_is_refused(user, overrides, field):
    prepare(read(user), fresh=False)
    with error_of(field, r"differs from .*--fresh"):
        prepare(read(user, **overrides), fresh=False)
    assert prepare(read(user, **overrides), fresh=True) == 0
    assert prepare(read(user, name="other"), fresh=False) == 0


def test_values_that_only_python_calls_equal_are_another_sweep(user):
    """Their trials have other ids, so both would be in one answer."""
    prepare(read(user, space={"task_args.limit": [1]}), fresh=False)
    with error_of("space"):
        prepare(read(user, space={"task_args.limit": [True]}), fresh=False)


def test_an_objective_that_named_nothing_may_be_put_right(user):
    """Until a trial has ended by it."""
    prepare(read(user, objective__metric="valid_loss"), fresh=False)
    spec = read(user)
    prepare(spec, fresh=False)
    assert read_saved(spec.uri).config.objective.metric == "val_loss"
    Journal(spec.storage).append(
        TrialRecord(trial_id({}), {}, "done", 1.0, 2.0)
    )
    with error_of("objective"):
        prepare(read(user, objective__metric="val_mae"), fresh=False)


@pytest.mark.parametrize(
    ("metric", "space", "expected"),
    [
        ("val_loss", "global_batch_size", nullcontext),
        (
            "samples_per_s",
            "global_batch_size",
            partial(error_of, "train.scaling"),
        ),
        (
            "val_loss",
            "batch_size_per_worker",
            partial(error_of, "train.scaling"),
        ),
    ],
)
def test_workers_may_change_unless_records_depend_on_them(
    user, metric, space, expected
):
    for cpus in (1, 2):  # without records
        keys = {"objective__metric": metric, "space": {space: [8]}}
        spec = read(user, train__scaling__cpus_per_worker=cpus, **keys)
        prepare(spec, fresh=False)
    Journal(spec.storage).append(TrialRecord("a", {}, "done", 1.0, 2.0))
    with expected():
        prepare(read(user, **keys), fresh=False)
    with expected():
        order_extension(spec.uri, {"train.scaling.cpus_per_worker": 1})


@pytest.mark.parametrize("search", ["random", "optuna", "grid"])
def test_a_sweep_is_complete_once_each_trial_has_a_record(user, search):
    spec = read(user, search=search, budget__trials=2)
    prepare(spec, fresh=False)
    for precision in ("fp32", "bf16"):
        assert not is_complete(spec)
        config = {"global_batch_size": 8, "precision": precision}
        repeat = TrialRecord(
            trial_id(config, "repeat", 1),
            config,
            "done",
            1.0,
            2.0,
            purpose="repeat",
            seed=1,
        )
        Journal(spec.storage).append(
            TrialRecord(trial_id(config), config, "done", 1.0, 2.0)
        )
        Journal(spec.storage).append(repeat)
    assert is_complete(spec)


def test_the_way_on_is_given_where_the_sweep_was(user, monkeypatch):
    spec = read(user)
    assert spec.resume() == f"python -m tune {spec.uri}"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert (
        spec.resume()
        == f"ray job submit --working-dir . -- python -m tune {spec.uri}"
    )


def holder(spec):
    """Whose the lease is; how often it was renewed depends on the time."""
    return json.loads(spec.storage.read(LEASE))["token"]


def test_a_live_sweep_is_neither_started_again_nor_deleted(
    user, monkeypatch, capsys
):
    from tune.__main__ import main

    monkeypatch.setattr(
        "tune.sweeps.sweep.prepare",
        lambda *args: pytest.fail("it has started"),
    )
    spec = read(user)
    with held(spec.storage, SAVED):
        prepare(spec, fresh=False)
        before = holder(spec), spec.storage.names()
        again = [
            str(user / "sweep.yaml"),
            "--storage_path",
            spec.storage.parent.uri,
        ]
        for args in (again, [*again, "--fresh"], ["resume", spec.uri]):
            assert main(args) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert "is in use: process " in line
        assert (holder(spec), spec.storage.names()) == before


@pytest.mark.parametrize("data", [b"", b"name: x\n", b"\xff"])
def test_a_damaged_saved_sweep_is_a_config_error(user, data):
    spec = read(user)
    prepare(spec, fresh=False)
    Storage(spec.uri).write("sweep.yaml", data)
    with pytest.raises(ConfigError, match=r"sweep\.yaml"):
        read_saved(spec.uri)


def test_a_dotted_key_of_the_space_may_be_overridden(user):
    write(
        user,
        {"space": {"global_batch_size": [8, 16], "optimizer.lr": [0.1, 0.2]}},
    )
    spec = read(
        user,
        **{
            "space.optimizer.lr": [0.3],
            "space.global_batch_size": [32],
            "space.precision": ["bf16"],
        },
    )
    assert spec.config.space == {
        "global_batch_size": [32],
        "optimizer.lr": [0.3],
        "precision": ["bf16"],
    }
    assert spec.num_trials == 1


@pytest.mark.parametrize(
    "key", ["space.optimizer.lrr", "space.optimizer", "space.", "space.a..b"]
)
def test_a_key_of_the_space_that_is_none_of_the_run_s_is_an_error(user, key):
    with pytest.raises(ConfigError) as error:
        read(user, **{key: [0.1]})
    assert "space" in str(error.value)
