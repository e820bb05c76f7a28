"""torch's own test of its DistributedSampler, as the wheel ships it, on ours;
a task's sampler on several ranks.
"""

import functools
import inspect
import os
import unittest
import warnings

import pytest
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from tests.distributed.processes import run_processes
from tests.distributed.test_collectives import run
from tests.tasks import Blobs
from trainers.data.sampler import StepSampler
from trainers.errors import ConfigError


def torchs_own_test(rank, world_size):
    """Runs it on the CPU; gives back which samplers it made."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": ".",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test

    made = []

    class Ours(StepSampler):
        __init__ = functools.partialmethod(
            StepSampler.__init__, global_batch_size=8
        )

        def __iter__(self):
            made.append(f"{len(self)} of {self.total_size}")
            return super().__iter__()

    distributed_test.DistributedSampler = Ours
    case = unittest.TestCase()
    case.rank = "cpu"  # it moves tensors to the device of this index
    # Without the decorators that ask for as many GPUs as ranks.
    inspect.unwrap(
        distributed_test.DistributedTest._DistTestBase.test_DistributedSampler_padding
    )(case)
    return made


@pytest.mark.parametrize(
    "world_size", [3, pytest.param(2, marks=pytest.mark.campaign)]
)
def test_torchs_own_test_passes(world_size):
    for made in run_processes(world_size, torchs_own_test):
        assert len(made) == 3


class Drawn(Blobs):
    """Draws its samples by weights, or, which is no order of all, a part of
    them on each rank.
    """

    def __init__(self, by_rank):
        super().__init__(samples=96, dtype="float64")
        self.by_rank = by_rank

    def sampler(self, dataset, config):
        if self.by_rank:
            return DistributedSampler(dataset)
        return WeightedRandomSampler(
            [1.0 + index % 7 for index in range(96)], 50
        )


def train(rank, world_size, by_rank):
    try:
        return run(Drawn(by_rank), rank, world_size, max_steps=11).metrics[
            "train_loss"
        ]
    except ConfigError as error:
        return str(error)


def test_a_sampler_of_the_tasks_gives_all_ranks_together_what_it_gives_one():
    [alone] = run_processes(1, train, False)
    assert (
        run_processes(3, train, False) == [pytest.approx(alone, rel=1e-12)] * 3
    )


def test_a_sampler_that_splits_by_rank_is_refused():
    for said in run_processes(2, train, True):
        assert "sampler" in said
        assert "gives each rank different samples" in said
