"""Which step has how many samples where the batch size changes: against a
plain count, and on any number of workers.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from tests.specs import kept_result, logged
from tests.unit.test_ema import states
from tests.unit.test_loop import Context, Tiny, check_resume
from tests.unit.test_loop import config as tiny_config
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.sections import ScheduleConfig
from trainers.data.batch_schedule import BatchSchedule
from trainers.errors import CheckpointError, ConfigError
from trainers.loop.fit import fit
from trainers.model.optimizer import (
    build_optimizer,
    built_lr,
    lr_factor,
    lr_scale,
)

Counted = tuple[int, int, int, int, int, int]
"""Epoch, number in it, first sample of the run, start and stop in the epoch, size."""


def counted(sizes, length, drop_last, steps):
    """The steps of a run, one after another."""
    epoch = number = start = sample = 0
    while steps:
        size = next(
            size for until, size in sizes if until is None or sample < until
        )
        stop = min(start + size, length)
        if drop_last and stop - start < size:
            epoch = epoch + 1
            number = 0
            start = 0
            continue
        until = next(
            (
                until
                for until, _ in sizes
                if until is not None and sample < until
            ),
            None,
        )
        if not drop_last and until is not None:
            stop = min(stop, start + until - sample)
        yield epoch, number, sample, start, stop, size
        sample = sample + stop - start
        number = number + 1
        steps = steps - 1
        epoch, number, start = (
            (epoch, number, stop) if stop < length else (epoch + 1, 0, 0)
        )


def drawn(seed):
    """A schedule of up to five sizes, growing or not, over epochs that are
    shorter or longer than it.
    """
    draw = random.Random(seed)
    length = draw.randint(1, 200)
    most = length if seed % 2 else 300
    drop_last = bool(seed % 2)
    ends = sorted(draw.sample(range(1, 12 * length + 12), draw.randint(0, 4)))
    return (
        [(until, draw.randint(1, most)) for until in [*ends, None]],
        length,
        drop_last,
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_where_counting_one_after_another_finds_it(seed):
    sizes, length, drop_last = drawn(seed)
    batches = BatchSchedule(sizes, length, drop_last)
    steps = list(counted(sizes, length, drop_last, 400))
    first_of = {
        epoch: step
        for step, (epoch, number, *_) in reversed(list(enumerate(steps)))
        if number == 0
    }
    for step, (epoch, number, sample, start, stop, size) in enumerate(steps):
        assert batches.place(step) == (epoch, number)
        assert batches.bounds(epoch, number) == (start, stop)
        assert (batches.samples(step), batches.size(step)) == (sample, size)
        assert batches.first_step(epoch) == first_of[epoch]
        assert batches.step_at(sample) == step
        if stop - start > 1:
            assert batches.step_at(sample + 1) == step + 1
        assert batches.epochs(step) == pytest.approx(
            epoch + number / batches.steps_in(epoch)
        )


def config(**changes):
    tree = {"task": "t:T", "epochs": 2, "optimizer": {"lr": 0.1}, **changes}
    return build(TrainConfig, tree, "f")


SCHEDULE = [{"until_samples": 80, "size": 8}, {"size": 32}]


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [{"until_samples": 80, "size": 8}],
        [{"size": 8}, {"size": 16}],
        [
            {"until_samples": 80, "size": 8},
            {"until_samples": 80, "size": 16},
            {"size": 32},
        ],
        [{"until_samples": 80, "size": 0}, {"size": 32}],
        [{"samples": 80, "size": 8}, {"size": 32}],
    ],
)
def test_a_schedule_that_could_be_misread_is_refused(schedule):
    with pytest.raises(ConfigError) as raised:
        config(batch_schedule=schedule)
    assert raised.value.field.startswith("batch_schedule")


def test_learning_rate_and_course_follow():
    rule = {"rule": "linear", "base_batch_size": 16}
    made = config(batch_schedule=SCHEDULE, lr_scaling=rule)
    assert built_lr(made) == 0.1
    assert [lr_scale(made.lr_scaling, size) for size in (8, 32)] == [0.5, 2.0]
    batches = BatchSchedule(made.batch_sizes, 96)
    total = batches.first_step(2)
    assert total == 10 + 1 + 3
    course = [
        lr_factor(ScheduleConfig(name="linear"), step, total, batches)
        for step in range(total)
    ]
    assert course == pytest.approx(
        [1 - batches.samples(step) / 192 for step in range(total)]
    )
    warm = ScheduleConfig(name="linear", warmup=0.25)
    course = [lr_factor(warm, step, total, batches) for step in range(total)]
    assert course[:6] == pytest.approx(
        [(step + 1) / 6 for step in range(6)]
    )  # 48 of 192 samples
    assert course[6:] == pytest.approx(
        [1 - (batches.samples(step) - 48) / 144 for step in range(6, total)]
    )


CHANGING = {
    "global_batch_size": None,
    "batch_schedule": [
        {"until_samples": 12, "size": 3},
        {"until_samples": 41, "size": 8},
        {"size": 5},
    ],
    "lr_scaling": {"rule": "sqrt", "base_batch_size": 5},
}
SDE = {
    "lr_scaling": {"rule": "sde", "base_batch_size": 5},
    "optimizer": {"name": "adamw", "lr": 0.05, "weight_decay": 0.1},
    "ema": {"decay": 0.9},
}
VARIANTS = [
    {},
    SDE,
    {"lr_schedule": {"name": "linear", "warmup": 0.1}},
    {"max_steps": 14, "drop_last": True},
]


def run(path, **changes):
    fit(Tiny(), tiny_config(**CHANGING | changes), Context(path))


@pytest.mark.parametrize(
    "changes", VARIANTS, ids=["cosine", "sde", "linear", "drop_last"]
)
def test_a_run_that_is_cut_in_any_part_of_its_schedule_goes_on_to_the_bit(
    changes, tmp_path
):
    changes = CHANGING | changes
    # Within each size, and where the first ends.
    cuts = (2, 4, 6, 9) if "lr_schedule" in changes else (4, 9)
    check_resume(tmp_path, Tiny, *cuts, **changes)
    result = kept_result(tmp_path / "whole")
    rows = logged(tmp_path / "cut", "train_loss")
    batches = BatchSchedule(
        tiny_config(**CHANGING).batch_sizes, 22, bool(changes.get("drop_last"))
    )
    assert [row["samples"] for row in rows] == [
        batches.samples(step + 1) for step in range(result.steps)
    ]
    assert [row["global_batch_size"] for row in rows] == [
        batches.size(step) for step in range(result.steps)
    ]
    assert result.samples == rows[-1]["samples"]


class Watching(Tiny):
    """Notes the options of every step, and a weight before the first and after each."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.weights: list[Tensor] = []

    def after_step(self, model, step):
        self.weights.append(model.state_dict()["0.weight"].clone())

    def optimizer(self, model, config):
        made = super().optimizer(model, config)
        (group,) = made.param_groups
        self.weights = [model.state_dict()["0.weight"].clone()]
        made.register_step_pre_hook(
            lambda *_: self.seen.append(
                tuple(
                    group[name]
                    for name in ("lr", "betas", "eps", "weight_decay")
                )
            )
        )
        return made


