"""A sweep in lanes, as a user starts it: each precision, with and without the
memory that it needs.
"""

import os
import subprocess
import sys

import pytest
import yaml

from tests.conftest import REPOSITORY, SCRATCH
from tests.gpu.runs import BASE
from tests.specs import read_json

TOO_LARGE = 1 << 50
"""Bytes that no device has."""


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.real_gpu("nvml")  # by which a zygote counts GPUs
def test_a_sweep_in_lanes(tmp_path):
    pytest.importorskip(
        "ray", reason="Ray is not installed: lanes were not seen"
    )
    precisions = ["fp32", "bf16", "fp16"]
    fits = {"bytes_per_sample": 4}
    tree = {
        "name": "sweep",
        "storage_path": str(tmp_path),
        "train": {
            **BASE,
            "task": "tests.gpu.runs:Hungry",
            "task_args": fits,
            "device": "cuda",
        },
        "space": {
            "precision": precisions,
            "task_args": [fits, {"bytes_per_sample": TOO_LARGE}],
        },
        "objective": {"metric": "val_loss"},
        "lanes": 1,
    }
    del tree["train"]["launcher"], tree["train"]["checkpoint"]
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(tree))
    settings = {
        key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"
    } | {"TMPDIR": str(SCRATCH)}
    done = subprocess.run(
        [sys.executable, "-m", "tune", str(file)],
        cwd=REPOSITORY,
        env=settings,
        capture_output=True,
        text=True,
    )
    trials = [
        read_json(path)
        for path in (tmp_path / "sweep" / "trials").glob("*.json")
    ]
    assert len(trials) == 2 * len(precisions), done.stderr[-2000:]
    for trial in trials:
        large = trial["config"]["task_args"]["bytes_per_sample"] == TOO_LARGE
        expected = (
            ("out_of_memory", "out_of_host_memory") if large else ("done",)
        )
        assert trial["status"] in expected, (trial["config"], trial["message"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "sweep" / "best.yaml").exists()
