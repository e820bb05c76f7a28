"""What each precision name does on a CPU, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.config import TrainConfig
from trainers.errors import ConfigError
from trainers.precision import TABLE, apply_matmul, check_device_type, resolve_precision

CPU = torch.device("cpu")
NAMES = ["fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp16-pure"]


def test_the_table_has_every_name_of_the_configuration() -> None:
    assert list(TABLE) == NAMES
    assert set(NAMES) == set(TrainConfig.model_fields["precision"].annotation.__args__)  # type: ignore[union-attr]


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
def test_a_row(name: str, autocast: torch.dtype | None, scaler: bool, parameters: torch.dtype | None) -> None:
    spec = resolve_precision(name, CPU)
    assert (spec.autocast, spec.scaler, spec.parameters, spec.matmul) == (autocast, scaler, parameters, "ieee")


def test_only_tf32_lowers_the_matmul() -> None:
    assert [spec.name for spec in TABLE.values() if spec.matmul == "tf32"] == ["tf32"]


def test_tf32_is_refused_on_a_cpu_with_what_it_can_do() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_precision("tf32", CPU)
    text = str(raised.value)
    assert text.startswith('`precision` is "tf32", but is not something that cpu can do; use one of ')
    assert all(name in text for name in NAMES)


def test_device_types_are_checked_without_a_device() -> None:
    for name in NAMES:
        check_device_type(name, "cuda")
    for device in ("cpu", "mps"):
        with pytest.raises(ConfigError, match=f"{device} device"):
            check_device_type("tf32", device)


@pytest.mark.parametrize(
    ("name", "inside"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_covers_the_forward_only(name: str, inside: torch.dtype) -> None:
    spec, layer = resolve_precision(name, CPU), nn.Linear(4, 4)
    with spec.autocast_context(CPU):
        assert layer(torch.ones(2, 4)).dtype is inside
    assert layer(torch.ones(2, 4)).dtype is torch.float32
    assert spec.convert_model(layer).weight.dtype is torch.float32


@pytest.mark.parametrize(("name", "dtype"), [("bf16-pure", torch.bfloat16), ("fp16-pure", torch.float16)])
def test_pure_formats_convert_parameters_buffers_and_floating_inputs(name: str, dtype: torch.dtype) -> None:
    spec = resolve_precision(name, CPU)
    model = spec.convert_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert model[1].running_mean.dtype is dtype  # type: ignore[union-attr]
    batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "mask": torch.ones(2) > 0, "name": "a"}
    converted = spec.convert_batch(batch)
    assert [converted[key].dtype for key in ("x", "ids", "mask")] == [dtype, torch.int64, torch.bool]
    assert converted["name"] == "a"
    assert batch["x"].dtype is torch.float32  # type: ignore[union-attr]


def test_other_formats_leave_the_batch_as_it_is() -> None:
    batch = (torch.ones(2), torch.ones(2))
    assert resolve_precision("bf16", CPU).convert_batch(batch) is batch


def test_matmul_settings_are_left_alone_on_a_cpu() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    apply_matmul(TABLE["tf32"], CPU)
    assert torch.backends.cuda.matmul.fp32_precision == before
