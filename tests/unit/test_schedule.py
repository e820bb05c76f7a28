"""torch's LR schedulers in the loop: their rates are those of a plain loop,
and a resume changes none.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
)

from tests.specs import error_of, whole_state
from tests.unit.test_graphs import Fake, make
from tests.unit.test_loop import (
    PER_EPOCH,
    Context,
    Tiny,
    check_resume,
    config,
    curve,
    train,
)
from trainers.errors import CheckpointError, ConfigError
from trainers.loop.fit import fit
from trainers.model.schedule import Schedule, StandIn

STEPS = 3 * PER_EPOCH
BY_NAME = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 2, 2], "gamma": 0.5},
    "ConstantLR": {"total_iters": 2},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.75},
    "PolynomialLR": {"total_iters": 9, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 7, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": STEPS},
}
SGD_CONFIG = {"name": "sgd", "lr": 0.05, "momentum": 0.9}


OWN = {"lr_schedule": {}, "optimizer": SGD_CONFIG}


class Named(Tiny):
    """Brings a scheduler of torch's by its name."""

    def __init__(self, name, every="step", **options):
        super().__init__()
        self.name = name
        self.every = every
        self.options = options or BY_NAME[name]

    def schedule(self, optimizer, config):
        return getattr(lr_scheduler, self.name)(
            optimizer, **self.options
        ), self.every


def plain(name, every, kind=SGD, **options):
    """The options of each step of a plain loop."""
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.05, **options)
    scheduler = getattr(lr_scheduler, name)(optimizer, **BY_NAME[name])
    found = []
    for step in range(1, STEPS + 1):
        found.append(dict(optimizer.param_groups[0]))
        optimizer.step()
        if every == "step" or step % PER_EPOCH == 0:
            scheduler.step()
    return found


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_rates_are_those_of_a_plain_loop(name, every, tmp_path):
    train(tmp_path, Named(name, every), **OWN, checkpoint={"every_steps": 99})
    expected = plain(name, every, momentum=0.9)
    assert [lr for _, lr, _ in curve(tmp_path)] == [
        group["lr"] for group in expected
    ]
    state = whole_state(tmp_path, STEPS)
    (group,) = state["optimizer"]["param_groups"]
    assert group["momentum"] == expected[-1]["momentum"]
    assert set(group) <= set(
        SGD([nn.Parameter(torch.zeros(1))], 0.1).param_groups[0]
    ), "the stand-in's stay with it"


class Chosen(Tiny):
    """Brings a scheduler of its own."""

    def __init__(self, how="sequential"):
        super().__init__()
        self.how = how

    def optimizer(self, model, config):
        first, *others = model.parameters()
        self.made = SGD(
            [{"params": [first], "lr": 0.5}, {"params": others}],
            lr=0.05,
            fused=True,
        )
        return self.made

    def schedule(self, optimizer, config):
        if self.how == "lambda":
            return LambdaLR(optimizer, lambda step: 0.5**step)
        if self.how == "another":
            return LambdaLR(self.made, lambda step: 0.5**step)
        if self.how == "none":
            return None
        parts = [
            LinearLR(optimizer, 0.1, total_iters=4),
            CosineAnnealingLR(optimizer, 8),
        ]
        return SequentialLR(optimizer, parts, milestones=[4])


def test_the_tasks_own(tmp_path):
    train(
        tmp_path,
        Chosen("lambda"),
        lr_schedule={},
        checkpoint={"every_steps": 99},
    )
    assert [lr for _, lr, _ in curve(tmp_path)] == [
        0.5 * 0.5**n for n in range(STEPS)
    ]
    state = whole_state(tmp_path, STEPS)
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [
        base * 0.5 ** (STEPS - 1) for base in (0.5, 0.05)
    ]


class Holding(LRScheduler):
    """From its seventh step on it holds the rate that it has found there."""

    def get_lr(self):
        rates = [0.5**self.last_epoch]
        if self.last_epoch >= 6 and not hasattr(self, "held"):
            self.held = rates
        return getattr(self, "held", rates)


class Held(Tiny):
    def schedule(self, optimizer, config):
        return Holding(optimizer)


def test_a_trial_of_a_scheduler_leaves_no_attribute(tmp_path):
    check_resume(tmp_path, Held, 8, **OWN)
    assert [lr for _, lr, _ in curve(tmp_path / "cut")] == [
        0.5 ** min(step, 6) for step in range(STEPS)
    ]


