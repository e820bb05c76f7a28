"""The JSON schemas for editors: current, named by every example, and as strict
as the models where a schema can be.
"""

import json
import re
import runpy
from typing import get_args

import pytest
from jsonschema import Draft7Validator

from tests.documents import RUN, blocks, pages
from tests.specs import REPOSITORY, read_json
from trainers.__main__ import main as trainers_main
from trainers.config import TrainConfig
from trainers.config.model import (
    Settings,
    build,
    child_model,
    keys_of,
    override,
)
from trainers.config.yaml import parse_mapping
from trainers.errors import ConfigError
from tune.__main__ import main as tune_main
from tune.config import SweepConfig

SCHEMAS = runpy.run_path(str(REPOSITORY / "docs/make.py"))["SCHEMAS"]
EXAMPLES = sorted(REPOSITORY.glob("examples/*/*.yaml"))
SWEEP = {
    "train": RUN,
    "space": {"global_batch_size": [16, 32]},
    "objective": {"metric": "val_loss"},
}


def errors(package, tree):
    validator = Draft7Validator(
        read_json(REPOSITORY / package / "schema.json")
    )
    return [
        f"{'.'.join(map(str, error.path))}: {error.message}"
        for error in validator.iter_errors(tree)
    ]


@pytest.mark.parametrize("file", SCHEMAS)
def test_a_schema_is_one_and_is_current(file, capsys):
    text = (REPOSITORY / file).read_text()
    assert text == SCHEMAS[file](), "run `make docs`"
    Draft7Validator.check_schema(json.loads(text))
    main = trainers_main if file.startswith("trainers") else tune_main
    assert main(["--schema"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    "path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_an_example_names_its_schema_and_is_valid(path):
    text = path.read_text()
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    schema = (path.parent / found[1]).resolve()
    assert schema.parent.name == (
        "trainers" if path.name.startswith("train") else "tune"
    )
    assert errors(schema.parent.name, parse_mapping(text, path.name)) == []


def test_every_configuration_of_the_pages_is_valid():
    count = 0
    for block in (
        block
        for page in pages()
        for block in blocks(page)
        if block.language == "yaml" and not block.fates
    ):
        tree = parse_mapping(block.text, block.page)
        if "train" in tree or "space" in tree:
            assert errors("tune", SWEEP | tree) == [], (
                f"{block.page}:{block.line}"
            )
            count += 1
        elif {"task", "train_func"} & set(tree):
            assert errors("trainers", tree) == [], f"{block.page}:{block.line}"
            count += 1
    assert count > 5


def keys(model, before=""):
    for key in keys_of(model):
        yield before + key
        below = child_model(model, key)
        if below is not None and key not in (
            "batch_schedule",
            "tracking",
            "space",
        ):
            yield from keys(below, f"{before}{key}.")


def with_key(tree, dotted, value):
    return override(Settings, tree, {dotted: value})


@pytest.mark.parametrize(
    ("package", "model", "tree"),
    [("trainers", TrainConfig, RUN), ("tune", SweepConfig, SWEEP)],
)
def test_every_key_that_is_mistyped_is_marked(package, model, tree):
    for dotted in keys(model):
        above, _, leaf = dotted.rpartition(".")
        mistyped = f"{above}.{leaf[:-1]}".lstrip(".")
        assert errors(package, with_key(tree, mistyped, None)), mistyped
    for dotted in keys(TrainConfig):
        assert errors("tune", SWEEP | {"space": {dotted[:-1]: [1]}}), dotted


ODD_VALUES = (
    "nonsense",
    -1,
    1.5,
    True,
    [{}],
    {"nonsense": 1},
    3,
    [],
    {},
    None,
)
TOGETHER = {
    *(
        "early_stopping.metric",
        "early_stopping.patience",
        "fullgraph",
        "optimizer.nesterov",
        "data.prefetch_factor",
    ),
    *("checkpoint.best", "scaling.num_workers", "lr_schedule.warmup"),
}
"""Keys of which some values are wrong for what else there is, or by a rule
that no schema has.
"""


@pytest.mark.parametrize("dotted", list(keys(TrainConfig)))
def test_a_value_is_marked_where_the_model_refuses_it(dotted):
    for value in ODD_VALUES:
        tree = with_key(RUN, dotted, value)
        found = errors("trainers", tree)
        try:
            build(TrainConfig, tree, "f")
        except ConfigError:
            assert found or dotted in TOGETHER, value
        else:
            assert found == [], value


def each(table):
    return [(valid, row) for valid, rows in table.items() for row in rows]


RUNS = {
    True: [
        "{}",
        "lr_scaling: {rule: sde, base_batch_size: 32}",
        "scaling: {num_workers: [1, 4]}",
        "task_args: {anything: [1, {goes: true}]}",
        "tracking: [mlflow, {tracker: wandb, project: p}]",
    ],
    False: [
        "optimizer: {name: adamw, lr: '1e-3'}",
        "optimizer: {name: adamw}",
        "optimizer: {lr: 0}",
        "{epochs: 1, max_steps: 5}",
        "batch_size_per_worker: 4",
        "evaluate: {every_steps: 5, every_epochs: 1}",
        "scaling: {num_workers: '4'}",
        "batch_schedule: [{until: 5, size: 3}]",
        "task: no colon",
        "train_func: m:f",
    ],
}


@pytest.mark.parametrize(("is_valid", "changes"), each(RUNS))
def test_a_run_by_its_schema(changes, is_valid):
    tree = RUN | parse_mapping(changes, "f")
    assert (not errors("trainers", tree)) is is_valid
    if not is_valid:
        with pytest.raises(ConfigError):
            build(TrainConfig, tree, "f")


SWEEPS = {
    True: [
        "train: train.yaml",
        "{train: {task: t:T}, space: {optimizer.lr: around, global_batch_size: [8]}}",
        "{train: {train_func: m:f}, space: {train_loop_config.lr: [1]}}",
        "space: {optimizer.lr: {around: 0.01}}",
        "space: {optimizer.lr: {loguniform: [0.0001, 0.01]}}",
        "space: {task_args.width: [1, 2]}",
        "objective: {metric: time_to_target, target: {val_accuracy: 0.9}}",
    ],
    False: [
        "train: {train_func: m:f, epochs: 1}",
        "train: {tusk: t:T}",
        "space: {optimizer.lr: arround}",
        "space: {optimizer.lr: {loguniform: [0.0001]}}",
        "space: {optimizer.lr: {lognormal: [0.0001, 1]}}",
        "space: {optimizer.lr: [0.1, '0.2']}",
        "space: {precision: [fp32, bf17]}",
        "space: {global_batch_size: 32}",
        "space: {global_batch_size: []}",
        "space: {}",
        "objective: {metrics: val_loss}",
        "search: bayes",
        "budget: {trials: 0}",
    ],
}


@pytest.mark.parametrize(("is_valid", "changes"), each(SWEEPS))
def test_a_sweep_by_its_schema(changes, is_valid):
    tree = SWEEP | parse_mapping(changes, "f")
    assert (not errors("tune", tree)) is is_valid


def test_every_choice_of_a_model_is_one_of_the_schema():
    schema = read_json(REPOSITORY / "trainers/schema.json")
    for name, field in TrainConfig.model_fields.items():
        choices = [
            one for one in get_args(field.annotation) if isinstance(one, str)
        ]
        if choices and len(choices) == len(get_args(field.annotation)):
            assert (
                schema["definitions"]["TrainConfig"]["properties"][name][
                    "enum"
                ]
                == choices
            )
