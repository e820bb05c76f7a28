"""One optimizer step: the same update for every split, and none when the loss
or a gradient is not finite.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from trainers.data.batch import tensors_of
from trainers.devices.group import Group
from trainers.model.precision import resolve_precision
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep
from trainers.task import Task

torch.set_num_threads(1)
CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]
SAMPLES = 12
LENGTH = 5


class Regression(Task):
    def loss(self, outputs, batch):
        return (outputs.squeeze(-1) - batch[1]).square().mean()


class Tokens(Task):
    """Sequences of different lengths: a loss is the mean over tokens that count."""

    def loss(self, outputs, batch):
        counts = (batch[1] > 0).to(outputs)
        return (
            outputs.squeeze(-1).square() * counts
        ).sum() / counts.sum().clamp(min=1)

    def weight(self, batch):
        return (batch[1] > 0).sum()


def regression_data():
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, generator=generator, dtype=torch.float64),
    )


def token_data():
    generator = torch.Generator().manual_seed(2)
    counted = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.5
    counted[:, 0] = True
    counted[0] = True  # uneven, so that a mean of means would be wrong
    return torch.randn(
        SAMPLES, LENGTH, 4, generator=generator, dtype=torch.float64
    ), counted.long()


def small_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def make_step(
    model,
    task,
    optimizer,
    precision="fp32",
    clip=None,
):
    forward = ForwardPass(model, task, resolve_precision(precision, CPU), CPU)
    return TrainStep(forward, optimizer, Group(0, 1, CPU), clip)


def run_step(step, data, sizes, idle=False):
    parts = zip(*(tensor.split(sizes) for tensor in data), strict=True)
    step(iter(list(parts)), sizes, sum(sizes), idle)


def gradients(model):
    return [
        parameter.grad.clone()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]


FACTORINGS = [
    [12],
    [6, 6],
    [4, 4, 4],
    [3, 3, 3, 3],
    [2] * 6,
    [1] * 12,
    [5, 4, 3],
    [1, 11],
    [7, 5],
]


@pytest.mark.parametrize("sizes", FACTORINGS, ids=str)
@pytest.mark.parametrize(
    ("task", "data"),
    [(Regression(), regression_data()), (Tokens(), token_data())],
)
def test_every_split_of_a_step_gives_the_gradient_of_the_whole(
    task, data, sizes
):
    model = small_model()
    task.loss(task.forward(model, data), data).backward()
    expected = gradients(model)
    expected_loss = float(task.loss(task.forward(model, data), data).detach())

    split = small_model()
    step = make_step(split, task, SGD(split.parameters(), lr=0.1))
    run_step(step, data, sizes)
    for ours, reference in zip(gradients(split), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)
    assert step.take_losses(1)()["train_loss"][0] == pytest.approx(
        expected_loss, abs=1e-12
    )
    assert not bool(step.bad)


class Replayed(torch.autograd.Function):
    """A product whose gradient for the weight lies in memory that each
    backward pass overwrites, as a CUDA graph's.
    """

    pool = torch.empty(1, 4, dtype=torch.float64)

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows)
        return rows @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        Replayed.pool.copy_(gradient.T @ ctx.saved_tensors[0])
        return None, torch.empty_like(Replayed.pool).set_(
            Replayed.pool
        )  # autograd takes it as it is


class Captured(nn.Linear):
    def forward(self, rows):
        return Replayed.apply(rows, self.weight)


@pytest.mark.parametrize("sizes", [[6, 6], [4, 4, 4]], ids=str)
def test_gradients_of_captured_passes_add_up(sizes):
    """`compile: reduce-overhead` and `max-autotune` (pytorch issues 96693 and 169545)."""
    found = {}
    for split, copies in ((sizes, True), (sizes, False), ([SAMPLES], False)):
        torch.manual_seed(0)
        model = Captured(4, 1, bias=False, dtype=torch.float64)
        step = make_step(model, Regression(), SGD(model.parameters(), lr=0.0))
        step.copies_gradients = copies
        run_step(step, regression_data(), split)
        [found[len(split), copies]] = gradients(model)
    whole = found[1, False]
    torch.testing.assert_close(
        found[len(sizes), True], whole, rtol=0, atol=1e-12
    )
    assert not torch.allclose(found[len(sizes), False], whole), (
        "autograd has copied: nothing is shown"
    )


class Decay(Optimizer):
    """An optimizer of a user's own: not fused, and it moves weights whatever
    the gradient is.
    """

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"]).sub_(
                    parameter.grad, alpha=group["lr"]
                )


OPTIMIZERS = {
    "sgd": lambda parameters: SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True
    ),
    "adam": lambda parameters: Adam(
        parameters, lr=0.1, weight_decay=0.1, fused=True
    ),
    "adamw": lambda parameters: AdamW(
        parameters, lr=0.1, weight_decay=0.1, fused=True
    ),
    "adam unfused": lambda parameters: Adam(parameters, lr=0.1),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1, fused=False),
    "own": lambda parameters: Decay(parameters, lr=0.1),
}


def poisoned(value):
    inputs, targets = (tensor.float() for tensor in regression_data())
    targets = targets.clone()
    targets[5] = value
    return inputs, targets


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(name, value):
    """Neither weights nor moments, and no step after it does: what is kept is
    the last good state.
    """
    good = tuple(tensor.float() for tensor in regression_data())

    def train(plan):
        model = small_model(torch.float32)
        step = make_step(
            model, Regression(), OPTIMIZERS[name](model.parameters()), clip=1.0
        )
        for data in plan:
            run_step(step, data, [6, 6])
        return model, step

    clean, fine = train([good, good])
    hurt, step = train([good, good, poisoned(value), good, good])
    assert not bool(fine.bad)
    assert bool(step.bad)
    for ours, reference in zip(
        hurt.parameters(), clean.parameters(), strict=True
    ):
        assert torch.equal(ours, reference)
    moments, expected = (
        tensors_of(list(one.optimizer.state.values())) for one in (step, fine)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(moments, expected, strict=True)
    )


def test_what_weighs_nothing_changes_nothing():
    """A microbatch of padding among others, and a step of nothing but padding."""
    inputs, counted = token_data()
    model = small_model()
    step = make_step(
        model, Tokens(), SGD(model.parameters(), lr=0.0, fused=True)
    )
    run_step(step, (inputs, counted), [SAMPLES])
    expected = gradients(model)
    padded = (
        torch.cat([inputs, inputs[:3]]),
        torch.cat([counted, torch.zeros_like(counted[:3])]),
    )
    run_step(step, padded, [SAMPLES, 3])
    for ours, one in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, one, rtol=0, atol=1e-15)
    run_step(step, (inputs, torch.zeros_like(counted)), [4, SAMPLES - 4])
    assert all(not gradient.any() for gradient in gradients(model))
    assert not step.bad


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_is_torchs_whatever_the_loss_is_scaled_by(precision):
    clip = 0.05
    reference = small_model()
    data = regression_data()
    task = Regression()
    optimizer = SGD(reference.parameters(), lr=1.0)
    task.loss(task.forward(reference, data), data).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
    assert norm > clip
    optimizer.step()

    model = small_model()
    run_step(
        make_step(
            model, task, SGD(model.parameters(), lr=1.0), precision, clip
        ),
        data,
        [4, 4, 4],
    )
    for ours, theirs in zip(
        model.parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "own"])
def test_an_fp16_scaler_skip_is_no_divergence(name):
    """Where the scale is too large gradients overflow: the scaler skips that
    step, lowers it, and training goes on.
    """
    data = tuple(tensor.float() for tensor in regression_data())
    model = small_model(torch.float32)
    step = make_step(
        model,
        Regression(),
        OPTIMIZERS[name](model.parameters()),
        precision="fp16",
    )
    step.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    states = [copy.deepcopy(model.state_dict())]
    for scale in (64.0, 2.0**40, 64.0):
        step.scaler.scale(
            torch.ones(())
        )  # the scaler makes its tensors at the first call
        step.scaler.update(scale)
        run_step(step, data, [6, 6])
        states.append(copy.deepcopy(model.state_dict()))
        assert (step.scaler.get_scale() < scale) == (scale == 2.0**40)
    moved = [
        any(not torch.equal(a[key], b[key]) for key in a)
        for a, b in itertools.pairwise(states)
    ]
    assert moved == [True, False, True]
    assert not bool(step.bad)


def test_a_first_step_that_the_scaler_skips_leaves_no_trace_in_the_momentum():
    """Fused SGD would allocate the buffers in it and write them in none."""

    def train(skipped):
        model = small_model(torch.float32)
        step = make_step(
            model,
            Regression(),
            SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
            "fp16",
        )
        inputs, targets = (tensor.float() for tensor in regression_data())
        del [torch.full((64, 64), 7e7) for _ in range(50)][
            :
        ]  # what new memory is likely to hold
        for _ in range(skipped):
            run_step(step, (inputs, targets * 1e30), [SAMPLES])
        step.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            run_step(step, (inputs, targets), [SAMPLES])
        return [parameter.detach() for parameter in model.parameters()]

    for skipped, clean in zip(train(1), train(0), strict=True):
        torch.testing.assert_close(skipped, clean, rtol=0, atol=0)


@pytest.mark.parametrize(
    "lr",
    [0.1, torch.tensor(0.1)],
    ids=["a number", "one tensor of all groups"],
)
def test_each_group_gets_a_rate_of_its_own(lr):
    model = small_model()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = AdamW(groups, lr=lr, foreach=False)
    make_step(model, Regression(), optimizer).set_lrs([0.1, 0.2, 0.3, 0.4])
    assert [
        float(group["lr"]) for group in optimizer.param_groups
    ] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert all(
        isinstance(group["lr"], type(lr)) for group in optimizer.param_groups
    )
