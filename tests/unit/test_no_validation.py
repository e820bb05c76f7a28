"""A task without a validation split: it trains as with one, nothing is
evaluated, and what needs that is refused.
"""

import logging

import pytest
import torch

import tests.unit.test_predict as predicted
from tests.unit.test_loop import (
    Context,
    Tiny,
    config,
    curve,
    evaluations,
    train,
    weights,
)
from trainers.errors import ConfigError
from trainers.loop.fit import fit


class Unseen(Tiny):
    def dataset(self, split):
        return super().dataset(split) if split == "train" else None


def test_it_trains_as_with_one(tmp_path, caplog):
    train(tmp_path / "with")
    with caplog.at_level(logging.INFO):
        result = train(tmp_path / "without", Unseen())
    assert "no validation split: nothing is evaluated" in caplog.text
    assert "evaluated at" not in caplog.text
    assert curve(tmp_path / "without") == curve(tmp_path / "with")
    assert evaluations(tmp_path / "without") == []
    assert (result.status, set(result.metrics)) == ("done", {"train_loss"})
    before = weights(tmp_path / "with")
    after = weights(tmp_path / "without")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_best_checkpoint_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r'`checkpoint\.best: "val_loss"`.*dataset\("val"\) returned None; return a few',
    ):
        train(tmp_path, Unseen(), checkpoint={"best": "val_loss"})
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("watched", "refused"), [("val_accuracy", True), ("train_loss", False)]
)
def test_an_objective_that_needs_an_evaluation_is_refused(watched, refused):
    context = Context(None)
    context.watches = ("samples_per_s", watched)
    if refused:
        with pytest.raises(ConfigError, match='`objective: "val_accuracy"`'):
            fit(Unseen(), config(), context)
    else:
        assert fit(Unseen(), config(), context).status == "done"


def test_a_split_that_is_none_can_neither_be_evaluated_nor_predicted(
    tmp_path, monkeypatch
):
    predicted.train(tmp_path)
    found = predicted.Kept.dataset
    monkeypatch.setattr(
        predicted.Kept,
        "dataset",
        lambda self, split: None if split == "val" else found(self, split),
    )
    for out in (None, tmp_path / "out.parquet"):
        with pytest.raises(
            ConfigError,
            match=r'`dataset."val".: "NoneType"` has no sample',
        ):
            predicted.work(tmp_path / "runs/run", out=out)
    assert predicted.work(tmp_path / "runs/run", split="train").samples == 203
