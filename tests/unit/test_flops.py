"""FLOPs of a sample by hand, a count that leaves no trace, peaks by the names that GPUs have, utilisation."""

from __future__ import annotations

import csv
import datetime as dt
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.unit.test_loop import curve, train
from trainers.model.precision import resolve_precision
from trainers.step.flops import PEAKS, count_flops, device_peak, gpu_peak, utilisation
from trainers.step.forward import ForwardPass
from trainers.step.throwaway import throwaway
from trainers.task import Task

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)


class Rows(Task):
    """24 rows of 4 numbers; the loss is the mean of the outputs."""

    def __init__(self, shape: tuple[int, ...] = (4,)) -> None:
        self.shape = shape

    def dataset(self, split: str) -> Dataset[Any]:
        return TensorDataset(torch.randn(24, *self.shape))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.float().mean()


def count(task: Task, model: nn.Module, size: int = 6, precision: str = "fp32") -> float | None:
    spec = resolve_precision(precision, CPU)
    return count_flops(ForwardPass(model, task, spec, CPU), task.dataset("train"), torch.arange(size))


def test_a_linear_layer_by_hand() -> None:
    """2 x in x out forward, the same for the weight's gradient and, past the first layer, for the input's."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    expected = 2 * 2 * 4 * 8 + 3 * 2 * 8 * 3
    assert count(Rows(), model) == expected
    assert count(Rows(), model, size=20) == expected, "samples of one shape cost the same in any number"
    assert count(Rows(), model, precision="bf16") == expected


def test_a_frozen_layer_costs_its_forward_only() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    assert count(Rows(), model) == 2 * 4 * 8 + 2 * 2 * 8 * 3


def test_a_convolution_by_hand() -> None:
    model = nn.Conv2d(2, 5, kernel_size=3, padding=1)
    assert count(Rows((2, 7, 7)), model) == 2 * (2 * 7 * 7 * 5 * 2 * 3 * 3)


def test_a_model_without_products_has_no_figure() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * self.weight

    assert count(Rows(), Scale()) is None


class Words(Rows):
    """Sequences of 1, 2, 3, ... words, padded to the longest of their batch; the probe's worst case is far longer."""

    def dataset(self, split: str) -> Dataset[Any]:
        return [torch.ones(length + 1, 4) for length in range(24)]  # type: ignore[return-value]

    def collate(self, samples: list[Any]) -> Any:
        return (nn.utils.rnn.pad_sequence(samples, batch_first=True),)

    def worst_case_batch(self, dataset: Dataset[Any], size: int) -> Any:
        return (torch.ones(size, 1000, 4),)


def test_padding_counts_and_the_worst_case_does_not() -> None:
    """Ten samples: every one is padded to ten words."""
    assert count(Words(), nn.Linear(4, 8), size=10) == 10 * 2 * 2 * 4 * 8


class Traces(Rows):
    """Leaves a trace wherever a pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def transform(self, batch: Any, training: bool) -> Any:
        self.passes += 1
        return (batch[0] + torch.randn_like(batch[0]) + random.random() + np.random.rand(),)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.passes > 5:
            raise ValueError("no more")
        return super().loss(outputs, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


@pytest.mark.parametrize("passes", [0, 9])
def test_a_count_leaves_no_trace(passes: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one that fails, which is a warning and no figure."""
    task, model = Traces(), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    task.passes = passes
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    data = task.dataset("train")
    torch.set_rng_state(drawn[0])
    forward = ForwardPass(model, task, FP32, CPU)
    with caplog.at_level(logging.WARNING), throwaway(forward, dataset=data):
        found = count_flops(forward, data, torch.arange(6))
    assert (found is None) == (passes == 9)
    assert ("ValueError: no more" in caplog.text) == (passes == 9)
    assert task.passes == passes
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert (np.random.get_state()[1] == drawn[2]).all()  # type: ignore[index]


def test_a_run_is_bit_equal_with_and_without_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = train(tmp_path / "counted", epochs=1)
    monkeypatch.setattr("trainers.loop.build.count_flops", lambda *_: None)
    plain = train(tmp_path / "plain", epochs=1)
    assert (counted.flops_per_sample, plain.flops_per_sample) == (2 * 2 * 4 * 8 + 3 * 2 * 8 * 2, None)
    assert curve(tmp_path / "counted") == curve(tmp_path / "plain")


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp32", 14),
        ("Tesla T4", "fp16-pure", 65),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16-pure", 312),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "fp16", 362),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B300 SXM6 AC", "tf32", 1125),
        ("NVIDIA GB300", "fp16-pure", 2500),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16", None),
        ("NVIDIA GeForce RTX 4090 D", "fp16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "tf32", None),
        ("NVIDIA Something New", "fp32", None),
    ],
)
def test_peaks_by_name(gpu: str, precision: str, tflops: float | None) -> None:
    assert gpu_peak(gpu, precision) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_cpu_has_no_peak() -> None:
    assert device_peak(CPU, "fp32") is None


def test_the_table_is_whole() -> None:
    """Each row has a source and its day, and no format is slower than the wider one: a slip of the column would be."""
    for row in csv.DictReader(PEAKS.read_text().splitlines()):
        assert row["source"]
        dt.date.fromisoformat(row["date"])
        assert None not in row
        found = [float(row[f"{name}_tflops"]) for name in ("fp32", "tf32", "bf16", "fp16") if row[f"{name}_tflops"]]
        assert found == sorted(found)


def test_utilisation_is_over_all_workers() -> None:
    assert utilisation(2e9, 1000.0, 4, 1e12) == pytest.approx(0.5)
    assert utilisation(None, 1000.0, 4, 1e12) is None
    assert utilisation(2e9, 1000.0, 4, None) is None
