"""FLOPs of a sample by hand, a count that leaves no trace, peaks by the names
that GPUs have, utilisation.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainers.model.precision import resolve_precision
from trainers.step.flops import count_flops, gpu_peak, utilisation
from trainers.step.forward import ForwardPass
from trainers.task import Task

CPU = torch.device("cpu")


class Rows(Task):
    """24 rows of 4 numbers; the loss is the mean of the outputs."""

    def __init__(self, shape=(4,)):
        self.shape = shape

    def dataset(self, split):
        return TensorDataset(torch.randn(24, *self.shape))

    def loss(self, outputs, batch):
        return outputs.float().mean()


def count(task, model, size=6, precision="fp32"):
    spec = resolve_precision(precision, CPU)
    return count_flops(
        ForwardPass(model, task, spec, CPU),
        task.dataset("train"),
        torch.arange(size),
    )


def test_a_linear_layer_by_hand():
    """2 x in x out forward, the same for the weight's gradient and, past the
    first layer, for the input's.
    """
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    expected = 2 * 2 * 4 * 8 + 3 * 2 * 8 * 3
    assert count(Rows(), model) == expected
    assert count(Rows(), model, size=20) == expected, (
        "samples of one shape cost the same in any number"
    )
    assert count(Rows(), model, precision="bf16") == expected


def test_a_convolution_by_hand():
    model = nn.Conv2d(2, 5, kernel_size=3, padding=1)
    assert count(Rows((2, 7, 7)), model) == 2 * (2 * 7 * 7 * 5 * 2 * 3 * 3)


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp32", 14),
        ("Tesla T4", "fp16-pure", 65),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA GB300", "fp16-pure", 2500),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "tf32", None),
        ("NVIDIA Something New", "fp32", None),
    ],
)
def test_peaks_by_name(gpu, precision, tflops):
    assert gpu_peak(gpu, precision) == (
        None if tflops is None else pytest.approx(tflops * 1e12)
    )


def test_utilisation_is_over_all_workers():
    assert utilisation(2e9, 1000.0, 4, 1e12) == pytest.approx(0.5)
    assert utilisation(None, 1000.0, 4, 1e12) is None
    assert utilisation(2e9, 1000.0, 4, None) is None
