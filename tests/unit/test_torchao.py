"""What torchao adds: layers that multiply in float8 (emulated: no CPU has such
products), and narrow moments.
"""

import functools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.specs import error_of, losses, make, whole_state
from tests.tasks import Blobs
from trainers.errors import ConfigError
from trainers.launch.local import run_local
from trainers.model import precision
from trainers.model.optimizer import NARROW, narrow_adamw
from trainers.model.precision import TABLE, resolve_precision, to_float8

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


class Own(nn.Linear):
    """A forward of its own."""

    def forward(self, rows):
        return super().forward(rows) + 1.0


class Mixed(nn.Module):
    """Layers that float8 products take, and others."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32, bias=False)
        )
        self.own = Own(32, 32)
        self.hooked = nn.Linear(32, 32)
        self.odd = nn.Linear(32, 10)
        self.hooked.register_forward_hook(lambda module, rows, out: out * 2.0)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, rows):
        return self.odd(self.norm(self.hooked(self.own(self.blocks(rows)))))


class Wide(Blobs):
    """Layers of sizes that float8 products take, in a batch of a number of
    rows that is none.
    """

    def __init__(self, **args):
        super().__init__(**{"features": 32, **args})

    def model(self):
        return nn.Sequential(
            nn.Linear(32, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, 4),
        )


class Convolved(Wide):
    """With a convolution of as many weights as have narrow moments."""

    def model(self):
        convolution = nn.Conv2d(32, 16, 3, padding=1)
        return nn.Sequential(
            nn.Unflatten(1, (32, 1, 1)),
            convolution,
            nn.Flatten(),
            nn.Tanh(),
            nn.Linear(16, 4),
        )


@pytest.fixture
def emulated(monkeypatch):
    """A CPU that can do fp8, uncompiled."""
    monkeypatch.setattr(
        precision, "to_float8", functools.partial(to_float8, emulate=True)
    )
    monkeypatch.setitem(
        TABLE, "fp8", replace(TABLE["fp8"], devices=("cpu", "cuda"))
    )
    monkeypatch.setattr(
        "trainers.loop.build.compile_model", lambda *args: None
    )


def test_names_and_parameters_are_the_models_own():
    model = Mixed()
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    modules = dict(model.named_modules())
    after = to_float8(model, emulate=True)
    assert after is model
    assert list(after.state_dict()) == names
    assert [(name, id(one)) for name, one in after.named_parameters()] == [
        (name, id(before[name])) for name in before
    ]
    changed = [
        name
        for name, module in after.named_modules()
        if module is not modules[name]
    ]
    assert changed == ["blocks.0", "blocks.2"], (
        "others would lose their forward, their hooks, or have other sizes"
    )


@pytest.mark.usefixtures("emulated")
@pytest.mark.full
def test_a_run_learns_and_its_checkpoint_is_any_precisions(tmp_path):
    curves = {}
    names = {}
    for name in ("bf16", "fp8"):
        spec = make(
            tmp_path,
            name=name,
            task="tests.unit.test_torchao:Wide",
            precision=name,
            compile="default",
        )
        result = run_local(spec)
        assert result.status == "done"
        curves[name] = losses(spec)
        names[name] = {
            key: one.dtype
            for key, one in whole_state(spec.uri, 30)["model"].items()
        }
    assert names["fp8"] == names["bf16"]
    assert curves["fp8"] != curves["bf16"]
    assert sum(curves["fp8"][-10:]) == pytest.approx(
        sum(curves["bf16"][-10:]), rel=0.2
    )


@pytest.mark.parametrize(
    ("capability", "able"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)],
)
def test_it_needs_ada_or_hopper(capability, able, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    if able:
        spec = resolve_precision("fp8", CUDA)
        assert (spec.autocast, spec.scaler, spec.parameters, spec.float8) == (
            torch.bfloat16,
            False,
            None,
            True,
        )
    else:
        with pytest.raises(ConfigError, match="is not supported on a card"):
            resolve_precision("fp8", CUDA)


@pytest.mark.parametrize(
    "name",
    [
        "adamw8bit",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("adamw4bit", "adamwfp8")
        ),
    ],
)
def test_narrow_moments_learn_and_a_run_that_is_cut_goes_on_to_the_bit(
    name, tmp_path, monkeypatch
):
    """Their steps are traced as ever, and run as they are: no code is generated."""
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )
    task = {
        "task": "tests.unit.test_torchao:Convolved",
        "optimizer__name": name,
        "channels_last": True,
    }
    whole = make(tmp_path, name="whole", **task)
    assert run_local(whole).status == "done"
    curve = losses(whole)
    assert sum(curve[-5:]) < sum(curve[:5])
    moments = whole_state(whole.uri, 30)["optimizer"]["state"][0]["exp_avg"]
    assert moments["codes"].dtype is (
        torch.float8_e4m3fn if name == "adamwfp8" else torch.uint8
    )
    cut = {
        "fail_at": [17],
        "failure": "raise",
        "marker": str(tmp_path / "cut"),
    }
    with pytest.raises(ValueError, match="injected"):
        run_local(make(tmp_path, name="cut", task_args=cut, **task))
    again = make(tmp_path, name="cut", task_args=cut, **task)
    assert run_local(again).status == "done"
    assert losses(again) == curve


@pytest.mark.parametrize("name", ["fp8", *NARROW])
def test_without_torchao_it_says_how_to_get_it(name, monkeypatch):
    for module in ("torchao.float8", "torchao.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    layer = nn.Linear(16, 16)
    field = "precision" if name == "fp8" else "optimizer.name"
    with error_of(field, "`pip install torchao`"):
        TABLE[name].convert_model(layer) if name == "fp8" else narrow_adamw(
            name, layer.parameters(), {"lr": 0.1}
        )
