"""Recipes on several ranks: the curve of one rank and one microbatch, and a
resume that is bit-equal.
"""

import pytest

from tests.distributed.curves import losses
from tests.distributed.processes import run_processes
from tests.distributed.test_phases import Chosen, Weighed
from tests.unit.test_loop import assert_same_training
from tests.unit.test_phases import Adversarial, SingleAdversarial, Wasserstein
from tests.unit.test_recipes import Distilled, Single
from trainers.task import Task


class SingleWasserstein(Single, Wasserstein):
    """In float32."""


class SingleDistilled(Single, Distilled):
    """In float32."""


DOUBLE = [Adversarial(), Wasserstein(), Weighed(), Chosen(), Distilled()]
SINGLE = [SingleAdversarial(), SingleWasserstein(), SingleDistilled()]
OTHERS = [
    pytest.param(task, marks=pytest.mark.campaign) for task in SINGLE[1:]
]


def named(task):
    return type(task).__name__ if isinstance(task, Task) else ""


def curves(rank, world_size, task, sizes):
    """With each size of a microbatch."""
    return [
        losses(rank, world_size, task, {"microbatch_size": size})
        for size in sizes
    ]


@pytest.mark.parametrize(
    "world_size", [4, pytest.param(2, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize(
    ("task", "tolerance"),
    [
        (DOUBLE[0], 1e-12),
        *(
            pytest.param(task, 1e-12, marks=pytest.mark.full)
            for task in DOUBLE[1:]
        ),
        *(
            pytest.param(task, 1e-6, marks=pytest.mark.campaign)
            for task in SINGLE
        ),
    ],
    ids=named,
)
def test_the_curve_is_that_of_one_rank_and_one_microbatch(
    task, tolerance, world_size
):
    """Steps of six and, the last of an epoch, of three samples: one of four
    ranks then has none.
    """
    [[alone, *split]] = run_processes(1, curves, task, [6, 4, 1])
    assert len(alone) == 12
    # A critic's loss is a difference of terms near 1, which is near 0 in one
    # of these steps.
    slack = tolerance if isinstance(task, Wasserstein) else 0.0
    for found in [
        *split,
        *(
            one
            for rank in run_processes(world_size, curves, task, [6, 1])
            for one in rank
        ),
    ]:
        assert found == pytest.approx(alone, rel=tolerance, abs=slack)


def resumed(rank, world_size, task, path):
    """A run of one start, and one of three: the second begins in the first
    epoch and the third in the second.
    """
    changes = {"microbatch_size": 2, "checkpoint": {"every_steps": 1}}
    losses(rank, world_size, task, changes, path / "whole")
    for stop_after in (3, 6, None):
        losses(rank, world_size, task, changes, path / "cut", stop_after)


@pytest.mark.full
@pytest.mark.parametrize("task", [SINGLE[0], *OTHERS], ids=named)
def test_a_resume_on_two_ranks_is_bit_equal(task, tmp_path):
    run_processes(2, resumed, task, tmp_path)
    assert_same_training(tmp_path / "cut", tmp_path / "whole")
