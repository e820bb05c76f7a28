"""What each precision name does on a CPU, and where it is refused."""

import pytest
import torch
from torch import nn

from tests.specs import make
from trainers.errors import ConfigError
from trainers.launch.local import run_local
from trainers.model.precision import TABLE, apply_matmul, resolve_precision

CPU = torch.device("cpu")
NAMES = ["fp32", "tf32", "bf16", "fp16", "fp8", "bf16-pure", "fp16-pure"]


@pytest.mark.parametrize(
    ("name", "autocast", "scaler", "parameters"),
    [
        ("fp32", None, False, None),
        ("bf16", torch.bfloat16, False, None),
        ("fp16", torch.float16, True, None),
        ("bf16-pure", None, False, torch.bfloat16),
        ("fp16-pure", None, False, torch.float16),
    ],
)
def test_a_row(name, autocast, scaler, parameters):
    spec = resolve_precision(name, CPU)
    assert (spec.autocast, spec.scaler, spec.parameters, spec.matmul) == (
        autocast,
        scaler,
        parameters,
        "ieee",
    )


def test_tf32_is_refused_on_a_cpu_with_what_it_can_do():
    with pytest.raises(ConfigError) as raised:
        resolve_precision("tf32", CPU)
    text = str(raised.value)
    assert text.startswith(
        '`precision: "tf32"` is not supported on cpu; use one of '
    )
    assert all(name in text for name in NAMES if name != "fp8")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16-pure", torch.bfloat16), ("fp16-pure", torch.float16)],
)
def test_pure_formats_convert_parameters_buffers_and_floating_inputs(
    name, dtype
):
    spec = resolve_precision(name, CPU)
    model = spec.convert_model(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    )
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert model[1].running_mean.dtype is dtype
    batch = {
        "x": torch.ones(2),
        "ids": torch.ones(2, dtype=torch.int64),
        "mask": torch.ones(2) > 0,
        "name": "a",
    }
    converted = spec.convert_batch(batch)
    assert [converted[key].dtype for key in ("x", "ids", "mask")] == [
        dtype,
        torch.int64,
        torch.bool,
    ]
    assert converted["name"] == "a"
    assert batch["x"].dtype is torch.float32


@pytest.fixture
def switches_come_back():
    yield
    apply_matmul(TABLE["fp32"])


@pytest.mark.usefixtures("switches_come_back")
@pytest.mark.parametrize("before", ["older", "newer", "cuDNN", "everything"])
@pytest.mark.parametrize(
    ("name", "expected"), [("fp32", False), ("bf16", False), ("tf32", True)]
)
def test_matmul_switches_are_set_whatever_they_were(name, expected, before):
    """By every name that torch has for them: reading one that contradicts
    another raises.
    """
    if before == "older":
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = not expected
    elif before == "newer":
        torch.backends.cuda.matmul.fp32_precision = (
            "ieee" if expected else "tf32"
        )
        torch.backends.cudnn.conv.fp32_precision = (
            "ieee" if expected else "tf32"
        )
    elif before == "cuDNN":
        torch.backends.cudnn.fp32_precision = "ieee" if expected else "tf32"
    else:
        torch.backends.fp32_precision = "tf32"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
    apply_matmul(TABLE[name])
    assert (
        torch.backends.cuda.matmul.allow_tf32
        is torch.backends.cudnn.allow_tf32
        is expected
    )
    for part in (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
    ):
        assert (part.fp32_precision == "tf32") is expected
    assert torch.get_float32_matmul_precision() == (
        "high" if expected else "highest"
    )
    assert torch.backends.mkldnn.conv.fp32_precision == "none"


class Mixed(nn.Module):
    """Parameters of four and of five dimensions, and a buffer of four."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Conv2d(3, 8, 3)
        self.deep = nn.Conv3d(3, 8, 3)
        self.register_buffer("picture", torch.randn(1, 3, 4, 4))


def test_channels_last_is_the_layout_of_4d_tensors_only():
    before = Mixed()
    spec = resolve_precision("fp32", CPU).with_layout(True, before, CPU)
    weight = before.flat.weight.detach().clone()
    model = spec.convert_model(before)
    for tensor in (model.flat.weight, model.picture):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()
    assert model.deep.weight.is_contiguous()
    assert torch.equal(model.flat.weight, weight)
    images = torch.randn(2, 3, 4, 4)
    labels = torch.arange(2)
    mask = torch.ones(2, 3, 4, 4, dtype=torch.int64)
    converted = spec.convert_batch(
        {"images": images, "labels": labels, "mask": mask}
    )
    assert converted["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(converted["images"], images)
    assert converted["labels"] is labels
    assert converted["mask"] is mask


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [("auto", "cuda", True), ("auto", "cpu", False)],
)
def test_channels_last_by_itself_is_for_convolutions_on_cuda(
    wanted, device, expected
):
    spec = TABLE["fp32"]
    where = torch.device(device)
    assert spec.with_layout(wanted, Mixed(), where).channels_last is expected
    assert not spec.with_layout(wanted, nn.Linear(4, 4), where).channels_last
    assert not spec.with_layout(False, Mixed(), where).channels_last


def test_float64_is_left_as_it_is_which_is_said(tmp_path):
    spec = make(tmp_path, precision="bf16", task_args={"dtype": "float64"})
    [said] = run_local(spec).warnings
    assert "leaves these parameters in float64" in said
