"""A training function in a file: its configuration, what a sweep of it may
have, and errors that name the fix.
"""

import math
import sys

import pytest

from tests.specs import dotted
from trainers.__main__ import main as train
from trainers.config.function import FunctionConfig, build_run
from trainers.config.model import build
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import ConfigError
from trainers.launch.spec import read_run
from trainers.output import TORCHRUN
from tune.report.write import write_report
from tune.search.space import trial_tree
from tune.sweeps.spec import prepare, read_saved, read_sweep
from tune.trials.journal import Journal
from tune.trials.microbatch_bounds import fixed_size, key_of
from tune.trials.record import TrialRecord, make_record, trial_id

MODULE = "function_of_test_function_config"
RUN = {
    "train_func": f"{MODULE}:train",
    "train_loop_config": {"lr": 0.1, "loader": {"rows": 8}, "kind": "fp32"},
    "keys": {
        "batch_size_per_worker": "train_loop_config.loader.rows",
        "precision": "train_loop_config.kind",
    },
}
SWEEP = {
    "train": RUN,
    "space": {
        "train_loop_config.loader.rows": [8, 16],
        "train_loop_config.kind": ["fp32", "bf16"],
    },
    "objective": {"metric": "loss"},
}


@pytest.fixture
def user(user):
    """With what a run may name."""
    functions = "def train(config):\n    return config\n\ndef alone():\n    return 7\n\nTHING = 1\n"
    (user / f"{MODULE}.py").write_text(functions)
    yield user
    sys.modules.pop(MODULE, None)


def spec(user, **keys):
    file = user / "run.yaml"
    file.write_text(dump_yaml(RUN | keys))
    return read_run(str(file), {})


def sweep(user, **keys):
    file = user / "sweep.yaml"
    file.write_text(dump_yaml(SWEEP | keys))
    return read_sweep(str(file), {})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "keys: {precision: train_loop_config.kindd}",
            "names no key of train_loop_config; did you mean `train_loop_config.kind`?",
        ),
        (
            "keys: {global_batch_size: kind}",
            "use one of train_loop_config.lr, train_loop_config.loader.rows, train_loop_config.kind.",
        ),
        (
            "keys: {global_batch_size: train_loop_config.lr}",
            "whole number of at least 1, since `keys.global_batch_size` names it; write for example `lr: 32`.",
        ),
        (
            "keys: {global_batch_size: train_loop_config.loader.rows, batch_size_per_worker: train_loop_config.loader.rows}",
            "conflicts with global_batch_size; keep one of the two.",
        ),
        (
            "task: task:Mine",
            "is not a known key; keep one of `task` and `train_func`.",
        ),
        (
            "global_batch_size: 8",
            "is not a known key; name the function's own key with `keys`.",
        ),
        (
            "optimizer: {lr: 1}",
            "give the value in `train_loop_config`, which the `train_func` reads: this key is for a `task`.",
        ),
        ("launcher: local", "remove it: a `train_func` runs on Ray."),
        ("train_fun: 1", "did you mean `train_func`?"),
        ("failure: {error: 1}", "use one of max_failures."),
        (
            "train_func: train",
            "must be `module:function`; write for example `train_func: my_script:train_func`.",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_fix(change, sentence):
    with pytest.raises(ConfigError) as error:
        build(FunctionConfig, RUN | parse_mapping(change, "test"), "file")
    assert str(error.value).endswith(sentence)


def test_what_the_keys_name():
    config = build(FunctionConfig, RUN, "file")
    assert (config.batch_size, config.precision) == (
        ("batch_size_per_worker", 8),
        "fp32",
    )
    assert config.others == {"train_loop_config.kind": "fp32"}
    bare = build(FunctionConfig, RUN | {"keys": {}}, "file")
    assert (bare.batch_size, bare.precision) == (None, None)
    assert build_run(config.tree(), "file") == config


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ({"seed": 0}, {"seed": 1}, True),
        ({"optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 1}}, True),
        ({"width_mult": 4.0}, {"width_mult": 0.25}, False),
    ],
)
def test_memory_goes_by_a_keys_name_and_not_by_its_type(before, after, same):
    keys = [
        key_of({"train_func": "a:b", "train_loop_config": values}, "gpu")
        for values in (before, after)
    ]
    assert (keys[0] == keys[1]) == same


def test_the_function_gets_a_configuration_of_its_own_or_nothing(user):
    found = spec(user)
    given = found.load()()
    assert given == RUN["train_loop_config"]
    given["loader"]["rows"] = 1
    assert found.config.train_loop_config == RUN["train_loop_config"]
    assert (
        spec(
            user, train_func=f"{MODULE}:alone", train_loop_config={}, keys={}
        ).load()()
        == 7
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"train_func": f"{MODULE}:trian"},
            f"names no function in .*; did you mean `{MODULE}:train`",
        ),
        ({"train_func": f"{MODULE}:THING"}, "names no function in"),
        ({"train_func": "sys:nothing"}, "names no function in sys; name one"),
        (
            {"train_func": f"{MODULE}:alone"},
            r"`train_loop_config: .*` does not fit alone .*; match the signature alone\(\)",
        ),
        (
            {"train_func": "not_there:train"},
            r"`train_func: .*` cannot be found: no not_there\.py in",
        ),
        ({"scaling": {"num_workers": 10_000}}, "must fit on this machine"),
    ],
)
def test_a_function_that_is_not_there_or_does_not_fit(user, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        spec(user, **change).load()


def test_the_commands_say_it_in_a_line(user, capsys, monkeypatch):
    spec(user)
    assert train([str(user / "run.yaml"), "--profile_steps", "5"]) == 2
    assert "`profile_steps: 5`" in capsys.readouterr().err
    for name in TORCHRUN:
        monkeypatch.setenv(name, "0")
    assert train([str(user / "run.yaml")]) == 2
    assert "which torchrun does not start" in capsys.readouterr().err


def test_a_sweep_knows_the_functions_keys_by_its_own_names(user):
    found = sweep(user)
    assert found.config.space == {
        "batch_size_per_worker": [8, 16],
        "precision": ["fp32", "bf16"],
    }
    trial = {"batch_size_per_worker": 16, "precision": "bf16"}
    tree = trial_tree(found.train, trial)
    assert tree["train_loop_config"] == {
        "lr": 0.1,
        "loader": {"rows": 16},
        "kind": "bf16",
    }
    assert fixed_size(tree) == 16
    prepare(found, fresh=False)
    resumed = read_saved(found.uri)
    assert (resumed.config.space, resumed.train) == (
        found.config.space,
        {**found.train, "task_dir": str(user)},
    )
    prepare(resumed, fresh=False)
    with pytest.raises(
        ConfigError, match=r"`train.train_loop_config: .*` differs from"
    ):
        prepare(
            sweep(
                user,
                train={
                    **RUN,
                    "train_loop_config": {
                        **RUN["train_loop_config"],
                        "lr": 0.2,
                    },
                },
            ),
            fresh=False,
        )


def test_only_what_may_take_memory_separates_batch_sizes(user):
    train = sweep(user).train

    def key(**trial):
        return key_of(
            trial_tree(
                train,
                dotted(trial),
            ),
            "cpu",
        )

    assert (
        key()
        == key(batch_size_per_worker=32)
        == key(train_loop_config__lr=0.5)
    )
    assert (
        len(
            {
                key(),
                key(precision="bf16"),
                key(train_loop_config__layers=3),
                key(scaling__num_workers=2),
            }
        )
        == 4
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"finalists": 2},
            "repeats trials with other seeds, and a train_func gets no seed; remove it",
        ),
        (
            {"space": {"train_loop_config.loader.rows": [0]}},
            "must be a whole number of at least 1",
        ),
        (
            {"space": {"global_batch_size": [8]}},
            "name the function's own key with `keys`",
        ),
        (
            {"space": {"keys.precision": ["train_loop_config.lr"]}},
            "cannot vary inside a sweep",
        ),
        (
            {"space": {"precision": ["a"], "train_loop_config.kind": ["b"]}},
            "`space.train_loop_config.kind` is the same key as `precision` (by the function's `keys`), and the space has both; keep one of the two",
        ),
    ],
)
def test_what_a_sweep_of_a_function_cannot_have(user, change, sentence):
    with pytest.raises(ConfigError) as error:
        sweep(user, **change)
    assert sentence in str(error.value)


