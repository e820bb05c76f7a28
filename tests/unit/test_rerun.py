"""benchmarks/rerun.py over a small table: sweeps that run again do not contradict each other, and claims are true."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.answer import Table, read
from benchmarks.rerun import SEARCHES, by_others, replay

NEEDED = {16: 4000, 32: 4100, 64: 5200, 128: 9000}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Four batch sizes and two optimizers; one of these never meets the target."""
    runs = [
        {
            "global_batch_size": size,
            "seed": seed,
            "config": {"optimizer.name": name},
            "samples_per_s": 1000.0 * (1 + size / 64),
            "curve": [[at, at / needed * 0.5 if name == "adamw" else 0.1] for at in range(200, 20_000, 200)],
        }
        for size, samples in NEEDED.items()
        for name in ("adamw", "sgd")
        for seed, needed in enumerate((samples, 1.1 * samples, 1.2 * samples))
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"target": {"val_accuracy": 0.5}, "runs": runs}))
    return read(path)


@pytest.mark.parametrize("search", SEARCHES)
def test_sweeps_over_a_table(table: Table, search: str) -> None:
    assert len(table.places) == 8
    found = replay(table, search, 8)
    assert found["spread"] == pytest.approx(0.09, abs=0.05)
    assert found["same_or_equal"] == 1
    assert found["bound_holds"] == 1
    assert found["regret_worst"] < 1.3
    assert 0 < found["samples_of_grid"] < 2


def test_a_target_may_be_one_to_fall_below(tmp_path: Path) -> None:
    runs = [{"global_batch_size": 8, "samples_per_s": 1.0, "curve": [[8, 1.0], [16, 0.5], [24, 0.2]]}]
    path = tmp_path / "loss.json"
    path.write_text(json.dumps({"target": {"val_loss": 0.6}, "runs": runs}))
    found = read(path)
    [place] = found.places
    interval = found.to_target(found.runs[place][0])
    assert interval is not None
    assert (interval.low, interval.high) == (8.0, 16.0)


def test_a_pick_is_judged_by_what_all_other_sweeps_measured() -> None:
    first = {"pick": "a", "repeats": {"a": [1.0] * 8, "b": [9.0] * 8}}
    second = {"pick": "b", "repeats": {"a": [2.0] * 8, "b": [3.0] * 8}}
    third = {"pick": "c", "repeats": {"a": [2.0] * 8, "c": [0.1] * 7}}
    found = by_others([{"said": [first, second]}, {"said": [third]}])
    assert found == [[1.0, 9.0 / 1.5], [math.inf]]
