"""Out of memory in forward, backward and optimizer, on one rank and on all: no
hang, the largest size that fits, and the training result of the same global
batch.

Injected here; real in `test_real_memory_ends_the_same_way`.
"""

import ctypes
import itertools
import math
import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from tests.distributed.processes import run_processes
from tests.specs import losses, make, ranked, train_on
from tests.tasks import Blobs
from trainers.launch.local import run_local, run_spawn

PHASES = ("forward", "backward", "optimizer")
M_ARENA_MAX = -8  # of malloc.h
BATCH = 50  # shares of 25 with two workers, of 17 and 16 with three


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        return inputs.clone()

    @staticmethod
    def backward(context, *gradients):
        raise torch.OutOfMemoryError("injected: in the backward pass")


class Limited(Blobs):
    """Runs out of memory above `limit` samples, in one phase, on one rank or
    (rank None) on all.
    """

    def __init__(self, phase, limit, rank):
        super().__init__(samples=170, dtype="float64")
        self.phase = phase
        self.limit = limit
        self.only = rank
        self.largest = 0

    def too_many(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.largest > self.limit and self.only in (None, rank)

    def forward(self, model, batch):
        if model.training:
            self.largest = len(batch[0])
            if self.phase == "forward" and self.too_many():
                raise torch.OutOfMemoryError("injected: in the forward pass")
        outputs = super().forward(model, batch)
        return (
            _Fails.apply(outputs)
            if model.training and self.phase == "backward" and self.too_many()
            else outputs
        )

    def optimizer(self, model, config):
        task = self

        class Checked(AdamW):
            def step(self, closure=None):
                if task.phase == "optimizer" and task.too_many():
                    raise torch.OutOfMemoryError("injected: in the optimizer")
                super().step(closure)

        return Checked(model.parameters(), lr=0.01, fused=True)


def largest_part(share, limit):
    """The size that `auto` must find."""
    return next(
        -(-share // parts)
        for parts in range(1, share + 1)
        if -(-share // parts) <= limit
    )


LIMITS = (1, 9, 13)


def cases(world_size, every):
    """(phase, limit, rank): all 27, or nine with each pair of two of them."""
    ranks = [None, 0, world_size - 1]
    return [
        (PHASES[phase], LIMITS[limit], ranks[rank])
        for phase, limit, rank in itertools.product(range(3), repeat=3)
        if every or (phase + limit + rank) % 3 == 0
    ]


def train(task, rank, world_size):
    """Microbatch size, final training loss, and a checksum of where the
    weights have come to.
    """
    changes = {
        "global_batch_size": BATCH,
        "max_steps": 7,
        "evaluate.every_steps": 7,
        "log_every_steps": 7,
    }
    result = train_on(task, ranked(rank, world_size), **changes)
    return (
        result.microbatch_size,
        result.metrics["train_loss"],
        result.metrics["val_loss"],
    )


def train_all(rank, world_size, every):
    plain = train(Limited("none", 0, None), rank, world_size)
    return [
        plain,
        *(
            train(Limited(*case), rank, world_size)
            for case in cases(world_size, every)
        ),
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.campaign)]
)
def test_no_hang_the_largest_size_and_the_same_result(every):
    world_size = 3
    plain, *found = run_processes(world_size, train_all, every)[0]
    share = -(-BATCH // world_size)
    assert plain[0] == share
    assert len(found) == (27 if every else 9)
    for (phase, limit, rank), (size, train_loss, val_loss) in zip(
        cases(world_size, every), found, strict=True
    ):
        assert size == largest_part(share, limit), (phase, limit, rank)
        assert train_loss == pytest.approx(plain[1], rel=1e-12), (
            phase,
            limit,
            rank,
        )
        assert val_loss == pytest.approx(plain[2], rel=1e-11), (
            phase,
            limit,
            rank,
        )


class Later(Blobs):
    """Runs out of memory in a later step than the first, in one phase on one
    rank, until the microbatch is small.
    """

    def __init__(self, phase, step, rank, limit):
        super().__init__(samples=170, dtype="float64")
        self.phase = phase
        self.at = step
        self.only = rank
        self.limit = limit

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if (
            not model.training
            or rank != self.only
            or self.forwards < self.at
            or len(batch[0]) <= self.limit
        ):
            return outputs
        if self.phase == "backward":
            return _Fails.apply(outputs)
        raise torch.OutOfMemoryError("injected: in mid-training")


def mid_training(tmp_path, name, workers, **task_args):
    changes = {
        "name": name,
        "max_steps": 20,
        "global_batch_size": BATCH,
        "checkpoint__every_steps": 4,
    }
    if task_args:
        changes |= {
            "task": "tests.distributed.test_memory:Later",
            "task_args": task_args,
        }
    else:
        changes |= {"task_args": {"samples": 170, "dtype": "float64"}}
    launcher = "spawn" if workers > 1 else "local"
    return make(
        tmp_path, scaling__num_workers=workers, launcher=launcher, **changes
    )


@pytest.mark.parametrize(
    ("workers", "phase"), [(1, "forward"), (3, "backward")]
)
def test_in_mid_training_the_next_smaller_microbatch_goes_on(
    workers, phase, tmp_path
):
    spec = mid_training(
        tmp_path,
        "hurt",
        workers,
        phase=phase,
        step=9,
        rank=workers - 1,
        limit=9,
    )
    result = (run_spawn if workers > 1 else run_local)(spec)
    share = -(-BATCH // workers)
    expected = share
    while expected > 9:
        expected = -(-expected // 2)
    assert (result.status, result.microbatch_size) == ("done", expected)
    plain = mid_training(tmp_path, "plain", 1)
    run_local(plain)
    assert losses(spec) == pytest.approx(losses(plain), rel=1e-12)
    assert len(losses(spec)) == 20


def train_real(rank, world_size):
    """Under a hard limit of the address space, then without one."""
    threading.stack_size(2**18)
    # Each thread's own part of the heap would take 64 MiB of the limit.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    changes = {
        "global_batch_size": 4096,
        "max_steps": 2,
        "evaluate.every_steps": 2,
        "log_every_steps": 2,
        "evaluate.microbatch_size": 64,
        "data.resident": False,
    }
    torch.ones(2, 2) @ torch.ones(2, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 160 * 2**20
    found = []
    for limit in (most, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        result = train_on(Wide(), ranked(rank, world_size), **changes)
        found += [result.status, result.microbatch_size]
        found += [result.metrics["val_loss"]]
    return found


class Wide(Blobs):
    """A hidden layer of 4,096: a microbatch of n samples holds some 100 KiB n
    of activations.
    """

    def __init__(self):
        super().__init__(samples=4096, dtype="float64")

    def model(self):
        return nn.Sequential(
            nn.Linear(12, 4096), nn.Tanh(), nn.Linear(4096, 4)
        ).double()


@pytest.mark.full
def test_real_memory_ends_the_same_way():
    """Under a hard limit of its address space the process takes a smaller
    microbatch, and learns the same.
    """
    [found] = run_processes(1, train_real)
    status, size, loss, free_status, free_size, free_loss = found
    assert (status, free_status, free_size) == ("done", "done", 4096)
    assert 64 <= size < 4096
    assert math.isclose(loss, free_loss, rel_tol=1e-9)
