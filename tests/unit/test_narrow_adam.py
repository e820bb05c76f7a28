"""`optimizer.state`: moments in bfloat16 or 8 bits take less memory, and the loop's promises stay."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import Adam, AdamW, Optimizer

from tests.specs import evaluations, losses, make
from tests.tasks import Blobs
from tests.unit.test_loop import Context, Power
from tests.unit.test_memory_forecast import forecaster
from tests.unit.test_optim import config
from tests.unit.test_step import Regression, make_step, run_step
from tests.unit.test_step_costs import Costs
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import ConfigError
from trainers.launch.local import run_local
from trainers.loop.fit import fit
from trainers.model import narrow_adam
from trainers.model.narrow_adam import NarrowAdam
from trainers.model.optimizer import build_optimizer
from trainers.storage import Storage
from tune.config import may_change

torch.set_num_threads(1)
FORMATS = ["bf16", "8bit"]
WIDTH = 96


class Wide(Blobs):
    """One parameter that 8 bits are for, and some that are too small."""

    def model(self) -> nn.Module:
        return network(self.features, 4)


def network(inputs: int = 4, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)
    )


def data(step: int, samples: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(samples, 4, generator=generator)
    return rows, rows.sum(1).sin()


def curve(optimizer: Callable[[Any], Optimizer], steps: int = 300) -> tuple[list[float], nn.Module, Optimizer]:
    net = network()
    made = optimizer(net.parameters())
    step = make_step(net, Regression(), made)
    found = []
    for number in range(steps):
        run_step(step, data(number), [24])
        found.append(step.take_loss())
    return found, net, made


def narrow(state: str, decoupled: bool = True, compiled: bool = False, **options: Any) -> Callable[[Any], NarrowAdam]:
    options = {"lr": 0.003, "weight_decay": 0.1, "fused": True, **options}
    return lambda parameters: NarrowAdam(parameters, state, compiled, decoupled_weight_decay=decoupled, **options)


@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_curve_is_that_of_wide_moments_but_for_their_rounding(kind: type[Adam], state: str) -> None:
    expected, _, wide = curve(lambda parameters: kind(parameters, lr=0.003, weight_decay=0.1, fused=True))
    found, _, made = curve(narrow(state, decoupled=kind is AdamW))
    assert expected[0] == found[0]
    assert sum(found[-50:]) == pytest.approx(sum(expected[-50:]), rel=0.05)
    assert found != expected
    assert kept_bytes(made) < {"bf16": 0.51, "8bit": 0.35}[state] * kept_bytes(wide)


def kept_bytes(optimizer: Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_8_bits_are_those_of_torchao(name: str) -> None:
    """The same weights, codes and scales after each of 40 steps, to the last bit."""
    ours, theirs = network(), network()
    mine = build_optimizer(ours, config({"name": name, "state": "8bit", "weight_decay": 0.1}))
    kind = {"adam": torchao.optim.Adam8bit, "adamw": torchao.optim.AdamW8bit}[name]
    other = kind(theirs.parameters(), lr=0.1, weight_decay=0.1)
    assert type(mine) is NarrowAdam
    with torch.compiler.set_stance("force_eager"):
        for number in range(40):
            for net, optimizer in ((ours, mine), (theirs, other)):
                rows, wanted = data(number)
                net.zero_grad()
                (net(rows).squeeze(1) - wanted).square().mean().backward()
                optimizer.step()
            for (key, parameter), twin in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert torch.equal(parameter, twin), (number, key)
    in_bytes = 0
    for parameter, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
        state, reference = mine.state[parameter], other.state[twin]
        for moment in ("exp_avg", "exp_avg_sq"):
            if state[moment].dtype is torch.uint8:
                in_bytes += 1
                assert torch.equal(state[moment], reference[moment].codes)
                assert torch.equal(state[f"{moment}_scale"], reference[moment].scale)
    assert in_bytes == 2, "both moments of the one parameter that is large enough"


def second_moments(make: Callable[[Any], Optimizer], steps: int = 4000) -> Tensor:
    """What is left of the second moment of one large gradient among small ones, for each of 64 parameters."""
    parameter = nn.Parameter(torch.zeros(64))
    optimizer = make([parameter])
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        parameter.grad = torch.randn(64, generator=generator) * (10.0 if number == 0 else 0.1)
        optimizer.step()
    found: Tensor = optimizer.state[parameter]["exp_avg_sq"].float()
    return found


def test_a_second_moment_in_bf16_falls_again() -> None:
    """Rounded to the nearest, it stays where the one large gradient has put it."""
    exact, found = second_moments(Adam), second_moments(narrow("bf16"))
    assert float((found / exact).log().abs().max()) < 0.1
    stuck = torch.full((), 4.0).bfloat16()
    for _ in range(4000):
        stuck = (stuck.float() * 0.999).bfloat16()
    assert float(stuck) == 4.0


def moments(optimizer: Optimizer) -> list[Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("state", FORMATS)
def test_a_step_that_is_not_finite_changes_nothing(state: str, precision: str) -> None:
    net = network()
    optimizer = narrow(state)(net.parameters())
    step = make_step(net, Regression(), optimizer, precision)
    if precision == "fp16":
        step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for number in range(5):
        run_step(step, data(number), [24])
    before = [*moments(optimizer), *(parameter.clone() for parameter in net.parameters())]
    rows, wanted = data(9)
    run_step(step, (rows, torch.full_like(wanted, float("inf"))), [24])
    after = [*moments(optimizer), *net.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    if precision == "fp32":
        assert bool(step.bad)
    else:
        run_step(step, data(10), [24])
        assert not torch.equal(net[0].weight, before[len(moments(optimizer))])  # type: ignore[index]


@pytest.mark.parametrize("state", FORMATS)
def test_a_step_reads_no_value_of_the_device(state: str) -> None:
    net = network()
    step = make_step(net, Regression(), narrow(state)(net.parameters()))
    run_step(step, data(0), [24])
    costs = Costs()
    with costs:
        run_step(step, data(1), [24])
    assert costs.reads == []


@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("more", [{}, {"precision": "bf16-pure"}, {"precision": "fp16"}, {"ema": {"decay": 0.9}}])
def test_a_run_goes_on_to_the_last_bit(state: str, more: dict[str, Any], tmp_path: Path) -> None:
    task = "tests.unit.test_narrow_adam:Wide"
    whole, cut = (make(tmp_path, name=name, task=task, optimizer__state=state, **more) for name in ("whole", "cut"))
    run_local(whole)
    with pytest.raises(Power):
        fit(cut.load_task(), cut.config, Context(Path(Storage(cut.storage.uri).uri), cut_at_step=20))
    run_local(cut)
    assert losses(cut) == losses(whole)
    assert len(losses(whole)) == 30
    assert evaluations(cut) == evaluations(whole)


def test_the_formats_learn_apart_from_each_other(tmp_path: Path) -> None:
    curves = []
    for state in ("fp32", *FORMATS):
        spec = make(tmp_path, name=state, task="tests.unit.test_narrow_adam:Wide", optimizer__state=state)
        run_local(spec)
        curves.append(losses(spec))
    assert curves[0] != curves[1] != curves[2] != curves[0]
    assert curves[1] == pytest.approx(curves[0], rel=0.1, abs=0.02)
    assert curves[2] == pytest.approx(curves[0], rel=0.1, abs=0.02)


def test_fp32_is_what_a_run_without_the_key_is(tmp_path: Path) -> None:
    assert make(tmp_path, optimizer__state="fp32").tree == make(tmp_path).tree
    assert type(build_optimizer(network(), config({"state": "fp32"}))) is AdamW


def test_a_state_of_another_format_is_none_of_this_optimizer() -> None:
    _, _, wide = curve(lambda parameters: AdamW(parameters, lr=0.003, fused=True), 2)
    _, _, made = curve(narrow("8bit"), 2)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 2 is torch.float32"):
        made.load_state_dict(wide.state_dict())
    short = copy.deepcopy(made.state_dict())
    short["state"][2]["exp_avg_scale"] = short["state"][2]["exp_avg_scale"][:1]
    with pytest.raises(ValueError, match="exp_avg_scale of parameter 2"):
        made.load_state_dict(short)


def test_blocks_do_not_depend_on_how_a_parameter_lies_in_memory() -> None:
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(16, 16, 4, 4).contiguous(memory_format=layout))
        optimizer = narrow("8bit")([weight])
        for number in range(5):
            torch.manual_seed(number)
            weight.grad = torch.randn(16, 16, 4, 4).contiguous(memory_format=layout)
            optimizer.step()
        found.append((weight.detach(), optimizer.state[weight]["exp_avg"]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert found[1][1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("state", FORMATS)
def test_what_a_rank_draws_does_not_matter(state: str) -> None:
    """Replicas stay equal, and dropout masks are those of wide moments."""
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        parameter = nn.Parameter(torch.ones(64, 64))
        optimizer = narrow(state)([parameter])
        for number in range(5):
            parameter.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        found.append([parameter.detach(), *moments(optimizer)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("shape", [(), (3,), (70, 12), (300, 256), (64, 16, 3, 3)], ids=str)
def test_slices_make_the_step_of_the_whole(shape: tuple[int, ...], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1 << 22, 500):
        monkeypatch.setattr(narrow_adam, "_SLICE", size)
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(shape))
        optimizer = narrow(state)([parameter])
        for _ in range(5):
            parameter.grad = torch.randn(shape)
            optimizer.step()
        found.append([parameter.detach(), *moments(optimizer)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("state", FORMATS)
def test_compiled_steps_are_those_of_the_same_code(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph a shape, however many shapes, and for any learning rate and betas."""
    backend = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    layers = nn.ModuleList([*(nn.Linear(width, 1) for width in range(64, 74)), nn.Linear(WIDTH, WIDTH)])
    found = []
    for compiled in (False, True):
        model = copy.deepcopy(layers)
        optimizer = narrow(state, compiled=compiled)(model.parameters())
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            optimizer.param_groups[0]["betas"] = (0.9 - number / 100, 0.999)
            for seed, parameter in enumerate(model.parameters()):
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        found.append([*model.parameters(), *moments(optimizer)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert backend.frame_count == len({parameter.shape for parameter in model.parameters()})


@pytest.mark.parametrize(("state", "share"), [("bf16", 0.5), ("8bit", 0.255)])
def test_the_forecast_counts_the_smaller_state(state: str, share: float, tmp_path: Path) -> None:
    wide, _ = forecaster(tmp_path, "Huge")
    small, _ = forecaster(tmp_path, "Huge", optimizer__state=state, compile="default")
    assert small(8).optimizer == pytest.approx(share * wide(8).optimizer, rel=0.01)
    assert small(8).peak < wide(8).peak


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"lr": 0.1, "name": "sgd", "state": "bf16"}}, "has no effect with optimizer sgd"),
        ({"optimizer": {"lr": 0.1, "state": "8bit"}, "strategy": "fsdp"}, "has blocks that shards would cut"),
        ({"optimizer": {"lr": 0.1, "state": "4bit"}}, "'fp32', 'bf16' or '8bit'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    tree = {"task": "t:T", "epochs": 1, "global_batch_size": 64}
    with pytest.raises(ConfigError, match=r"optimizer\.state") as raised:
        build(TrainConfig, tree | changes, "f")
    assert words in str(raised.value)
    assert not may_change("optimizer.state"), "in mid-run"


def test_parameters_that_float32_does_not_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is for parameters that float32 holds, and the model has torch.float64"):
        build_optimizer(network().double(), config({"state": "bf16"}))
