"""Several objectives on a cluster: a trial that is certain to be beaten ends there, and the front has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.test_lanes import run, sweep
from trainers.errors import ConfigError
from tune.report.answer import answer
from tune.sweeps.spec import is_complete

pytestmark = pytest.mark.ray

METRICS = ["time_to_target", "peak_memory_bytes"]
TARGET = {"val_loss": 1.0}
ENDLESS = 10**8
"""Steps: only its stop ends a trial of so many."""


@pytest.mark.parametrize("metrics", [METRICS, pytest.param(METRICS[:1], marks=pytest.mark.campaign)])
def test_a_trial_ends_once_it_is_certain_to_be_beaten(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch, metrics: list[str]
) -> None:
    monkeypatch.setattr("tune.search.front._WORTH_S", 0.0)
    spec = sweep(
        tmp_path,
        {"optimizer.lr": [0.05, 1e-9]},  # the second one never gets there
        {"max_steps": ENDLESS, "evaluate": {"every_steps": 100}},
        objective={**({"metrics": metrics} if metrics[1:] else {"metric": metrics[0]}), "target": TARGET},
    )
    fast, hopeless = sorted(run(spec), key=lambda record: -record.config["optimizer.lr"])
    assert fast.status == "done"
    assert hopeless.status == "stopped"
    assert hopeless.message == f"certain to be beaten in {' and '.join(metrics)} by trial {fast.id}"
    assert hopeless.peak_memory_bytes or not metrics[1:]
    found = answer(spec.config, [fast, hopeless])
    assert [one.id for one in found.ranking[:1]] == [fast.id]
    assert [member.record.id for member in found.front] == [fast.id] * len(metrics[1:])
    assert is_complete(spec)


def test_energy_that_nothing_counts_is_refused_before_any_lane_starts(tmp_path: Path, driver: Any) -> None:
    if Path("/sys/class/powercap/intel-rapl:0").exists():
        pytest.skip("this machine counts its energy")
    goal = {"metrics": ["time_to_target", "energy_j"], "target": TARGET}
    with pytest.raises(ConfigError, match="cannot be measured") as error:
        run(sweep(tmp_path, {"global_batch_size": [8, 16]}, objective=goal))
    assert error.value.field == "objective.metrics"
