"""What each precision computes in on CUDA, by the size of its errors; and that
each of them trains.
"""

import pytest
import torch
from torch import nn

from tests.gpu.runs import CUDA, train
from tests.tasks import Blobs
from trainers.devices.device import set_flags
from trainers.model.precision import TABLE, apply_matmul, resolve_precision

# Relative Frobenius errors of a product of normal numbers, from the formats'
# unit roundoffs (2^-24 for fp32, 2^-11 for tf32 and fp16, 2^-8 for bf16), with
# a wide margin on both sides.
ERRORS = {
    "fp32": (1e-9, 1e-5),
    "tf32": (5e-5, 2e-3),
    "fp16": (5e-5, 2e-3),
    "fp16-pure": (5e-5, 2e-3),
    "bf16": (5e-4, 2e-2),
    "bf16-pure": (5e-4, 2e-2),
}


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def linear_error(name):
    spec = resolve_precision(name, CUDA)
    apply_matmul(spec)
    torch.manual_seed(0)
    inputs = torch.randn(512, 1024, device=CUDA)
    layer = nn.Linear(1024, 512, bias=False, device=CUDA)
    exact = inputs.double() @ layer.weight.detach().double().T
    model = spec.convert_model(layer)
    with torch.no_grad(), spec.autocast_context(CUDA):
        return error(model(spec.convert_batch(inputs)), exact)


def convolution_error(name):
    spec = resolve_precision(name, CUDA)
    apply_matmul(spec)
    torch.manual_seed(0)
    inputs = torch.randn(16, 64, 32, 32, device=CUDA)
    layer = nn.Conv2d(64, 64, 3, bias=False, device=CUDA)
    exact = nn.functional.conv2d(
        inputs.double(), layer.weight.detach().double()
    )
    model = spec.convert_model(layer)
    with torch.no_grad(), spec.autocast_context(CUDA):
        return error(model(spec.convert_batch(inputs)), exact)


def _names(*names):
    return [
        pytest.param(
            name,
            marks=pytest.mark.real_gpu("arithmetic") if name == "tf32" else (),
        )
        for name in names
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", _names(*ERRORS))
def test_products_have_the_precisions_own_error(name):
    low, high = ERRORS[name]
    found = linear_error(name)
    print(f"{name}: relative error of a product {found:.2e}")
    assert low < found < high


@pytest.mark.gpu
@pytest.mark.real_gpu("arithmetic")
def test_convolutions_follow_the_same_switch():
    set_flags(CUDA, threads=1, deterministic=False)
    errors = {
        name: convolution_error(name) for name in ("tf32", "fp32", "bf16")
    }
    print(f"relative errors of a convolution: {errors}")
    assert errors["fp32"] < 3e-5 < errors["tf32"] < errors["bf16"]


@pytest.mark.parametrize(
    "name", ["tf32", "bf16", "fp16", "bf16-pure", "fp16-pure"]
)
def test_every_precision_trains_to_the_loss_of_fp32(name, device):
    if device.type not in TABLE[name].devices:
        pytest.skip(f"{name} is not something that a {device.type} can do")
    options = {
        "max_steps": 120,
        "log_every_steps": 40,
        "optimizer__eps": 1e-4,
    }  # 1e-8 is zero in float16
    expected = train(device, precision="fp32", **options).metrics
    found = train(device, precision=name, **options).metrics
    print(
        f"{name}: val_loss {found['val_loss']:.4f}, in fp32 {expected['val_loss']:.4f}"
    )
    assert expected["val_accuracy"] > 0.9
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=0.05)
    assert found["val_accuracy"] == pytest.approx(
        expected["val_accuracy"], abs=0.03
    )


class Wide(Blobs):
    """Sizes that float8 products take."""

    def __init__(self):
        super().__init__(features=32)

    def model(self):
        return nn.Sequential(
            nn.Linear(32, 128),
            nn.Tanh(),
            nn.Linear(128, 128),
            nn.Tanh(),
            nn.Linear(128, 4),
        )


@pytest.mark.gpu
@pytest.mark.real_gpu("arithmetic")
def test_float8_multiplies_with_its_own_error_and_trains_to_the_loss_of_bf16():
    """e4m3 has a unit roundoff of 2^-4.

    The last step of an epoch has 11 rows, which are padded to 16.
    """
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability(CUDA) < TABLE["fp8"].min_capability:
        pytest.skip("fp8 is not something that this GPU can do")
    product = linear_error("fp8")
    print(f"fp8: relative error of a product {product:.2e}")
    assert 5e-3 < product < 0.15
    options = {"max_steps": 120, "log_every_steps": 40, "compile": "default"}
    expected, found = (
        train(CUDA, task=Wide(), precision=name, **options).metrics
        for name in ("bf16", "fp8")
    )
    print(
        f"fp8: val_loss {found['val_loss']:.4f}, in bf16 {expected['val_loss']:.4f}"
    )
    assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=0.05)
