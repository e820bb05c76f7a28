"""`precision: fp8`: which layers multiply in float8, by how much that is off, and where it is refused.

No CPU has such products: torchao computes the same without them (`emulate`).
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainers.model.float8 import to_float8

from tests.specs import losses, make, whole_state
from tests.tasks import Blobs
from tests.unit.test_flops import Rows, count
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import ConfigError
from trainers.launch.local import run_local
from trainers.launch.spec import check_precision
from trainers.model import precision
from trainers.model.precision import TABLE, resolve_precision
from tune.config import SweepConfig
from tune.search.space import check_space

torch.set_num_threads(1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Own(nn.Linear):
    """A forward of its own."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + 1.0


class Mixed(nn.Module):
    """Layers that float8 products take, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32, bias=False))
        self.own, self.hooked, self.odd = Own(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.hooked.register_forward_hook(lambda module, rows, out: out * 2.0)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.odd(self.norm(self.hooked(self.own(self.blocks(rows)))))
        return out


class Wide(Blobs):
    """Layers of sizes that float8 products take, in a batch of a number of rows that is none."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**{"features": 32, **args})

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that can do fp8, uncompiled."""
    monkeypatch.setattr(precision, "to_float8", functools.partial(to_float8, emulate=True))
    monkeypatch.setitem(TABLE, "fp8", replace(TABLE["fp8"], devices=("cpu", "cuda")))
    monkeypatch.setattr("trainers.loop.build.compile_model", lambda *args: None)


def test_names_and_parameters_are_the_models_own() -> None:
    model = Mixed()
    before = dict(model.named_parameters())
    names, modules = list(model.state_dict()), dict(model.named_modules())
    after = to_float8(model, emulate=True)
    assert after is model
    assert list(after.state_dict()) == names
    assert [(name, id(one)) for name, one in after.named_parameters()] == [(name, id(before[name])) for name in before]
    changed = [name for name, module in after.named_modules() if module is not modules[name]]
    assert changed == ["blocks.0", "blocks.2"], "others would lose their forward, their hooks, or have other sizes"


def test_a_model_that_is_one_layer_is_exchanged_too() -> None:
    layer = nn.Linear(32, 16)
    found = to_float8(layer, emulate=True)
    assert found is not layer
    assert found.weight is layer.weight


@pytest.mark.parametrize("rows", [48, 37])
def test_products_are_off_by_float8s_rounding(rows: int) -> None:
    """e4m3 has a unit roundoff of 2^-4, e5m2 of 2^-3; also for rows that are no multiple of 16."""
    torch.manual_seed(0)
    inputs, layer = torch.randn(rows, 64, requires_grad=True), nn.Linear(64, 32)
    seed = torch.randn(rows, 32)
    out = layer(inputs)
    exact = [out, *torch.autograd.grad(out, (inputs, layer.weight, layer.bias), seed)]
    out = to_float8(layer, emulate=True)(inputs)
    found = [out, *torch.autograd.grad(out, (inputs, layer.weight, layer.bias), seed)]
    errors = [float(((one - other).norm() / other.norm()).detach()) for one, other in zip(found, exact, strict=True)]
    assert all(0.005 < error < 0.15 for error in errors[:3]), errors
    assert errors[3] < 1e-6, "the bias is added as it is"


@pytest.mark.usefixtures("emulated")
@pytest.mark.full
def test_a_run_learns_and_its_checkpoint_is_any_precisions(tmp_path: Path) -> None:
    curves, names = {}, {}
    for name in ("bf16", "fp8"):
        spec = make(
            tmp_path, name=name, task="tests.unit.test_float8:Wide", precision=name, compile="default", device="cpu"
        )
        result = run_local(spec)
        assert result.status == "done"
        curves[name] = losses(spec)
        names[name] = {key: one.dtype for key, one in whole_state(spec.storage, 30)["model"].items()}
    assert names["fp8"] == names["bf16"]
    assert curves["fp8"] != curves["bf16"]
    assert sum(curves["fp8"][-10:]) == pytest.approx(sum(curves["bf16"][-10:]), rel=0.2)


def test_a_product_costs_the_same_flops() -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    assert count(Rows(), to_float8(layers(), emulate=True)) == count(Rows(), layers())


def test_no_layer_to_convert_is_said() -> None:
    with pytest.raises(ConfigError, match="finds no Linear layer whose sizes are both multiples of 16"):
        to_float8(nn.Sequential(nn.Linear(4, 16), nn.Conv2d(16, 16, 3)))


def test_without_torchao_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError) as raised:
        TABLE["fp8"].convert_model(nn.Linear(16, 16))
    assert str(raised.value).startswith('`precision` is "fp8", but needs torchao')
    assert "`pip install torchao`" in str(raised.value)


def test_a_cpu_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'`precision` is "fp8", but is not something that cpu can do'):
        check_precision(make(tmp_path, precision="fp8", compile="default", device="cpu"))


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_it_needs_ada_or_hopper(capability: tuple[int, int], able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    if able:
        spec = resolve_precision("fp8", CUDA)
        assert (spec.autocast, spec.scaler, spec.parameters, spec.float8) == (torch.bfloat16, False, None, True)
    else:
        with pytest.raises(ConfigError, match="is not something that a card"):
            resolve_precision("fp8", CUDA)


TRAIN: dict[str, Any] = {"task": "t:T", "epochs": 1, "global_batch_size": 8, "optimizer": {"lr": 0.1}}


def test_it_is_for_compiled_models() -> None:
    with pytest.raises(ConfigError, match=r'`compile` is "off", but leaves the casts of precision fp8'):
        build(TrainConfig, TRAIN | {"precision": "fp8"}, "f")
    assert build(TrainConfig, TRAIN | {"precision": "fp8", "compile": "default"}, "f").precision == "fp8"


def test_a_sweep_compares_it() -> None:
    compiled = TRAIN | {"compile": "default"}
    tree = {"train": compiled, "space": {"precision": ["bf16", "fp8"]}, "objective": {"metric": "val_loss"}}
    check_space(build(SweepConfig, tree, "sweep.yaml"), compiled, "sweep.yaml")
    tree["train"] = TRAIN
    with pytest.raises(ConfigError, match="compile"):
        check_space(build(SweepConfig, tree, "sweep.yaml"), TRAIN, "sweep.yaml")
