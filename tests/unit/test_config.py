"""TrainConfig: what fits together, what does not, and the plain data that
builds it again.
"""

import pytest

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import ConfigError

BASE = {
    "task": "01-task:Mine",
    "epochs": 2,
    "global_batch_size": 64,
    "optimizer": {"lr": 0.1},
}


def make(**changes):
    """BASE with changes; None removes a key."""
    return build(
        TrainConfig,
        {k: v for k, v in (BASE | changes).items() if v is not None},
        "train.yaml",
    )


def sentences(**changes):
    with pytest.raises(ConfigError) as raised:
        make(**changes)
    return str(raised.value).splitlines()


def test_the_defaults_are_a_run():
    config = make()
    assert (
        config.batch_size,
        config.precision,
        config.microbatch_size,
        config.launcher,
    ) == (64, "fp32", "auto", "ray")
    assert config.optimizer.name == "adamw"


REFUSED = [
    ("batch_size_per_worker: 8", "batch_size_per_worker"),
    ("global_batch_size: null", "global_batch_size"),
    ("global_batch_size: 64.0", "global_batch_size"),
    ("max_steps: 5", "max_steps"),
    ("epochs: 0", "epochs"),
    ("microbatch_size: big", "microbatch_size"),
    ("task: ../evil:Task", "task"),
    ("name: ../up", "name"),
    ("precision: fp16-pure", "optimizer.eps"),
    (
        "{precision: fp16-pure, optimizer: {lr: 0.1, eps: 1e-07}, lr_scaling: {rule: sde, base_batch_size: 1}}",
        "optimizer.eps",
    ),
    ("precision: fp8", "compile"),
    ("{precision: fp8, device: cpu}", "precision"),
    ("fullgraph: true", "fullgraph"),
    ("seed: 18446744073709551616", "seed"),
    ("optimizer: {}", "optimizer.lr"),
    ("optimizer: {lr: .nan}", "optimizer.lr"),
    ("optimizer: {lr: 0.1, momentum: 0.9}", "optimizer.momentum"),
    ("optimizer: {lr: 0.1, name: sgd, eps: 1e-08}", "optimizer.eps"),
    ("optimizer: {lr: 0.1, name: sgd, nesterov: true}", "optimizer.nesterov"),
    ("optimizer: {lr: 0.1, betas: [0.9]}", "optimizer.betas"),
    (
        "{optimizer: {lr: 0.1, name: adamw8bit}, strategy: fsdp}",
        "optimizer.name",
    ),
    ("lr_schedule: {warmup: 1.5}", "lr_schedule.warmup"),
    ("lr_scaling: {rule: sqrt}", "lr_scaling.rule"),
    ("lr_scaling: {rule: sde}", "lr_scaling.rule"),
    (
        "{lr_scaling: {rule: sde, base_batch_size: 8}, optimizer: {name: sgd, lr: 0.1}}",
        "lr_scaling.rule",
    ),
    ("ema: {decay: 1.0}", "ema.decay"),
    ("early_stopping: {metric: val_loss}", "early_stopping.metric"),
    ("early_stopping: {patience: 5}", "early_stopping.patience"),
    ("checkpoint: {best_mode: min}", "checkpoint.best_mode"),
    ("evaluate: {every_epochs: 1, every_steps: 5}", "evaluate.every_steps"),
    ("data: {prefetch_factor: 2}", "data.prefetch_factor"),
    ("scaling: {num_workers: [4]}", "scaling.num_workers"),
    ("{scaling: {num_workers: 2}, strategy: none}", "strategy"),
    ("{scaling: {num_workers: 2}, launcher: local}", "scaling.num_workers"),
    (
        "{scaling: {num_workers: [1, 2]}, launcher: spawn}",
        "scaling.num_workers",
    ),
    ("{strategy: fsdp, compile: max-autotune}", "strategy"),
    ("{strategy: dp, compile: default}", "strategy"),
    ("{strategy: fsdp, ddp: {sync_batchnorm: true}}", "ddp.sync_batchnorm"),
    ("{strategy: dp, activation_checkpointing: full}", "strategy"),
    ("{cuda_graphs: true, device: cpu}", "cuda_graphs"),
    ("{cuda_graphs: true, scaling: {num_workers: 2}}", "cuda_graphs"),
    ("{cuda_graphs: true, compile: reduce-overhead}", "cuda_graphs"),
    ("batch_size: 3", "batch_size"),
]


@pytest.mark.parametrize(("changes", "field"), REFUSED, ids=str)
def test_what_cannot_be_is_said_in_one_sentence_about_its_key(changes, field):
    [line] = sentences(**parse_mapping(changes, "test"))
    assert line.startswith(
        (f"train.yaml: `{field}` ", f"train.yaml: `{field}: ")
    )


def test_batch_size_per_worker_becomes_the_global_one():
    config = make(
        global_batch_size=None,
        batch_size_per_worker=8,
        scaling={"num_workers": 4},
    )
    assert config.batch_size == 32
    resolved = config.with_global_batch()
    assert (
        resolved.global_batch_size,
        resolved.batch_size_per_worker,
        resolved.batch_size,
    ) == (32, None, 32)
    assert resolved.with_global_batch() == resolved
    assert build(TrainConfig, resolved.tree(), "f") == resolved


@pytest.mark.parametrize("ends", [[2, 6], [6, 2]])
def test_elastic_workers_have_a_range(ends):
    scaling = make(scaling={"num_workers": ends}).scaling
    assert scaling.num_workers == [2, 6]
    assert (scaling.min_workers, scaling.max_workers) == (2, 6)
    scaling = make(scaling={"num_workers": 3}).scaling
    assert (scaling.min_workers, scaling.max_workers) == (3, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_batch_size": None, "batch_size_per_worker": 4},
        {"epochs": None, "max_steps": 9, "max_time_s": 1.5},
        {
            "task_args": {
                "width": 3,
                "nested": {"list": [1, 2.5, "off", None]},
                "nothing": None,
            }
        },
        {
            "optimizer": {
                "name": "sgd",
                "lr": 1,
                "momentum": 0.9,
                "nesterov": False,
            }
        },
        {
            "lr_schedule": {"name": "cosine", "warmup": 0.05},
            "lr_scaling": {"rule": "sqrt", "base_batch_size": 32},
        },
        {
            "scaling": {"num_workers": [1, 4], "use_gpu": False},
            "checkpoint": {"every_s": 10},
        },
    ],
)
def test_its_tree_builds_it_again(changes):
    config = make(**changes)
    tree = config.tree()
    assert build(TrainConfig, tree, "again") == config
    assert (
        build(TrainConfig, parse_mapping(dump_yaml(tree), "file"), "file")
        == config
    )


@pytest.mark.parametrize(
    ("changes", "meant"),
    [
        ("precision: bf61", "bf16"),
        ("precision: BFloat16", "bf16"),
        ("optimizer: {lr: 0.1, name: AdamW}", "adamw"),
        ("optimizer: {lr: 0.1, name: SGD}", "sgd"),
        ("strategy: fspd", "fsdp"),
        ("compile: reduce_overhead", "reduce-overhead"),
        ("checkpoint: {best: val_loss, best_mode: minimum}", "min"),
        ("scaling: {placement_strategy: spread}", "SPREAD"),
    ],
)
def test_a_value_that_is_almost_one_is_named(changes, meant):
    with pytest.raises(ConfigError) as raised:
        build(TrainConfig, BASE | parse_mapping(changes, "test"), "train.yaml")
    assert raised.value.fix == f"did you mean `{meant}`?"
