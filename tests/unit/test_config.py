"""TrainConfig: what fits together, what does not, and the plain data that builds it again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import ConfigError

BASE: dict[str, Any] = {"task": "task:Mine", "epochs": 2, "global_batch_size": 64, "optimizer": {"lr": 0.1}}


def make(**changes: Any) -> TrainConfig:
    """BASE with changes; None removes a key."""
    return build(TrainConfig, {k: v for k, v in (BASE | changes).items() if v is not None}, "train.yaml")


def sentences(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        make(**changes)
    return str(raised.value).splitlines()


def test_the_defaults_are_a_run() -> None:
    config = make()
    assert (config.batch_size, config.precision, config.microbatch_size, config.launcher) == (64, "fp32", "auto", "ray")
    assert config.optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"batch_size_per_worker": 8}, "batch_size_per_worker", "conflicts with global_batch_size"),
        ({"global_batch_size": None}, "global_batch_size", "or batch_size_per_worker is required"),
        ({"max_steps": 5}, "max_steps", "conflicts with epochs"),
        ({"epochs": None}, "epochs", "or max_steps is required"),
        ({"epochs": 0}, "epochs", "at least 1"),
        ({"global_batch_size": 0}, "global_batch_size", "at least 1"),
        ({"global_batch_size": 64.0}, "global_batch_size", "whole number"),
        ({"microbatch_size": 0}, "microbatch_size", "auto or a whole number"),
        ({"microbatch_size": "big"}, "microbatch_size", "auto or a whole number"),
        ({"task": "no class"}, "task", "module:Class"),
        ({"task": "../evil:Task"}, "task", "module:Class"),
        ({"task": None}, "task", "is required"),
        ({"name": "../up"}, "name", "letters, digits"),
        ({"name": "a/b"}, "name", "letters, digits"),
        ({"name": ""}, "name", "letters, digits"),
        ({"name": ".hidden"}, "name", "letters, digits"),
        ({"precision": "fp16-pure"}, "optimizer.eps", "vanishes in float16"),
        ({"precision": "fp4"}, "precision", "'fp16-pure'"),
        ({"precision": "fp8"}, "compile", "leaves the casts of precision fp8"),
        ({"optimizer": {"lr": 0.1, "name": "sgd", "state": "8bit"}}, "optimizer.state", "no effect with optimizer sgd"),
        ({"compile": False}, "compile", "'off'"),
        ({"fullgraph": True}, "fullgraph", "needs a compiled model"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"seed": 2**64}, "seed", "at most"),
        ({"clip_grad_norm": 0}, "clip_grad_norm", "greater than 0"),
        ({"max_time_s": 0}, "max_time_s", "greater than 0"),
        ({"optimizer": None}, "optimizer", "is required"),
        ({"optimizer": {}}, "optimizer.lr", "is required"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr", "greater than 0"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr", "must be"),
        ({"optimizer": {"lr": math.inf}}, "optimizer.lr", "finite"),
        ({"optimizer": {"lr": 0.1, "name": "lion"}}, "optimizer.name", "'sgd', 'adam' or 'adamw'"),
        ({"optimizer": {"lr": 0.1, "momentum": 0.9}}, "optimizer.momentum", "has no effect with optimizer adamw"),
        ({"optimizer": {"lr": 0.1, "name": "sgd", "eps": 1e-8}}, "optimizer.eps", "has no effect with optimizer sgd"),
        ({"optimizer": {"lr": 0.1, "name": "sgd", "nesterov": True}}, "optimizer.nesterov", "needs momentum"),
        ({"optimizer": {"lr": 0.1, "betas": [0.9]}}, "optimizer.betas", "at least 2"),
        ({"optimizer": {"lr": 0.1, "betas": [0.9, 1.5]}}, "optimizer.betas", "less than 1"),
        ({"lr_schedule": {"warmup": 1.5}}, "lr_schedule.warmup", "below 1"),
        ({"lr_schedule": {"warmup": -1}}, "lr_schedule.warmup", "a number of steps, or a share"),
        ({"lr_schedule": {"warmup": "long"}}, "lr_schedule.warmup", "a number of steps, or a share"),
        ({"lr_scaling": {"rule": "sqrt"}}, "lr_scaling.base_batch_size", "scales from"),
        ({"evaluate": {"every_epochs": 1, "every_steps": 5}}, "evaluate.every_steps", "conflicts with"),
        ({"checkpoint": {"every_s": 1, "every_steps": 5}}, "checkpoint.every_s", "conflicts with every_steps"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep", "at least 1"),
        ({"data": {"prefetch_factor": 2}}, "data.prefetch_factor", "needs loader processes"),
        ({"data": {"resident": True, "num_workers": 2}}, "data.num_workers", "no effect"),
        ({"data": {"resident": "yes"}}, "data.resident", "auto, true or false"),
        ({"scaling": {"num_workers": 0}}, "scaling.num_workers", "at least 1"),
        ({"scaling": {"num_workers": [4, 2]}}, "scaling.num_workers", "MIN at most MAX"),
        ({"scaling": {"num_workers": [1, 2, 3]}}, "scaling.num_workers", "MIN"),
        ({"scaling": {"num_workers": [0, 2]}}, "scaling.num_workers", "[MIN, MAX]"),
        ({"scaling": {"num_workers": "all"}}, "scaling.num_workers", "[MIN, MAX]"),
        ({"scaling": {"num_workers": 2}, "strategy": "none"}, "strategy", "for one worker"),
        (
            {"strategy": "fsdp", "compile": "max-autotune"},
            "compile",
            "captures CUDA graphs, and fsdp moves its tensors",
        ),
        ({"strategy": "fsdp", "cuda_graphs": True}, "cuda_graphs", "cannot follow strategy fsdp"),
        ({"strategy": "dp", "compile": "default"}, "compile", "cannot follow the replicas of strategy dp"),
        ({"strategy": "fsdp", "ddp": {"static_graph": True}}, "ddp", "has no effect with strategy fsdp"),
        ({"fsdp": {"reshard_after_forward": False}}, "fsdp", "has no effect with strategy ddp"),
        (
            {"strategy": "fsdp", "precision": "bf16-pure", "fsdp": {"param_dtype": "bf16"}},
            "fsdp.param_dtype",
            "is for precision bf16, not for bf16-pure",
        ),
        ({"scaling": {"num_workers": 2}, "launcher": "local"}, "scaling.num_workers", "must be 1"),
        ({"scaling": {"num_workers": [1, 2]}, "launcher": "spawn"}, "scaling.num_workers", "needs Ray"),
        (
            {"scaling": {"num_workers": [1, 2]}, "global_batch_size": None, "batch_size_per_worker": 8},
            "batch_size_per_worker",
            "elastic",
        ),
        ({"failure": {"error": -2}}, "failure.error", "at least -1"),
        ({"optimiser": {"lr": 0.1}}, "optimiser", "did you mean `optimizer`?"),
        ({"batch_size": 3}, "batch_size", "there is no such key"),
        ({"data": {"num_worker": 3}}, "data.num_worker", "did you mean `data.num_workers`?"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(changes: dict[str, Any], field: str, words: str) -> None:
    lines = sentences(**changes)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"train.yaml: `{field}")
    assert words in lines[0]


def test_batch_size_per_worker_becomes_the_global_one() -> None:
    config = make(global_batch_size=None, batch_size_per_worker=8, scaling={"num_workers": 4})
    assert config.batch_size == 32
    resolved = config.with_global_batch()
    assert (resolved.global_batch_size, resolved.batch_size_per_worker, resolved.batch_size) == (32, None, 32)
    assert resolved.with_global_batch() == resolved
    assert build(TrainConfig, resolved.tree(), "f") == resolved


def test_elastic_workers_have_a_range() -> None:
    scaling = make(scaling={"num_workers": [2, 6]}).scaling
    assert (scaling.min_workers, scaling.max_workers) == (2, 6)
    scaling = make(scaling={"num_workers": 3}).scaling
    assert (scaling.min_workers, scaling.max_workers) == (3, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_batch_size": None, "batch_size_per_worker": 4},
        {"epochs": None, "max_steps": 9, "max_time_s": 1.5},
        {"task_args": {"width": 3, "nested": {"list": [1, 2.5, "off", None]}, "nothing": None}},
        {"task_args": {"infinite": math.inf}},
        {"optimizer": {"name": "sgd", "lr": 1, "momentum": 0.9, "nesterov": False}},
        {"optimizer": {"name": "adam", "lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-7}},
        {"lr_schedule": {"name": "cosine", "warmup": 0.05}, "lr_scaling": {"rule": "sqrt", "base_batch_size": 32}},
        {"scaling": {"num_workers": [1, 4], "use_gpu": False}, "checkpoint": {"every_s": 10}},
        {"evaluate": {"every_steps": 10}, "data": {"num_workers": 2, "prefetch_factor": 4, "pin_memory": True}},
        {"compile": "reduce-overhead", "fullgraph": True, "microbatch_size": 8, "clip_grad_norm": 1},
    ],
)
def test_its_tree_builds_it_again(changes: dict[str, Any]) -> None:
    config = make(**changes)
    tree = config.tree()
    assert build(TrainConfig, tree, "again") == config
    assert build(TrainConfig, parse_mapping(dump_yaml(tree), "file"), "file") == config


def test_its_tree_has_the_defaults_too() -> None:
    """A run that is read again by a later version is the same run, whatever the defaults are then."""
    tree = make().tree()
    assert (tree["precision"], tree["seed"], tree["optimizer"]["name"], tree["checkpoint"]["keep"]) == (
        "fp32", 0, "adamw", 2,
    )  # fmt: skip
    assert "max_steps" not in tree


def test_task_args_come_through_as_they_are() -> None:
    given = {"nan": math.nan, "none": None, "inf": math.inf, "list": [1, None], "word": "off", "deep": {"x": None}}
    assert repr(make(task_args=given).tree()["task_args"]) == repr(given)


def test_every_key_has_a_description() -> None:
    from trainers.config.model import child_model

    def undescribed(model: Any, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(prefix + name)
            if (below := child_model(model, name)) is not None:
                found += undescribed(below, f"{prefix}{name}.")
        return found

    assert undescribed(TrainConfig) == []
