"""The batches of the steps of an epoch: which samples, in microbatches of which sizes, under which seeds."""

import itertools
from collections.abc import Iterator

from torch import Tensor

from trainers.data.batch import Batch
from trainers.loop.attempt import Attempt
from trainers.step.evaluation import batch_seed

_Plan = tuple[list[Tensor], list[int]]
"""A step's microbatches, and how many samples each of them counts."""


def step_batches(attempt: Attempt, first: int, last: int) -> tuple[Iterator[Batch], Iterator[list[int]]]:
    """Return the microbatches of these steps of the epoch, one after another, and for each step their sizes.

    The attempt must be at the first of them.
    """
    config = attempt.config
    plans, ahead = itertools.tee(_plans(attempt, first, last))  # the feed is ahead by what loaders prepare
    seeds = None
    if config.data.num_workers > 0:  # random state of loader processes is in no checkpoint
        ahead, again = itertools.tee(ahead)
        seeds = _loader_seeds(again, config.seed, attempt.context.rank, attempt.step)
    flat = (indices for microbatches, _ in ahead for indices in microbatches)
    batches = attempt.clock.timed(attempt.parts.train_feed.batches(flat, training=True, seeds=seeds))
    return batches, (sizes for _, sizes in plans)


def _plans(attempt: Attempt, first: int, last: int) -> Iterator[_Plan]:
    parts = attempt.parts
    for step in range(first, last):
        yield parts.sampler.plan(step, parts.microbatch_size, parts.even)


def _loader_seeds(plans: Iterator[_Plan], seed: int, rank: int, start: int) -> Iterator[int]:
    """Yield the seed of each microbatch of the steps from `start` on, for what a loader's process draws for it."""
    for step, (microbatches, _) in enumerate(plans, start):
        for piece in range(len(microbatches)):
            yield batch_seed(seed, rank, step, piece)
