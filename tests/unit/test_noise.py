"""The gradient noise scale against linear regression, where it is known, over
microbatches and over ranks.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.processes import forked_launcher, run_processes
from tests.specs import losses, make
from trainers.devices.group import Group
from trainers.launch.local import run_local, run_spawn
from trainers.launch.spec import RunSpec
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.step import noise_scale
from trainers.step.noise_scale import NoiseScale

torch.set_num_threads(1)
WIDTH = 20
SIGMA = 1.5
# y = x . theta + SIGMA * e with normal x and e, at the distance delta from theta,
# |delta| = 1, has the loss (x . delta - SIGMA e)^2. One sample's gradient is 2 x (x .
# delta - SIGMA e), so G = 2 delta and
GRADIENT_SQUARE = 4.0
TRACE = 4.0 * ((WIDTH + 1) + WIDTH * SIGMA**2)
NOISE_SCALE = TRACE / GRADIENT_SQUARE  # 66 samples


def measured(
    group: Group, sizes: list[int], scale: float = 1.0, steps: int = 1500
) -> float | None:
    """The noise scale by steps of these microbatches on each rank, as the training step
    calls the estimator.
    """
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(
            1 / math.sqrt(WIDTH)
        )  # this is delta: the target is the noise alone
    noise = NoiseScale(group)
    if group.world_size > 1:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, noise.hook())
    generator = torch.Generator().manual_seed(3 + group.rank)
    total = sum(sizes) * group.world_size
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        shares = [size / total for size in sizes]
        noise.begin(shares)
        for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
            inputs = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
            targets = SIGMA * torch.randn(
                size, 1, generator=generator, dtype=torch.float64
            )
            (
                (model(inputs) - targets).square().mean()
                * (share * group.world_size * scale)
            ).backward()
            if index == 0:
                noise.first([parameter.grad for parameter in model.parameters()])
        with torch.no_grad():
            gradients = [parameter.grad.div_(scale) for parameter in model.parameters()]
        noise.end(gradients, total, scale)
    return noise.take()()


@pytest.fixture(autouse=True)
def _in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_scale, "EVERY_STEPS", 1)


@pytest.mark.parametrize(("sizes", "scale"), [([24, 8, 8], 1.0), ([16, 16], 1024.0)])
def test_microbatches_give_the_analytic_noise_scale(
    sizes: list[int], scale: float
) -> None:
    assert measured(Group(0, 1, torch.device("cpu")), sizes, scale) == pytest.approx(
        NOISE_SCALE, rel=0.2
    )


def on_rank(rank: int, world_size: int) -> float | None:
    noise_scale.EVERY_STEPS = 1
    return measured(Group(rank, world_size, torch.device("cpu")), [16], steps=800)


@pytest.mark.full
def test_ranks_give_it_too_and_agree(tmp_path: Path) -> None:
    first, second = run_processes(2, on_rank, tmp_path)
    assert first == second == pytest.approx(NOISE_SCALE, rel=0.2)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_step_of_one_part_says_nothing(share: float) -> None:
    """Of half a step, too: two ranks with one microbatch each have DDP's average, not
    their own gradient.
    """
    noise = NoiseScale(Group(0, 1, torch.device("cpu")))
    noise.begin([share])
    noise.first([torch.tensor([1.0])])
    noise.end([torch.tensor([1.0])], 8, 1.0)
    assert noise.take()() is None


def test_a_gradient_that_is_not_finite_does_not_count() -> None:
    """By hand: |g_4|^2 = (0.6 / 0.5)^2 and |g_8|^2 = 1 give |G|^2 = 0.56 and tr(Sigma)
    = 3.52.
    """
    noise = NoiseScale(Group(0, 1, torch.device("cpu")))
    for value in (math.inf, 1.0):
        noise.begin([0.5, 0.5])
        noise.first([torch.tensor([0.6 * value])])
        noise.end([torch.tensor([value])], 8, 1.0)
    assert noise.take()() == pytest.approx(3.52 / 0.56)


@pytest.mark.parametrize(
    ("run", "workers", "microbatch"),
    [(run_local, 1, 6), pytest.param(run_spawn, 2, "auto", marks=pytest.mark.full)],
)
def test_a_run_logs_it_and_trains_the_same_bits(
    run: Callable[[RunSpec], RunResult],
    workers: int,
    microbatch: int | str,
    tmp_path: Path,
) -> None:
    options = {"max_steps": 40, "log_every_steps": 20, "microbatch_size": microbatch}
    options |= {
        "scaling__num_workers": workers,
        "launcher": "local" if workers == 1 else "spawn",
    }
    plain = make(tmp_path, name="plain", **options)
    spec = make(tmp_path, name="measured", noise_scale=True, **options)
    with forked_launcher():
        run(plain)
        result = run(spec)
    assert losses(spec) == losses(plain)
    assert result.metrics["noise_scale"] > 0
    assert any("noise_scale" in row for row in read_log(spec.storage))
