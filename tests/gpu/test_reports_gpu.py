"""What a run keeps of its GPU: profiled steps, what lay in memory when it ran
out, the driver's readings.
"""

import gzip
import json
from typing import Any

import pytest
import torch

from tests.gpu.runs import CUDA, Hungry, Images, train
from trainers.causes import classify
from trainers.devices.device import GpuReadings

pytestmark = pytest.mark.gpu

STEPS = 3


@pytest.fixture
def profile(tmp_path):
    """The folder that a profiled run leaves."""
    train(CUDA, tmp_path, Images(), profile_steps=STEPS)
    return tmp_path / "profile"


def events(profile):
    with gzip.open(
        profile / "trace.json.gz", "rt", errors="replace"
    ) as stream:
        found: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return found


def test_profiled_steps_show_the_memory_of_the_gpu(profile):
    names = {str(event.get("name")) for event in events(profile)}
    assert (
        len([name for name in names if name.startswith("ProfilerStep")])
        == STEPS
    )
    weights = sum(
        parameter.nbytes for parameter in Images().model().parameters()
    )
    allocated = [
        event["args"]["Total Allocated"]
        for event in events(profile)
        if event.get("name") == "[memory]"
        and event["args"]["Device Type"] == 1
    ]
    assert min(allocated) > weights


@pytest.mark.real_gpu("profiler")
def test_profiled_steps_show_kernels(profile):
    kernels = [
        event for event in events(profile) if event.get("cat") == "kernel"
    ]
    assert len(kernels) > STEPS
    assert all(event["dur"] >= 0 for event in kernels)


def test_a_run_out_of_memory_leaves_what_lay_in_it(tmp_path):
    too_large = torch.cuda.get_device_properties(CUDA).total_memory
    with pytest.raises(RuntimeError) as raised:
        train(CUDA, tmp_path, Hungry(bytes_per_sample=too_large))
    assert classify(raised.value) == "out_of_memory"
    assert (
        "Allocated memory"
        in (tmp_path / "memory" / "rank-0-summary.txt").read_text()
    )


@pytest.mark.real_gpu("nvml")
def test_the_driver_tells_of_the_gpu():
    readings = GpuReadings(CUDA)
    taken = readings.take()
    assert taken is not None
    assert 0 < taken["memory_used_bytes"] <= taken["memory_total_bytes"]
