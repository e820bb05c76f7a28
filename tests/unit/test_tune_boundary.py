"""What is known of which microbatches fit: found in few steps, never tried
twice, kept, and strict when in doubt.
"""

import pytest

from tests.specs import dotted
from trainers.config import TrainConfig
from trainers.config.model import override
from tune.trials.microbatch_bounds import Boundary, fixed_size, key_of

GPU = "NVIDIA A10G, 22.5 GiB"
TRAIN = {
    "task": "t:T",
    "epochs": 1,
    "global_batch_size": 256,
    "optimizer": {"name": "adamw", "lr": 0.1},
}


def key(**changes):
    return key_of(override(TrainConfig, TRAIN, dotted(changes)), GPU)


def boundary(fits=[], misfits=[]):  # noqa: B006 (only read)
    found = Boundary()
    for size in fits:
        found.observe("k", size, True)
    for size in misfits:
        found.observe("k", size, False)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"strategy": "fsdp"},
        {"scaling__num_workers": 2},
        {"optimizer__name": "sgd"},
        {"compile": "default"},
        {"ema": {"decay": 0.9}},
        {"cuda_graphs": True},
        {"task_args": {"image_size": 224}},
        {"task": "t:Other"},
        {"deterministic": True},
        {"activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_what_touches_memory_has_a_key_of_its_own(changes):
    assert key(**changes) != key()


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__lr": 0.5},
        {"optimizer__weight_decay": 0.5},
        {"seed": 3},
        {"epochs": 9},
        {"global_batch_size": 64},
        {"microbatch_size": 8},
        {"lr_schedule__name": "cosine"},
        {"ddp__sync_batchnorm": True},
    ],
    ids=str,
)
def test_what_does_not_touch_memory_shares_the_key(changes):
    assert key(**changes) == key()


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, None),
        ({"microbatch_size": 48}, 48),
        ({"microbatch_size": 1000}, 256),
        ({"microbatch_size": 1000, "scaling": {"num_workers": 3}}, 86),
        ({"microbatch_size": 1000, "scaling": {"num_workers": [2, 4]}}, 128),
    ],
)
def test_the_size_that_a_trial_insists_on(changes, size):
    assert fixed_size(TRAIN | changes) == size


def test_smaller_sizes_are_inferred_to_fit_and_larger_ones_not_to():
    found = boundary(fits=[5, 20], misfits=[50, 33])
    assert [
        found.fits("k", size) for size in (1, 19, 20, 21, 32, 33, 40, 99)
    ] == [
        *(True, True, True),
        *(None, None),
        *(False, False, False),
    ]
    assert (found.largest_fit("k"), found.smallest_misfit("k")) == (20, 33)
    assert found.fits("another", 1) is None
    assert (
        found.largest_fit("another"),
        found.smallest_misfit("another"),
    ) == (
        None,
        None,
    )


def test_the_stricter_wins_in_either_order():
    found = boundary(fits=[16, 40])
    found.observe("k", 32, False)
    assert (found.largest_fit("k"), found.smallest_misfit("k")) == (
        16,
        32,
    )  # what fitted below still counts
    other = boundary(fits=[16], misfits=[32])
    other.observe("k", 40, True)
    assert other.to_plain() == found.to_plain()
    found.observe("k", 24, True)
    assert found.largest_fit("k") == 24