PLATEAU = {"patience": 0, "factor": 0.5, "threshold": 0.3}


def plateau():
    return Named("ReduceLROnPlateau", **PLATEAU)


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        (Chosen, OWN),
        (lambda: Named("OneCycleLR"), OWN),
        (lambda: Named("CyclicLR"), OWN | {"lr_schedule": {"warmup": 3}}),
        (lambda: Named("MultiStepLR", "epoch"), OWN),
        (plateau, OWN | {"evaluate": {"every_steps": 2}}),
    ],
)
@pytest.mark.parametrize("at", [3, 10])
def test_a_resume_is_bit_equal(task, changes, at, tmp_path):
    check_resume(tmp_path, task, at, **changes)
    assert len({lr for _, lr, _ in curve(tmp_path / "cut")}) > 2


@pytest.mark.parametrize(
    ("by", "mode"),
    [("step", "min"), ("val_loss", "min"), ("val_accuracy", "max")],
)
def test_a_plateau_is_one_of_the_evaluations(by, mode, tmp_path):
    context = Context(tmp_path)
    fit(
        Named("ReduceLROnPlateau", by, mode=mode, **PLATEAU),
        config(**OWN, evaluate={"every_steps": 2}),
        context,
    )
    figures = [
        row["val_loss" if by == "step" else by]
        for row, kept in context.reports
        if kept is None
    ]
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, **PLATEAU)
    rates = []
    for step in range(1, STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        if step % 2 == 0:
            scheduler.step(figures[step // 2 - 1])
    assert [lr for _, lr, _ in curve(tmp_path)] == rates
    assert rates[0] > rates[-1]


class Unseen(Named):
    def dataset(self, split):
        return super().dataset(split) if split == "train" else None


@pytest.mark.parametrize(
    ("task", "chosen", "field"),
    [
        (Unseen("ReduceLROnPlateau", **PLATEAU), {}, "schedule()"),
        (Named("ReduceLROnPlateau", mode="max", **PLATEAU), {}, "schedule()"),
        (
            Named("ReduceLROnPlateau", "val_accuracy", **PLATEAU),
            {},
            "schedule()",
        ),
        (
            Named("ReduceLROnPlateau", "val_acuracy", mode="max", **PLATEAU),
            {},
            "schedule()",
        ),
        (Chosen(), {"name": "linear"}, "lr_schedule.name"),
        (Named("StepLR", "batch"), {}, "schedule()"),
        (Chosen("another"), {}, "schedule()"),
        # It ends before the run.
        (
            Named("OneCycleLR", max_lr=0.1, total_steps=STEPS - 1),
            {},
            "schedule()",
        ),
        (
            Named("OneCycleLR", "epoch", max_lr=0.1, total_steps=2),
            {},
            "schedule()",
        ),
        (
            Named("LambdaLR", lr_lambda=lambda step: [1.0, 0.5, 0.25][step]),
            {},
            "schedule()",
        ),
    ],
)
def test_mistakes(task, chosen, field):
    with error_of(field):
        train(None, task, lr_schedule=chosen)


def test_another_scheduler_does_not_go_on(tmp_path):
    train(tmp_path, Named("StepLR", "epoch"), **OWN)
    with pytest.raises(CheckpointError, match="schedule"):
        fit(Named("ExponentialLR", "epoch"), config(**OWN), Context(tmp_path))


def test_a_captured_step_takes_rates_but_no_momenta():
    step = make(
        Fake(),
        lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    )

    def follow(name):
        stand_in = StandIn(step.optimizer)
        made = Schedule(
            Named(name).schedule(stand_in, config()),
            stand_in,
            config(**OWN).lr_schedule,
            STEPS,
        )
        made.stepped(1, ends_epoch=False)
        made.stepped(2, ends_epoch=False)
        step.follow(made, 2)

    follow("StepLR")
    rate = step.optimizer.param_groups[0]["lr"]
    assert isinstance(rate, Tensor)
    assert float(rate) == pytest.approx(0.025)
    step.check_lr()
    with pytest.raises(
        ConfigError, match=r"`cuda_graphs: .*cycle_momentum=False"
    ):
        follow("OneCycleLR")
