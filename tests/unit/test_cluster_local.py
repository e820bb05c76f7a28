"""`python -m cluster check --local`: what it makes of drivers and rates, and the
command as a user types it.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.health.local import Driver, ProductRate, judge_gpus, judge_rates
from cluster.health.probes import measure
from tests.waits import HANG_S

REPOSITORY = Path(__file__).parent.parent.parent
TWO = Driver("570.124.06", (12, 8), 2)


def rate(device, precision, n, gflop_per_s, spread=0.01):
    return ProductRate(
        device, precision, n, 2 * n**3 / gflop_per_s / 1e9, gflop_per_s, spread
    )


@pytest.mark.parametrize(
    ("driver", "num_seen", "built_for", "visible", "level", "words"),
    [
        (TWO, 0, None, None, "error", "is a CPU build; install one for CUDA 12"),
        (
            TWO,
            0,
            "13.2",
            None,
            "error",
            "built for CUDA 13.2 and the driver stops at 12.8",
        ),
        (
            TWO,
            0,
            "12.9",
            "",
            "error",
            'CUDA_VISIBLE_DEVICES is ""',
        ),  # a minor version runs on an older driver
        (TWO, 0, "12.9", None, "error", "CUDA does not start"),
        (TWO, 2, "12.8", None, "ok", "sees 2 GPUs"),
        (TWO, 1, "12.8", "1", "warning", "sees 1 of 2 GPUs: CUDA_VISIBLE_DEVICES is 1"),
        (TWO, 1, "12.8", None, "warning", "nvidia-smi"),
        (None, 0, "12.8", None, "note", "no NVIDIA GPU"),
        (Driver("570", (12, 8), 0), 0, "12.8", None, "note", "no NVIDIA GPU"),
        (None, 1, "12.8", None, "note", "NVML"),
    ],
)
def test_whether_torch_sees_the_gpus_of_the_driver(
    driver,
    num_seen,
    built_for,
    visible,
    level,
    words,
):
    verdict = judge_gpus(driver, num_seen, built_for, visible)
    assert verdict.level == level
    assert words in verdict.text


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        # Compared at the CPU's size, and at no other.
        (
            [
                rate("cpu", "fp32", 2048, 100),
                rate("cuda:0", "fp32", 2048, 5_000),
                rate("cuda:0", "fp32", 8192, 19_000),
            ],
            [("ok", "2048 x 2048: cuda:0 is 50 times as fast as the CPU")],
        ),
        (
            [rate("cpu", "fp32", 512, 100), rate("cuda:0", "fp32", 512, 50)],
            [("warning", "cuda:0 is 0.5 times as fast as the CPU")],
        ),
        # Formats by their best rates.
        (
            [
                rate("cuda:0", "fp32", 512, 10),
                rate("cuda:0", "fp32", 8192, 20_000),
                rate("cuda:0", "bf16", 8192, 8e4),
            ],
            [("ok", "bf16 multiplies 4 times as fast as fp32 on cuda:0")],
        ),
        (
            [rate("cpu", "fp32", 2048, 200), rate("cpu", "bf16", 2048, 210)],
            [("note", "1.05 times as fast as fp32")],
        ),
        ([rate("cpu", "fp32", 512, 100, spread=0.5)], [("warning", "cpu fp32 50%")]),
    ],
)
def test_what_rates_mean(rates, expected):
    found = judge_rates(rates)
    assert [remark.level for remark in found] == [level for level, _ in expected]
    for remark, (_, words) in zip(found, expected, strict=True):
        assert words in remark.text


@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.7])
def test_a_process_that_is_stopped_again_and_again_has_no_lucky_sample(
    share,
):
    """It runs for `share` of every 100 ms; a product takes 15 ms of work."""
    work_s = 0.0

    def clock():
        pulses, rest_s = divmod(work_s, 0.1 * share)
        return pulses * 0.1 + rest_s

    def run():
        nonlocal work_s
        work_s += 0.015

    times = measure(run, lambda: None, clock, sample_s=0.15)
    assert statistics.median(times) == pytest.approx(0.015 / share, rel=0.35)


@pytest.mark.full
def test_the_command_measures_this_machine_without_ray():
    code = "import sys; sys.modules['ray'] = None; from cluster.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--local", "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=HANG_S,
    )
    report = json.loads(done.stdout)
    assert done.returncode == any(
        verdict["level"] == "error" for verdict in report["verdicts"]
    )
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert report["devices"][0]["precisions"] == [
        "fp32",
        "bf16",
        "fp16",
        "bf16-pure",
        "fp16-pure",
    ]
    measured = {(rate["device"], rate["precision"]): rate for rate in report["rates"]}
    assert {("cpu", "fp32"), ("cpu", "bf16")} <= measured.keys()
    for one in measured.values():
        assert one["gflop_per_s"] == pytest.approx(
            2 * one["n"] ** 3 / one["median_s"] / 1e9
        )
