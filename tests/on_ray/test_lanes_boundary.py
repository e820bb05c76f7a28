"""What trials learn of memory, in lanes: shared, exact, kept; what is known
not to fit never runs.
"""

import math
from collections import Counter

import pytest

from tests.on_ray.test_lanes import run, sweep
from tests.specs import read_json
from tune.trials.microbatch_bounds import Boundary

pytestmark = pytest.mark.ray

SIZES = [3, 6, 9, 12, 15, 18, 21, 24]
FITS = {"fp32": 10, "bf16": 20}


def limited(tmp_path, **more):
    args = {
        "fp32_fits": 10,
        "bf16_fits": 20,
        "log": str(tmp_path / "oom"),
        **more,
    }
    return {"task": "tests.lane_tasks:Limited", "task_args": args}


def failures(tmp_path):
    file = tmp_path / "oom"
    return (
        Counter(line.split()[0] for line in file.read_text().splitlines())
        if file.exists()
        else Counter()
    )


def known(tmp_path):
    return Boundary.from_plain(read_json(tmp_path / "sweep" / "boundary.json"))


@pytest.mark.campaign
def test_a_grid_of_fixed_sizes(tmp_path, driver):
    """Bisected: at most one out-of-memory a precision and level, where the
    plain grid runs into one a size.
    """
    space = {"microbatch_size": SIZES, "precision": list(FITS)}
    records = run(
        sweep(tmp_path, space, {**limited(tmp_path), "max_steps": 2})
    )
    for record in records:
        size = record.config["microbatch_size"]
        precision = record.config["precision"]
        assert record.status == (
            "done" if size <= FITS[precision] else "out_of_memory"
        ), record
    plain = Counter(
        {
            name: sum(size > most for size in SIZES)
            for name, most in FITS.items()
        }
    )
    assert plain == {"fp32": 5, "bf16": 2}
    met = failures(tmp_path)
    assert all(
        met[name] <= min(plain[name], math.ceil(math.log2(len(SIZES) + 1)))
        for name in FITS
    )
    never_ran = [
        record for record in records if "is not tried" in record.message
    ]
    assert len(never_ran) == plain.total() - met.total() > 0
    assert all(
        record.lane is None and not record.curve for record in never_ran
    )
    assert "of 12 ran out of memory (fp32 on cpu" in next(
        record.message
        for record in never_ran
        if record.config == {"microbatch_size": 24, "precision": "fp32"}
    )


@pytest.mark.campaign  # test_steering has one
def test_auto_finds_the_boundary_once_and_a_resume_knows_it_and_runs_only_what_has_no_record(
    tmp_path, driver
):
    ran = tmp_path / "pids"
    spec = sweep(
        tmp_path,
        {"precision": list(FITS), "seed": [1, 2]},
        {
            **limited(tmp_path, pids=str(ran)),
            "max_steps": 2,
            "global_batch_size": 100,
        },
    )
    first = run(spec)
    assert {record.status for record in first} == {"done"}
    met = failures(tmp_path)
    # 100, 50, 25, 13, 12 do not fit in fp32; 100, 50, 25 in bf16: the first
    # trial of each learns it, the others know.
    assert met == {"fp32": 5, "bf16": 3}
    plain = known(tmp_path).to_plain()
    assert sorted(
        (max(entry["fits"]), entry["misfit"]) for entry in plain.values()
    ) == [(10, 12), (20, 25)]
    assert len(set(ran.read_text().split())) == 4, "a process each"
    for record in first[1:]:
        spec.storage.delete(f"trials/{record.id}.json")
    again = {record.id: record for record in run(spec)}
    assert failures(tmp_path) == met, (
        "a resumed sweep meets no out-of-memory again"
    )
    assert len(ran.read_text().split()) == 7
    assert again[first[0].id] == first[0]
