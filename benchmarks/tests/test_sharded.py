"""The benchmark of sharded checkpoints, small.

Both ways end with the same tensors, and every figure is there.
"""

from __future__ import annotations

import json

from benchmarks import sharded
from tests.distributed.processes import _fork


def test_every_figure_is_there(tmp_path):
    _fork(sharded.measure, (2, str(tmp_path), 8, 1), nprocs=2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (
        11 < found["share_mb"] < 13
    )  # two layers of 4 MB and their moments, on two ranks
    for action in ("write", "read"):
        assert set(found[action]["rows"]) == {"ours", "dcp", "dcp again"}
        assert all(row["median"] > 0 for row in found[action]["rows"].values())
    assert set(found["memory_mb"]) == {"ours", "dcp", "dcp again"}
