"""Real memory: what fits is found, running out in mid-training takes a smaller
microbatch, and nothing stays behind.
"""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.gpu.runs import CUDA, Hungry, Images, train
from tests.specs import curve
from tests.waits import HANG_S
from trainers.causes import classify
from trainers.step.microbatch import Probe

pytestmark = pytest.mark.gpu

MB = 2**20
LIMIT_BYTES = 1024 * MB


@pytest.fixture
def limited():
    """A GPU of one gigabyte, as far as torch is concerned (the context is not counted)."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        LIMIT_BYTES / torch.cuda.get_device_properties(CUDA).total_memory
    )


# 16 MB a sample: 64 samples take the whole gigabyte, and a third of a step,
# 43, two thirds of it.
TASK = {"bytes_per_sample": 16 * MB, "samples": 128}
OPTIONS = {
    "global_batch_size": 128,
    "max_steps": 4,
    "evaluate__microbatch_size": 16,
}


@pytest.mark.usefixtures("limited")
def test_auto_lands_on_a_microbatch_that_trains(tmp_path):
    result = train(CUDA, tmp_path / "auto", Hungry(**TASK), **OPTIONS)
    print(
        f"microbatch {result.microbatch_size}, peak {result.peak_memory_bytes / MB:.0f} MB"
    )
    assert result.status == "done"
    assert result.microbatch_size == 43  # three parts, the fewest that fit
    assert result.accumulation == 3
    assert 43 * 16 * MB < result.peak_memory_bytes < LIMIT_BYTES
    torch.cuda.set_per_process_memory_fraction(1.0)
    whole = train(CUDA, tmp_path / "whole", Hungry(**TASK), **OPTIONS)
    assert whole.microbatch_size == 128
    assert curve(tmp_path / "auto") == pytest.approx(
        curve(tmp_path / "whole"), rel=1e-3
    )


@pytest.mark.usefixtures("limited")
def test_out_of_memory_in_mid_training_goes_on_with_a_smaller_microbatch(
    tmp_path,
):
    """From its 30th forward on the task takes four times as much, so that no
    microbatch above 15 fits any more.
    """
    task = Hungry(**TASK, turns=30, later=4)
    options = OPTIONS | {"max_steps": 12, "checkpoint__every_steps": 2}
    result = train(CUDA, tmp_path / "run", task, **options)
    print(f"microbatch {result.microbatch_size} at the end")
    assert result.status == "done"
    assert result.steps == 12
    assert result.microbatch_size <= 16
    assert len(curve(tmp_path / "run")) == 12
    assert result.peak_memory_bytes < LIMIT_BYTES


@pytest.fixture
def probed(monkeypatch):
    """The sizes that are probed."""
    sizes: list[int] = []
    run = Probe.run

    def noted(probe, size, *how, **more):
        sizes.append(size)
        return run(probe, size, *how, **more)

    monkeypatch.setattr(Probe, "run", noted)
    return sizes


@pytest.mark.usefixtures("limited")
def test_memory_is_probed_only_where_it_could_be_short(probed):
    ample = Hungry(bytes_per_sample=MB, samples=128)
    assert train(CUDA, task=ample, **OPTIONS).microbatch_size == 128
    assert probed == []
    short = Hungry(bytes_per_sample=5 * MB, samples=128)
    assert train(CUDA, task=short, **OPTIONS).microbatch_size == 128
    assert probed == [128]


class Pairs(Hungry):
    """Forward takes memory for each pair of samples: of a few almost none."""

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        pairs = len(outputs) * len(outputs)
        torch.empty(pairs * MB // 8, dtype=torch.uint8, device=outputs.device)
        return outputs


@pytest.mark.usefixtures("limited")
def test_a_first_step_that_was_forecast_to_fit_and_does_not(probed):
    """128 samples take two gigabytes, and the forecast says 128 MB."""
    result = train(
        CUDA, task=Pairs(bytes_per_sample=4, samples=128), **OPTIONS
    )
    assert (result.status, result.steps, result.microbatch_size) == (
        "done",
        4,
        64,
    )
    assert probed == []


@pytest.mark.usefixtures("limited")
def test_what_never_fits_ends_as_out_of_memory():
    with pytest.raises(RuntimeError) as raised:
        train(
            CUDA,
            task=Hungry(bytes_per_sample=4096 * MB, samples=128),
            **OPTIONS,
        )
    assert classify(raised.value) == "out_of_memory"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": True},
        {"precision": "fp16", "data__resident": False},
    ],
)
def test_a_run_leaves_no_memory_behind(options, tmp_path):
    """Equal to the byte after the first run, which leaves cuBLAS its workspaces."""

    def left(number):
        train(CUDA, tmp_path / str(number), Images(), **options)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(CUDA)

    left(0)
    floor = left(1)
    print(f"{floor / MB:.1f} MB stay, of cuBLAS and of torch's generators")
    assert floor < 512 * MB
    assert [left(2), left(3)] == [floor, floor]


def test_peak_memory_is_the_runs_own():
    """It counts what was freed again, and starts anew with every run."""
    options = OPTIONS | {"microbatch_size": 32}

    def peak(bytes_per_sample):
        return train(
            CUDA,
            task=Hungry(bytes_per_sample=bytes_per_sample, samples=128),
            **options,
        ).peak_memory_bytes

    peak(MB)
    gc.collect()
    floor = torch.cuda.memory_allocated(CUDA)
    large = peak(8 * MB) - floor
    small = peak(MB) - floor
    print(
        f"peaks {large / MB:.0f} and {small / MB:.0f} MB above {floor / MB:.0f} MB"
    )
    assert 256 * MB <= large <= 256 * MB + 32 * MB
    assert 32 * MB <= small <= 32 * MB + 32 * MB


class Wide(Hungry):
    """Evaluation takes as much memory a sample as training."""

    def forward(self, model, batch):
        outputs = super().forward(model, batch)
        if model.training:
            return outputs
        filler = torch.zeros(
            len(outputs), self.bytes_per_sample // 4, device=outputs.device
        )
        return outputs + filler.sum(1, keepdim=True)


@pytest.mark.usefixtures("limited")
def test_an_evaluation_that_does_not_fit_is_taken_in_halves():
    options = OPTIONS | {"microbatch_size": 16}
    halved = train(
        CUDA, task=Wide(**TASK), **options | {"evaluate__microbatch_size": 128}
    )
    whole = train(CUDA, task=Wide(**TASK), **options)
    assert halved.status == "done"
    assert halved.metrics["val_loss"] == pytest.approx(
        whole.metrics["val_loss"], rel=1e-5
    )


class Stacked(Images):
    """Blocks that repeat, whose activations are most of the memory."""

    def __init__(self):
        super().__init__(samples=32, size=48, channels=32, random=False)

    def model(self):
        wide = self.channels
        blocks = [
            _Residual(
                nn.Conv2d(wide, wide, 3, padding=1),
                nn.BatchNorm2d(wide),
                nn.ReLU(),
            )
            for _ in range(12)
        ]
        ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 4))
        return nn.Sequential(
            nn.Conv2d(3, wide, 1), nn.Sequential(*blocks), *ends
        )


class _Residual(nn.Sequential):
    def forward(self, images):
        return images + super().forward(images)


def test_activations_that_are_computed_again_take_less_memory(tmp_path):
    options = {
        "global_batch_size": 32,
        "max_steps": 2,
        "microbatch_size": 32,
        "deterministic": True,
    }
    peaks = {}
    for mode in ("none", "full"):
        result = train(
            CUDA,
            tmp_path / mode,
            Stacked(),
            activation_checkpointing=mode,
            cuda_graphs=False,
            **options,
        )
        peaks[mode] = result.peak_memory_bytes
    print({mode: f"{peak / MB:.0f} MB" for mode, peak in peaks.items()})
    assert curve(tmp_path / "full") == curve(tmp_path / "none")
    assert peaks["full"] < 0.6 * peaks["none"]


def test_the_segments_of_a_lane_grow():
    """In a process of its own: what was allocated before stays as it was."""
    script = """
import torch
from trainers.devices.device import grow_segments
grow_segments()
kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
segments = torch.cuda.memory_snapshot()
assert segments and all(one["is_expandable"] for one in segments), segments
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