def test_with_sde_each_size_has_the_options_of_a_run_of_that_size(tmp_path):
    task = Watching()
    made = tiny_config(
        **CHANGING | SDE | {"lr_schedule": {"name": "constant"}}
    )
    result = fit(task, made, Context(tmp_path))
    batches = BatchSchedule(made.batch_sizes, 22)
    alone = {}
    for size in (3, 8, 5):
        fixed = tiny_config(**SDE | {"global_batch_size": size})
        (group,) = build_optimizer(nn.Linear(1, 1), fixed).param_groups
        alone[size] = tuple(
            group[name] for name in ("lr", "betas", "eps", "weight_decay")
        )
    expected = [alone[batches.size(step)] for step in range(result.steps)]
    assert task.seen[-result.steps :] == expected, "before them the probe's"
    assert len(set(expected)) == 3
    average = task.weights[0]
    for step, weight in enumerate(task.weights[1:]):
        kept = 0.9 ** (batches.size(step) / 5)
        average = kept * average + (1 - kept) * weight
    torch.testing.assert_close(
        states(tmp_path)[-1]["model"]["0.weight"], average
    )


def test_a_run_does_not_go_on_under_another_schedule(tmp_path):
    run(tmp_path)
    other = [{"until_samples": 12, "size": 4}, *CHANGING["batch_schedule"][1:]]
    with pytest.raises(
        CheckpointError, match="it was trained with batch_schedule"
    ):
        run(tmp_path, batch_schedule=other)


class Cycling(Watching):
    """Its scheduler cycles the first of Adam's betas."""

    def schedule(self, optimizer, config):
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=99)


def test_with_sde_cycled_betas_are_adapted_to_each_size(tmp_path):
    task = Cycling()
    made = tiny_config(**CHANGING | SDE | {"lr_schedule": {}})
    result = fit(task, made, Context(tmp_path))
    batches = BatchSchedule(made.batch_sizes, 22)
    plain = AdamW([nn.Parameter(torch.zeros(1))])
    scheduler = task.schedule(plain, made)
    for step, (_, betas, *_) in enumerate(task.seen[-result.steps :]):
        (group,) = plain.param_groups
        ratio = batches.size(step) / 5
        assert betas == tuple(beta**ratio for beta in group["betas"])
        plain.step()
        scheduler.step()
