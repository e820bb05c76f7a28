"""The probe of a microbatch: lands on a size that fits, and leaves everything
as it was, to the bit.
"""

import copy
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.data import TensorDataset

from trainers.devices.group import Group
from trainers.model.precision import resolve_precision
from trainers.step.forward import ForwardPass
from trainers.step.microbatch import Probe, choose_microbatch, fewest_parts
from trainers.task import Task

CPU = torch.device("cpu")


class Net(nn.Module):
    """BatchNorm, dropout, a buffer that is not saved, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 2),
        )
        self.layers[3].bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.calls += 1
        return self.layers(inputs)


class Hungry(Task):
    """More than `fits` samples at once are out of memory, in the forward pass
    or in the loss.
    """

    def __init__(self, fits, where="forward", error=None):
        self.fits = fits
        self.where = where
        self.error = error or (
            lambda: torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB"
            )
        )
        self.record = SimpleNamespace(
            tried=[]
        )  # which throw-away passes do not put back: it is no class of ours

    @property
    def tried(self):
        return self.record.tried

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(50, 4, generator=generator), torch.arange(50) % 2
        )

    def forward(self, model, batch):
        self.tried.append(len(batch[0]))
        outputs = model(batch[0])
        if self.where == "forward" and len(batch[0]) > self.fits:
            raise self.error()
        return outputs

    def transform(self, batch, training):
        random.random()
        np.random.rand()
        return batch[0] + torch.randn_like(batch[0]), batch[1]

    def loss(self, outputs, batch):
        loss = nn.functional.cross_entropy(outputs, batch[1])
        if self.where == "backward" and len(batch[0]) > self.fits:
            loss.register_hook(self._fail)
        return loss

    def _fail(self, gradient):
        raise self.error()


def choose(task, wanted, share, model=None, optimizer=None, **known):
    model = model if model is not None else Net()
    optimizer = optimizer or AdamW(model.parameters(), fused=True)
    group = Group(0, 1, CPU)
    spec = resolve_precision("fp32", CPU)
    probe = Probe(
        ForwardPass(model, task, spec, CPU),
        optimizer,
        task.dataset("train"),
        group,
    )
    return choose_microbatch(wanted, share, probe, **known)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("share", "fits", "expected", "tried"),
    [
        (64, 64, 64, [64]),
        (64, 100, 64, [64]),
        (64, 63, 32, [64, 32]),
        (64, 5, 5, [64, 32, 16, 8, 4, 6, 5]),
        (50, 7, 7, [50, 25, 13, 7, 9, 8]),
        (7, 3, 3, [7, 4, 2, 3]),
        (128, 63, 43, [128, 64, 32, 43]),  # as in tests/gpu/test_memory_gpu.py
        (100, 60, 50, [100, 50]),  # more than the dataset has: samples repeat
    ],
)
def test_auto_lands_on_the_largest_part_that_fits(
    where, share, fits, expected, tried
):
    task = Hungry(fits, where)
    assert choose(task, "auto", share) == expected
    assert sizes(task) == tried
    # What fits is tried twice: the second step has the optimizer's state in
    # memory, as all later ones have.
    assert all(task.tried.count(size) == 1 + (size <= fits) for size in tried)


def sizes(task):
    """The sizes in the order in which they were tried."""
    return [size for size, _ in itertools.groupby(task.tried)]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_fixed_size_that_does_not_fit_raises(where):
    task = Hungry(8, where)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        choose(task, 16, 64)
    assert task.tried == [16]


class OwnState(Optimizer):
    """An optimizer of a user: moments from the start, a step count in the
    group (schedule-free, Prodigy).
    """

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5, "k": 0})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group["k"] += 1
        for parameter in group["params"]:
            self.state[parameter]["mean"].lerp_(parameter.grad, 0.1)
            parameter.sub_(
                self.state[parameter]["mean"], alpha=group["lr"] / group["k"]
            )


def optimizers(model):
    trained = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return {
        "adamw": lambda: AdamW(trained, lr=0.5, weight_decay=0.1, fused=True),
        "sgd": lambda: SGD(trained, lr=0.5, momentum=0.9, fused=True),
        "adagrad": lambda: Adagrad(
            trained, lr=0.5
        ),  # has its state from the start
        "own": lambda: OwnState(trained),
    }


def rng():
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "own"])
@pytest.mark.parametrize(
    ("wanted", "fits"), [("auto", 64), ("auto", 5), (16, 64), (16, 5)]
)
def test_everything_is_put_back_to_the_bit(name, wanted, fits):
    model = Net()
    optimizer = optimizers(model)[name]()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    state = copy.deepcopy(optimizer.state_dict())
    random_state = rng()
    places = {k: t.data_ptr() for k, t in tensors.items()}
    try:
        choose(Hungry(fits, "backward"), wanted, 32, model, optimizer)
    except torch.OutOfMemoryError:
        assert (wanted, fits) == (16, 5)

    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert [
        key
        for key in before
        if key != "calls" and not torch.equal(after[key], before[key])
    ] == []
    assert {key: tensor.data_ptr() for key, tensor in after.items()} == places
    assert all(parameter.grad is None for parameter in model.parameters())
    assert str(optimizer.state_dict()) == str(state)
    assert rng() == random_state
    assert model.training


def test_the_optimizers_own_memory_counts():
    class Large(OwnState):
        def step(self, closure=None):
            if task.tried[-1] > 8:
                raise torch.OutOfMemoryError("no room for the moments")
            super().step()

    task = Hungry(1000)
    model = Net()
    optimizer = Large(
        [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
    )
    assert choose(task, "auto", 32, model, optimizer) == 8


@pytest.mark.parametrize("share", [*range(1, 60), 96, 1000])
def test_auto_takes_as_few_parts_as_fit(share):
    """The largest even part that fits, for every limit; no size is tried
    twice, and few that do not fit.
    """
    for limit in range(1, share + 1):
        tried = []

        def fits(size, limit=limit, tried=tried):
            tried.append(size)
            return size <= limit

        fewest = next(
            parts
            for parts in range(1, share + 1)
            if -(-share // parts) <= limit
        )
        assert fewest_parts(share, fits) == -(-share // fewest)
        assert len(set(tried)) == len(tried)
        assert len(tried) <= 2 * math.ceil(math.log2(fewest)) + 1


def told(fits, wanted, bounds):
    """The size where other trials have told `bounds`, the sizes that were
    tried, and what was told.
    """
    task = Hungry(fits)
    said = []
    size = choose(
        task,
        wanted,
        64,
        bounds=bounds,
        tell=lambda size, fits: said.append((size, fits)),
    )
    return size, set(task.tried), said


@pytest.mark.parametrize("fits", [2, 5, 13, 31, 63, 64])
def test_it_lands_where_it_would_without(fits):
    size, tried, said = told(fits, "auto", (None, None))
    assert {one for one, _ in said} == tried
    assert all(verdict == (one <= fits) for one, verdict in said)
    # The next trial knows it all: the same size, and nothing runs out of
    # memory again.
    low = max((one for one, verdict in said if verdict), default=None)
    high = min((one for one, verdict in said if not verdict), default=None)
    assert told(fits, "auto", (low, high)) == (size, set(), [])


def test_a_wanted_size_that_is_known_to_fit_is_not_tried():
    assert told(40, 32, (40, None)) == (32, set(), [])


@pytest.mark.parametrize("wanted", [32, 33, 64])
def test_a_wanted_size_that_is_known_not_to_fit_is_refused(wanted):
    with pytest.raises(
        torch.OutOfMemoryError, match="a microbatch of 32 is known not to fit"
    ):
        told(31, wanted, (16, 32))


def test_when_not_even_one_sample_fits_auto_is_refused():
    with pytest.raises(
        torch.OutOfMemoryError, match="a microbatch of 1 is known not to fit"
    ):
        told(0, "auto", (None, 1))
