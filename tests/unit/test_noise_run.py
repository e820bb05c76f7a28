"""`noise_scale: true` in whole runs: the training stays what it is, and the result says what was measured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.processes import forked_launcher
from tests.specs import losses, make
from tests.tasks import Blobs
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.launch.local import LocalContext, run_local, run_spawn
from trainers.loop.fit import fit
from trainers.measure.run_log import read_log
from trainers.step.noise_scale import NoiseScale

torch.set_num_threads(1)
LONG: dict[str, Any] = {"max_steps": 300, "log_every_steps": 20, "evaluate__every_steps": 300, "seed": 3}


class Normed(Blobs):
    """Batch statistics: halves of a batch would have others."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.features, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_every_twentieth_step_of_one_worker_is_taken_as_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    known = NoiseScale.microbatch_size

    def note(noise: NoiseScale, step: int, usual: int) -> int:
        size = known(noise, step, usual)
        asked.append((usual, size))
        return size

    monkeypatch.setattr(NoiseScale, "microbatch_size", note)
    result = run_local(make(tmp_path, max_steps=45, noise_scale=True, global_batch_size=23))
    assert [step for step, (whole, size) in enumerate(asked) if size != whole] == [0, 20, 40]
    assert {asked[0], asked[20], asked[40]} == {(23, 12)}
    assert (result.microbatch_size, result.accumulation) == (23, 1)


def test_the_loss_curve_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    plain = make(tmp_path, name="plain", max_steps=60, task_args__dtype="float64")
    measured = make(tmp_path, name="measured", max_steps=60, task_args__dtype="float64", noise_scale=True)
    assert run_local(plain).noise_scale is None
    assert run_local(measured).noise_scale is not None
    assert losses(measured) == pytest.approx(losses(plain), rel=1e-9)


def test_the_result_and_the_log_say_what_was_measured(tmp_path: Path) -> None:
    spec = make(tmp_path, noise_scale=True, microbatch_size=6, **LONG)
    result = run_local(spec)
    assert result.accumulation == 4
    figures = result.noise_scale
    assert figures is not None
    assert figures["value"] is not None
    assert figures["low"] is not None
    assert figures["low"] <= figures["value"] <= (figures["high"] or float("inf"))
    assert 1 < figures["value"] < 2000
    assert spec.read_result(spec.storage.read("result.json")).noise_scale == figures
    assert any("noise_scale" in record for record in read_log(spec.storage))


@pytest.mark.full
def test_halves_and_microbatches_measure_the_same(tmp_path: Path) -> None:
    whole = run_local(make(tmp_path, name="whole", noise_scale=True, **{**LONG, "max_steps": 1200})).noise_scale
    parts = run_local(make(tmp_path, name="parts", noise_scale=True, microbatch_size=6, **LONG)).noise_scale
    assert whole is not None
    assert parts is not None
    assert whole["value"] == pytest.approx(parts["value"], rel=2.0)


@pytest.mark.full
def test_two_ranks_train_the_same_bits_and_agree(tmp_path: Path) -> None:
    ranks = {"launcher": "spawn", "scaling__num_workers": 2, "max_steps": 40}
    plain = make(tmp_path, name="plain", **ranks)
    measured = make(tmp_path, name="measured", noise_scale=True, **ranks)
    with forked_launcher():
        assert run_spawn(plain).noise_scale is None
        assert run_spawn(measured).noise_scale is not None
    assert losses(measured) == losses(plain)


def test_batch_statistics_are_never_halved(caplog: pytest.LogCaptureFixture) -> None:
    tree = {"task": "t:T", "max_steps": 30, "global_batch_size": 24, "optimizer": {"lr": 0.01}, "noise_scale": True}
    with caplog.at_level(logging.WARNING):
        result = fit(Normed(), build(TrainConfig, tree, "test"), LocalContext(None, "local"))
    assert result.noise_scale is None
    assert "no gradient noise scale" in caplog.text
    assert "BatchNorm" in caplog.text
