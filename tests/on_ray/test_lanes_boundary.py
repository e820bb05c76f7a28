"""What trials learn of memory, in lanes: shared, exact, kept; what is known not to fit never runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.test_lanes import run, sweep
from tune.trials.microbatch_bounds import Boundary

pytestmark = pytest.mark.ray

SIZES = [3, 6, 9, 12, 15, 18, 21, 24]
FITS = {"fp32": 10, "bf16": 20}


def limited(tmp_path: Path) -> dict[str, Any]:
    args = {"fp32_fits": 10, "bf16_fits": 20, "log": str(tmp_path / "oom")}
    return {"task": "tests.lane_tasks:Limited", "task_args": args}


def failures(tmp_path: Path) -> Counter[str]:
    file = tmp_path / "oom"
    return Counter(line.split()[0] for line in file.read_text().splitlines()) if file.exists() else Counter()


def known(tmp_path: Path) -> Boundary:
    return Boundary.from_plain(json.loads((tmp_path / "sweep" / "boundary.json").read_text()))


def test_a_grid_of_fixed_sizes(tmp_path: Path, driver: Any) -> None:
    """Bisected: at most one out-of-memory a precision and level, where the plain grid runs into one a size."""
    space = {"microbatch_size": SIZES, "precision": list(FITS)}
    records = run(sweep(tmp_path, space, {**limited(tmp_path), "max_steps": 2}))
    for record in records:
        size, precision = record.config["microbatch_size"], record.config["precision"]
        assert record.status == ("done" if size <= FITS[precision] else "out_of_memory"), record
    plain = Counter({name: sum(size > most for size in SIZES) for name, most in FITS.items()})
    assert plain == {"fp32": 5, "bf16": 2}
    met = failures(tmp_path)
    assert all(met[name] <= min(plain[name], math.ceil(math.log2(len(SIZES) + 1))) for name in FITS)
    never_ran = [record for record in records if "is not tried" in record.message]
    assert len(never_ran) == plain.total() - met.total() > 0
    assert all(record.lane is None and not record.curve for record in never_ran)
    assert "of 12 ran out of memory (fp32 on cpu" in next(
        record.message for record in never_ran if record.config == {"microbatch_size": 24, "precision": "fp32"}
    )


def test_auto_finds_the_boundary_once_and_a_resume_knows_it(tmp_path: Path, driver: Any) -> None:
    space = {"precision": list(FITS), "seed": [1, 2, 3]}
    train = {**limited(tmp_path), "max_steps": 2, "global_batch_size": 100}
    spec = sweep(tmp_path, space, train)
    records = run(spec)
    assert {record.status for record in records} == {"done"}
    met = failures(tmp_path)
    # 100, 50, 25, 13, 12 do not fit in fp32; 100, 50, 25 in bf16: the first trial of each learns it, the others know.
    assert met == {"fp32": 5, "bf16": 3}
    plain = known(tmp_path).to_plain()
    assert sorted((max(entry["fits"]), entry["misfit"]) for entry in plain.values()) == [(10, 12), (20, 25)]
    for record in records[1:]:
        spec.storage.delete(f"trials/{record.id}.json")
    assert {record.status for record in run(spec)} == {"done"}
    assert failures(tmp_path) == met, "a resumed sweep meets no out-of-memory again"
