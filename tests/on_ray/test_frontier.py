"""search: frontier on a cluster: probes stay short, trials end at the target, finalists are repeated alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.test_lanes import run, sweep
from tune.knowledge.store import Store
from tune.report.answer import answer
from tune.search.finalists import contenders
from tune.sweeps.spec import is_complete
from tune.trials.journal import Journal

pytestmark = pytest.mark.ray

EPOCHS = 60


@pytest.mark.full
def test_from_the_first_probe_to_the_last_repeat_and_none_of_it_twice(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is, every trial is worth its end here: test_front.py has those that are not.
    monkeypatch.setattr("tune.search.front._WORTH_S", math.inf)
    spec = sweep(
        tmp_path,
        {"global_batch_size": {"min": 4, "max": 32}, "precision": ["fp32", "bf16"]},
        search="frontier",
        objective={"metric": "time_to_target", "target": {"val_loss": 0.26}},
        finalists={"count": 2, "repeats": 2},
        knowledge=True,
        lanes=2,
    )
    train = {key: value for key, value in spec.train.items() if key not in ("max_steps", "evaluate")}
    train |= {
        "epochs": EPOCHS,
        "lr_scaling": {"rule": "sqrt", "base_batch_size": 24},
        "optimizer": {"name": "adamw", "lr": 0.002},
    }
    spec = dataclasses.replace(spec, train=train)
    records = run(spec)

    by_purpose = {purpose: [r for r in records if r.purpose == purpose] for purpose in ("probe", "trial", "repeat")}
    assert {record.config["precision"] for record in by_purpose["probe"]} == {"fp32", "bf16"}
    for record in by_purpose["probe"]:
        assert record.status == "stopped"
        assert (record.epochs or EPOCHS) < 0.25 * EPOCHS
        assert record.samples_per_s
    assert by_purpose["trial"]
    for record in [*by_purpose["trial"], *by_purpose["repeat"]]:
        reached = [index for index, row in enumerate(record.curve) if row["val_loss"] <= 0.26]
        assert reached
        assert reached[0] >= len(record.curve) - 2  # it ended there, or at the agreement of the next evaluation
        assert (record.epochs or EPOCHS) < EPOCHS
    assert any(record.noise_scale for record in by_purpose["trial"])

    finalists = contenders(spec.config, records)
    repeats = sorted(by_purpose["repeat"], key=lambda record: record.start_time)
    assert [(r.config, r.seed) for r in repeats] == [(f.config, seed) for seed in (1, 2) for f in finalists]
    others = [record for record in records if record.purpose != "repeat"]
    ends = [max(record.end_time for record in others), *(record.end_time for record in repeats)]
    assert all(record.start_time >= end for record, end in zip(repeats, ends, strict=False))  # alone, one by one
    if finalists:
        assert "repeats alone" in answer(spec.config, records, spec.train).verdict

    assert is_complete(spec)
    [entry] = Store(spec.storage.parent).entries()
    assert len(entry.trials) == len(records)
    assert {record.id for record in run(spec)} == {record.id for record in records}
    assert Journal(spec.storage).records() == sorted(records, key=lambda record: (record.start_time, record.id))