def test_best_yaml_is_the_functions_configuration(user):
    found = sweep(user)
    records = [
        record(
            {"batch_size_per_worker": size, "precision": "fp32"}, 1.0 / size
        )
        for size in (8, 16)
    ]
    write_report(
        found.storage,
        found.config,
        found.train,
        records,
        {},
        task_dir=str(user),
    )
    best = read_run(found.storage.locate("best.yaml"), {})
    assert best.load()() == {"lr": 0.1, "loader": {"rows": 16}, "kind": "fp32"}
    assert best.config.name == "sweep-best"
    page = found.storage.read("report.html").decode()
    assert "Batch 16 a worker: loss 0.0625" in page


def test_a_throughput_that_a_function_reports_is_the_trials(user):
    objective = sweep(user).config.objective
    outcome = {"status": "done", "result": {"peak_memory_bytes": 5}}
    row = {"loss": 1.0, "step": 1.0, "train_time_s": 0.1}
    fast = make_record(
        {}, objective, 0.0, [row | {"samples_per_s": 8.0}], outcome
    )
    assert (fast.samples_per_s, fast.peak_memory_bytes, fast.samples) == (
        8.0,
        5,
        None,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -5.0, 1e300])
@pytest.mark.parametrize(
    "name",
    [
        "samples_per_s",
        "step_time_s",
        "peak_memory_bytes",
        "disturbed_s",
        "time_to_target",
        "usd_to_target",
    ],
)
def test_whatever_a_function_reports_its_record_can_be_read(user, name, value):
    found = sweep(user)
    row = {"loss": 1.0, "step": 1.0, "train_time_s": 0.1, name: value}
    outcome = {"status": "error", "message": "failed"}
    made = make_record({}, found.config.objective, 0.0, [row], outcome)
    journal = Journal(found.storage)
    journal.append(made)
    assert [record.id for record in journal.records()] == [made.id]


def record(config, loss):
    return TrialRecord(
        trial_id(config), config, "done", 0.0, 1.0, metrics={"loss": loss}
    )
