"""What is known of which microbatches fit: found in few steps, never tried twice, kept, and strict when in doubt."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest

from trainers.config import TrainConfig
from trainers.config.overrides import override
from trainers.errors import CheckpointError
from tune.trials.microbatch_bounds import Boundary, bisection_order, fixed_size, key_of

GPU = "NVIDIA A10G, 22.5 GiB"
TRAIN: dict[str, Any] = {
    "task": "t:T",
    "epochs": 1,
    "global_batch_size": 256,
    "optimizer": {"name": "adamw", "lr": 0.1},
}
LIMITS = {"fp32": 37, "bf16": 74}
"""The largest microbatch that really fits."""
WANTED = 128
LEVELS = math.ceil(math.log2(WANTED + 1))


def key(**changes: Any) -> str:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return key_of(override(TrainConfig, TRAIN, dotted), GPU)


def boundary(fits: list[int] = [], misfits: list[int] = []) -> Boundary:  # noqa: B006 (only read)
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
        {"scaling__num_workers": [1, 2]},
        {"scaling__gpus_per_worker": 0.5},
        {"optimizer__name": "sgd"},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
        {"compile": "default"},
        {"ema": {"decay": 0.9}},
        {"cuda_graphs": True},
        {"task_args": {"image_size": 224}},
        {"task": "t:Other"},
        {"deterministic": True},
        {"evaluate__microbatch_size": 512},
        {"activation_checkpointing": "full"},
        {"optimizer__name": "adamw8bit"},
    ],
    ids=str,
)
def test_what_touches_memory_has_a_key_of_its_own(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_sharded_settings_have_keys_of_their_own() -> None:
    sharded = {"strategy": "fsdp", "precision": "bf16"}
    assert key(**sharded, fsdp={"param_dtype": "bf16"}) != key(**sharded)


def test_all_kinds_of_settings_have_different_keys() -> None:
    momentum = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    keys = [key(), key(optimizer__name="sgd"), key(optimizer=momentum), key(precision="fp16"), key(precision="bf16")]
    keys += [key(optimizer__name=name) for name in ("adamw8bit", "adamw4bit", "adamwfp8")]
    assert len(set(keys)) == len(keys)
    assert key_of(TRAIN, "NVIDIA A100, 79.2 GiB") != key()


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__lr": 0.5},
        {"optimizer__weight_decay": 0.5},
        {"seed": 3},
        {"epochs": 9},
        {"max_steps": 9},
        {"global_batch_size": 64},
        {"batch_size_per_worker": 64},
        {"microbatch_size": 8},
        {"name": "other"},
        {"lr_schedule__name": "cosine"},
        {"ddp__sync_batchnorm": True},
        {"precision": "fp32"},
    ],
    ids=str,
)
def test_what_does_not_touch_memory_shares_the_key(changes: dict[str, Any]) -> None:
    assert key(**changes) == key()


def test_a_key_does_not_depend_on_the_order_of_the_file() -> None:
    one = {"task_args": {"a": 1, "b": 2}}
    other = {"task_args": {"b": 2, "a": 1}}
    assert key_of(TRAIN | one, GPU) == key_of(dict(reversed((TRAIN | other).items())), GPU)


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
def test_the_size_that_a_trial_insists_on(changes: dict[str, Any], size: int | None) -> None:
    assert fixed_size(TRAIN | changes) == size


def test_smaller_sizes_are_inferred_to_fit_and_larger_ones_not_to() -> None:
    found = boundary(fits=[5, 20], misfits=[50, 33])
    assert [found.fits("k", size) for size in (1, 19, 20, 21, 32, 33, 40, 99)] == [
        *(True, True, True),
        *(None, None),
        *(False, False, False),
    ]
    assert (found.largest_fit("k"), found.smallest_misfit("k")) == (20, 33)
    assert found.fits("another", 1) is None
    assert (found.largest_fit("another"), found.smallest_misfit("another")) == (None, None)


def test_a_contradiction_is_said_and_the_stricter_wins_in_either_order() -> None:
    found = boundary(fits=[16, 40])
    said = found.observe("k", 32, False)
    assert said is not None
    assert "40 fitted" in said
    assert "32 ran out" in said
    assert (found.largest_fit("k"), found.smallest_misfit("k")) == (16, 32)  # what fitted below still counts
    other = boundary(fits=[16], misfits=[32])
    assert other.observe("k", 40, True) == said
    assert other.to_plain() == found.to_plain()
    assert found.observe("k", 24, True) is None


def test_the_order_of_observations_does_not_matter() -> None:
    seen = [(16, True), (40, True), (32, False), (24, True), (64, False), (31, True), (31, False)]
    plains = []
    for order in itertools.islice(itertools.permutations(seen), 0, None, 97):
        found = Boundary()
        for size, fits in order:
            found.observe("k", size, fits)
        plains.append(json.dumps(found.to_plain()))
    assert len(plains) > 40
    assert len(set(plains)) == 1


def test_a_boundary_comes_back_from_the_journal() -> None:
    found = boundary(fits=[3, 17], misfits=[40])
    found.observe("only misfit", 1, False)
    text = json.dumps(found.to_plain())
    assert Boundary.from_plain(json.loads(text)).to_plain() == json.loads(text)


@pytest.mark.parametrize("tree", [{"k": {}}, {"k": {"fits": [0], "misfit": None}}, {"k": {"fits": ["a"], "misfit": 1}}])
def test_what_is_no_boundary_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        Boundary.from_plain(tree)


def test_the_middle_comes_first() -> None:
    assert bisection_order([8, 16, 24, 32, 40, 48, 56]) == [32, 16, 48, 8, 24, 40, 56]
    assert sorted(bisection_order(range(1, 100))) == list(range(1, 100))
    assert bisection_order([]) == []
    assert bisection_order([5, 5]) == [5]


def sweep(order: list[tuple[str, int]], uses_boundary: bool) -> tuple[dict[str, int], int, Boundary]:
    """Trials with a fixed microbatch, one after the other: misfits of each precision, trials that ran, what is known.

    `order` has one entry a trial: its precision and its microbatch.
    """
    found, ran = Boundary(), 0
    misfits = dict.fromkeys(LIMITS, 0)
    for precision, size in order:
        trial = key(precision=precision)
        if uses_boundary and found.fits(trial, size) is False:
            continue
        fits = size <= LIMITS[precision]
        found.observe(trial, size, fits)
        misfits[precision] += not fits
        ran += 1
    return misfits, ran, found


def test_a_sweep_over_fixed_sizes_runs_out_of_memory_once_a_level_and_a_plain_grid_in_every_misfit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = range(1, WANTED + 1)
    middle_first = [(precision, size) for size in bisection_order(sizes) for precision in LIMITS]
    misfits, ran, found = sweep(middle_first, uses_boundary=True)
    grid_misfits, grid_ran, _ = sweep(middle_first, uses_boundary=False)
    for precision, limit in LIMITS.items():
        assert misfits[precision] <= LEVELS
        assert found.largest_fit(key(precision=precision)) == limit
        assert found.smallest_misfit(key(precision=precision)) == limit + 1
        assert grid_misfits[precision] == WANTED - limit
    assert ran == sum(LIMITS.values()) + sum(misfits.values())  # all that fit were trained
    assert grid_ran == 2 * WANTED
    with capsys.disabled():
        print(f"\nout of memory: {misfits} of {ran} trials; a plain grid {grid_misfits} of {grid_ran}")


def test_in_any_order_no_trial_that_is_known_not_to_fit_runs() -> None:
    order = [(precision, size) for size in range(1, WANTED + 1) for precision in LIMITS]
    for seed in range(20):
        random.Random(seed).shuffle(order)
        misfits, ran, found = sweep(order, uses_boundary=True)
        assert all(found.largest_fit(key(precision=name)) == limit for name, limit in LIMITS.items())
        assert ran == sum(LIMITS.values()) + sum(misfits.values())
        assert max(misfits.values()) < 20  # about ln(91): each misfit rules out all that are larger
