"""`ema`: the averages are torch's own, they are evaluated and kept, and
training and resume go on as without.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.test_loop import (
    PER_EPOCH,
    Context,
    Tiny,
    check_resume,
    config,
    curve,
    train,
)
from trainers.devices.device import seed_all
from trainers.errors import CheckpointError
from trainers.loop.fit import fit
from trainers.model.moving_average import MovingAverage

STEPS = 3 * PER_EPOCH
ALL = {"every_steps": 1, "keep": 99}


def states(path):
    """The state of every checkpoint, oldest first."""
    folders = sorted((path / "checkpoints").iterdir())
    return [
        torch.load(folder / "state.pt", weights_only=True)
        for folder in folders
    ]


def floating(state):
    return {
        name: one for name, one in state.items() if one.is_floating_point()
    }


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain")
    train(path, checkpoint=ALL)
    return path


def first_model():
    seed_all(config().seed)
    return Tiny().model()


def test_it_is_torchs_average_of_what_is_trained_without_it(plain, tmp_path):
    train(tmp_path, checkpoint=ALL, ema={"decay": 0.9})
    assert curve(tmp_path) == curve(plain)
    model = first_model()
    reference = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    reference.update_parameters(model)  # the first is a copy
    ours = states(tmp_path)
    theirs = states(plain)
    assert len(ours) == len(theirs) == STEPS
    for with_it, without in zip(ours, theirs, strict=True):
        model.load_state_dict(without["model"])
        reference.update_parameters(model)
        assert equal(
            floating(with_it["model"]), floating(reference.module.state_dict())
        )
        assert (
            with_it["model"]["1.num_batches_tracked"]
            == without["model"]["1.num_batches_tracked"]
        )
        assert equal(with_it["ema"]["own"], floating(without["model"]))
        assert with_it["ema"]["averages"] == {}
        assert "ema" not in without


@pytest.mark.parametrize(
    ("precision", "background"),
    [("fp32", False), ("bf16-pure", True), ("fp16", False)],
)
def test_a_resume_is_bit_equal(precision, background, tmp_path):
    changes = {
        "precision": precision,
        "ema": {"decay": 0.9},
        "checkpoint": {**ALL, "async": background},
    }
    check_resume(tmp_path, Tiny, 7, **changes)
    for ours, theirs in zip(
        states(tmp_path / "cut"), states(tmp_path / "whole"), strict=True
    ):
        assert all(
            equal(ours["ema"][part], theirs["ema"][part])
            for part in ("own", "averages")
        )
        narrow = [
            name
            for name, one in ours["ema"]["own"].items()
            if one.dtype == torch.bfloat16
        ]
        assert sorted(ours["ema"]["averages"]) == sorted(narrow)
        assert (precision == "bf16-pure") is bool(narrow)
        assert all(
            one.dtype == torch.float32
            for one in ours["ema"]["averages"].values()
        )


def load(path, **changes):
    fit(
        Tiny(),
        config(max_steps=STEPS + 1, checkpoint={"every_steps": 99}, **changes),
        Context(path),
    )


def test_a_run_with_it_and_one_without_do_not_go_on_with_each_other(
    plain, tmp_path
):
    train(tmp_path, ema={"decay": 0.9})
    assert "ema" not in config().tree(), "as in what older versions have saved"
    for path, changes, was in (
        (plain, {"ema": {"decay": 0.9}}, "ema null"),
        (tmp_path, {}, "ema .*0[.]9"),
    ):
        with pytest.raises(
            CheckpointError, match=f"it was trained with {was}"
        ):
            load(path, **changes)
    with pytest.raises(CheckpointError, match=r"this run has .*0\.99"):
        load(tmp_path, ema={"decay": 0.99})


def test_a_buffer_that_a_forward_pass_assigns_is_averaged_and_comes_back():
    def make(mean):
        norm = nn.BatchNorm1d(1)
        ema = MovingAverage(norm, SGD(norm.parameters()), 0.5)
        norm.running_mean = torch.tensor(mean)
        return norm, ema

    norm, ema = make([1.0])
    ema.update()
    with ema.in_place():
        weights, state = copy.deepcopy((norm.state_dict(), ema.state_dict()))
    assert (weights["running_mean"], norm.running_mean) == (0.5, 1)
    again, other = make([7.0])
    again.load_state_dict(weights)
    other.check(state)
    other.load_state_dict(state)
    assert again.running_mean == 1
    again.running_mean = torch.tensor([3.0, 4.0])
    other.update()
    with other.in_place():
        assert again.running_mean.tolist() == [3, 4], "it begins anew"
        ema.check(other.state_dict())


def test_infinite_values_of_a_mask_stay_what_they_are():
    model = nn.Linear(1, 1)
    mask = torch.full((2, 2), -torch.inf).triu(1)
    model.register_buffer("mask", mask.clone())
    ema = MovingAverage(model, SGD(model.parameters()), 0.5)
    ema.update()
    with ema.in_place():
        assert torch.equal(model.mask, mask)
