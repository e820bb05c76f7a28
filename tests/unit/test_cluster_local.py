"""`python -m cluster check --local`: what it makes of drivers and rates, and the command as a user types it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.__main__ import main
from cluster.health import local
from cluster.health.local import Driver, LocalReport, ProductRate, Remark, judge_gpus, judge_rates, size_for
from cluster.health.matmul import measure
from tests.waits import HANG_S

REPOSITORY = Path(__file__).parent.parent.parent
TWO = Driver("570.124.06", (12, 8), 2)


def rate(device: str, precision: str, n: int, gflop_per_s: float, spread: float = 0.01) -> ProductRate:
    return ProductRate(device, precision, n, 2 * n**3 / gflop_per_s / 1e9, gflop_per_s, spread)


@pytest.mark.parametrize(
    ("built_for", "visible", "words"),
    [
        (None, None, ["is a CPU build", "install one for CUDA 12"]),
        ("13.2", None, ["built for CUDA 13.2", "the driver stops at 12.8", "update the driver", "a torch for CUDA 12"]),
        ("12.9", "", ['CUDA_VISIBLE_DEVICES is ""', "unset it"]),
        ("12.9", "-1", ['CUDA_VISIBLE_DEVICES is "-1"', "unset it"]),
        ("12.9", None, ["CUDA does not start (the driver is asleep)"]),
    ],
)
def test_gpus_that_torch_cannot_use_are_an_error_with_its_fix(
    built_for: str | None, visible: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("the driver is asleep\nsecond line")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    verdict = judge_gpus(TWO, 0, built_for, visible)
    assert verdict.level == "error"
    assert verdict.text.startswith("the driver (570.124.06) has 2 GPUs, torch sees none: ")
    for word in words:
        assert word in verdict.text


def test_a_minor_version_of_cuda_runs_on_an_older_driver() -> None:
    assert "built for" not in judge_gpus(TWO, 0, "12.9", "").text


@pytest.mark.parametrize(
    ("driver", "num_seen", "visible", "level", "words"),
    [
        (TWO, 2, None, "ok", "sees 2 GPUs"),
        (TWO, 1, "1", "warning", "sees 1 of 2 GPUs: CUDA_VISIBLE_DEVICES is 1"),
        (TWO, 1, None, "warning", "nvidia-smi"),
        (None, 0, None, "note", "no NVIDIA GPU"),
        (Driver("570", (12, 8), 0), 0, None, "note", "no NVIDIA GPU"),
        (None, 1, None, "note", "NVML"),
    ],
)
def test_what_is_no_error(driver: Driver | None, num_seen: int, visible: str | None, level: str, words: str) -> None:
    verdict = judge_gpus(driver, num_seen, "12.8", visible)
    assert verdict.level == level
    assert words in verdict.text


def test_a_gpu_is_compared_at_the_cpus_size_and_at_no_other() -> None:
    found = judge_rates(
        [rate("cpu", "fp32", 2048, 100), rate("cuda:0", "fp32", 2048, 5_000), rate("cuda:0", "fp32", 8192, 19_000)]
    )
    assert [verdict.level for verdict in found] == ["ok"]
    assert found[0].text == "fp32, 2048 x 2048: cuda:0 is 50 times as fast as the CPU"


def test_a_gpu_slower_than_the_cpu_is_warned_of() -> None:
    found = judge_rates([rate("cpu", "fp32", 512, 100), rate("cuda:0", "fp32", 512, 50)])
    assert found[0] == Remark("warning", "fp32, 512 x 512: cuda:0 is 0.5 times as fast as the CPU")


def test_formats_are_compared_by_their_best_rates() -> None:
    on_gpu = [
        rate("cuda:0", "fp32", 512, 10),
        rate("cuda:0", "fp32", 8192, 20_000),
        rate("cuda:0", "bf16", 8192, 80_000),
    ]
    found = judge_rates([*on_gpu, rate("cpu", "fp32", 2048, 200), rate("cpu", "bf16", 2048, 210)])
    assert found == [
        Remark("ok", "bf16 multiplies 4 times as fast as fp32 on cuda:0"),
        Remark("note", "bf16 multiplies 1.05 times as fast as fp32 on cpu: no gain in it here"),
    ]


def test_noise_is_warned_of() -> None:
    found = judge_rates([rate("cpu", "fp32", 512, 100, spread=0.5)])
    assert [verdict.level for verdict in found] == ["warning"]
    assert "cpu fp32 50%" in found[0].text


@pytest.mark.parametrize(
    ("probe_s", "n"),
    [(0.1, 512), (5.0, 512), (0.1 / 8 * 1.01, 512), (0.1 / 8 * 0.99, 1024), (0.1 / 64 * 0.99, 2048), (1e-6, 8192)],
)
def test_the_size_is_the_largest_within_the_time(probe_s: float, n: int) -> None:
    assert size_for(0.1, 512, probe_s) == n


def test_a_product_that_is_all_launch_does_not_choose_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes 20 us for the first one, whatever it is: by that alone the largest would be 4 times too small."""
    measured: list[int] = []

    def times(precision: str, device: torch.device, n: int) -> list[float]:
        measured.append(n)
        return [max(20e-6, 2 * n**3 / 500e12)]

    monkeypatch.setattr(local, "matmul_times", times)
    assert local._largest(0.02, "bf16", torch.device("cuda")) == max(local._SIZES)
    monkeypatch.setattr(local, "_SIZES", (512, 1024, 2048, 4096, 8192, 16384))
    assert local._largest(0.01, "bf16", torch.device("cuda")) == 8192
    assert size_for(0.01, 512, 20e-6) < 8192


