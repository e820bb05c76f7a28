"""At a sweep's end: where the steps of its best trial spend their time, by a profile in the lane that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.test_lanes import sweep
from tune.report.explained import read_explained
from tune.sweeps import explained
from tune.sweeps.spec import prepare

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_the_best_trials_steps_are_profiled_and_the_lane_is_clean_after_it(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tune.sweeps.run import run_sweep

    monkeypatch.setattr(explained, "_LEAST_S", 0.0)
    train = {"task_args": {"pause_s": 0.1}, "scaling": {"num_workers": 2}}
    spec = sweep(tmp_path, {"optimizer.lr": [0.05, 1e-9]}, train, explain=True)
    prepare(spec, fresh=False)
    facts: dict[str, str] = {}
    good, bad = sorted(run_sweep(spec, facts=facts), key=lambda record: -record.config["optimizer.lr"])

    found = read_explained(spec.storage)
    assert found is not None
    assert (found.trial, good.status, bad.status) == (good.id, "done", "done")
    shares = found.explanation.shares
    assert sum(shares.values()) == pytest.approx(1.0)
    assert max(shares, key=lambda name: shares[name]) == "forward"
    assert found.explanation.advice[0].kind == "hidden synchronisation"
    assert "lane_restarts" not in facts

    explained.explain_best(spec, [good, bad], None, lambda: True, lambda: None)  # it is known: no lane is asked
