"""Which samples belong to which step: every sample once, the same set for any
number of workers.
"""

import random

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from tests.unit.test_batch_schedule import drawn
from trainers.data.sampler import StepSampler, split_share

_RANDOM = random.Random(20261101)
TRIPLES = [
    *(
        (
            _RANDOM.randint(1, 300),
            _RANDOM.randint(1, 80),
            _RANDOM.randint(1, 9),
        )
        for _ in range(12)
    ),
    (1, 1, 1),
    (1, 64, 8),
    (64, 64, 4),
    (65, 64, 4),
    (128, 64, 3),
    (7, 3, 7),
    (100, 1, 4),
    *(
        (length, sizes, workers)
        for sizes, length, _ in map(drawn, (0, 2, 14, 26, 40))
        for workers in (1, 2, 3, 5)
    ),
]


def make(n, batch, workers=1, rank=0, **options):
    dataset = TensorDataset(torch.arange(n))
    return StepSampler(
        dataset,
        global_batch_size=batch,
        num_replicas=workers,
        rank=rank,
        **options,
    )


@pytest.mark.parametrize(("n", "batch", "workers"), TRIPLES)
def test_each_sample_of_an_epoch_is_used_once_by_any_number_of_workers(
    n, batch, workers
):
    alone = make(n, batch, seed=3)
    ranks = [make(n, batch, workers, rank, seed=3) for rank in range(workers)]
    for epoch in range(14 if isinstance(batch, list) else 2):
        used = []
        for sampler in (alone, *ranks):
            sampler.set_epoch(epoch)
        assert {sampler.steps_per_epoch for sampler in ranks} == {
            alone.steps_per_epoch
        }
        for step in range(alone.steps_per_epoch):
            shares = [sampler.share(step) for sampler in ranks]
            # In rank order the shares are the step itself: not only the same
            # set, the same order.
            assert torch.cat(shares).tolist() == alone.share(step).tolist()
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert len(alone.share(step)) == alone.step_size(step)
            assert all(len(sampler.anchor(step)) == 1 for sampler in ranks)
            used += alone.share(step).tolist()
        assert sorted(used) == list(range(n))


def test_the_order_follows_seed_and_epoch():
    def order(seed, epoch):
        sampler = make(50, 8, seed=seed)
        sampler.set_epoch(epoch)
        return sampler.rows(0, 50).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(0, epoch)) for epoch in range(5)}) == 5
    assert order(0, 0) != order(7, 0)
    assert sorted(order(0, 1)) == list(range(50))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("n", "workers"), [(10, 1), (10, 3), (3, 4), (64, 4), (7, 7)]
)
def test_iterating_it_is_torchs_distributed_sampler(
    n, workers, drop_last, shuffle
):
    dataset = TensorDataset(torch.arange(n))
    for rank in range(workers):
        ours = make(
            n, 4, workers, rank, seed=5, drop_last=drop_last, shuffle=shuffle
        )
        torchs = DistributedSampler(
            dataset, workers, rank, shuffle, 5, drop_last
        )
        assert isinstance(ours, DistributedSampler)
        for epoch in range(3):
            ours.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs)


@pytest.mark.parametrize(
    ("size", "limit"),
    [(1, 1), (8, 8), (8, 3), (9, 8), (64, 7), (5, 100), (100, 1)],
)
def test_a_share_is_split_evenly(size, limit):
    share = torch.randperm(size)
    parts = split_share(share, limit)
    sizes = [len(part) for part in parts]
    assert torch.equal(torch.cat(parts), share)
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-size // limit)  # as few as fit