class Machine:
    """A device on which a product is only issued, and done when it is waited for; the first ones are slow."""

    def __init__(self, product_s: float, slow_s: float) -> None:
        self.product_s, self.slow_s = product_s, slow_s
        self.now, self.queued, self.done = 0.0, 0, 0

    def run(self) -> None:
        self.queued += 1

    def wait(self) -> None:
        for _ in range(self.queued):
            self.now += self.slow_s if self.done < 2 else self.product_s
            self.done += 1
        self.queued = 0


@pytest.mark.parametrize(("product_s", "runs"), [(0.5, 1), (0.001, 20)])
def test_products_are_waited_for_and_the_first_ones_do_not_count(product_s: float, runs: int) -> None:
    machine = Machine(product_s, slow_s=product_s)
    times = measure(machine.run, machine.wait, lambda: machine.now)
    assert times == pytest.approx([product_s] * len(times))
    assert len(times) == (3 if product_s == 0.5 else 7)
    assert machine.done == 4 + runs * len(times)  # a short product is repeated until a sample can be told from a launch


def test_a_slow_start_is_not_in_the_samples() -> None:
    machine = Machine(0.001, slow_s=0.4)
    assert max(measure(machine.run, machine.wait, lambda: machine.now)) == pytest.approx(0.001)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.7])
def test_a_process_that_is_stopped_again_and_again_has_no_lucky_sample(share: float) -> None:
    """It runs for `share` of every 100 ms; a product takes 15 ms of work."""
    work_s = 0.0

    def clock() -> float:
        pulses, rest_s = divmod(work_s, 0.1 * share)
        return pulses * 0.1 + rest_s

    def run() -> None:
        nonlocal work_s
        work_s += 0.015

    times = measure(run, lambda: None, clock, sample_s=0.15)
    assert statistics.median(times) == pytest.approx(0.015 / share, rel=0.35)


def test_the_command_fails_where_torch_cannot_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = LocalReport({"torch": "2.15.0", "driver": None}, (), (), (Remark("error", "there is a GPU, unused"),))
    monkeypatch.setattr(local, "look", lambda: report)
    assert main(["check", "--local"]) == 1
    assert "torch 2.15.0  driver none" in (out := capsys.readouterr().out)
    assert out.endswith("error: there is a GPU, unused\n")


@pytest.mark.full
def test_the_command_measures_this_machine_without_ray() -> None:
    code = "import sys; sys.modules['ray'] = None; from cluster.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--local", "--json"], cwd=REPOSITORY, capture_output=True, timeout=HANG_S
    )
    report = json.loads(done.stdout)
    assert done.returncode == any(verdict["level"] == "error" for verdict in report["verdicts"])
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert report["devices"][0]["precisions"] == ["fp32", "bf16", "fp16", "bf16-pure", "fp16-pure"]
    measured = {(rate["device"], rate["precision"]): rate for rate in report["rates"]}
    assert {("cpu", "fp32"), ("cpu", "bf16")} <= measured.keys()
    for one in measured.values():
        assert one["gflop_per_s"] == pytest.approx(2 * one["n"] ** 3 / one["median_s"] / 1e9)
