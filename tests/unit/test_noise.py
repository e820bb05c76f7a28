"""The gradient noise scale against linear regression, where it is known, for every way to split a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.processes import run_processes
from trainers.devices.group import Group
from trainers.measure.step_times import student_t95
from trainers.step.noise_scale import NoiseEstimate, NoiseScale, Window, estimate

torch.set_num_threads(1)
CPU = torch.device("cpu")
WIDTH = 20
SIGMA = 1.5
# y = x . theta + SIGMA * e with normal x and e, at the distance delta from theta, |delta| = 1, has the loss
# (x . delta - SIGMA e)^2. One sample's gradient is 2 x (x . delta - SIGMA e), so G = 2 delta and
GRADIENT_SQUARE = 4.0
TRACE = 4.0 * ((WIDTH + 1) + WIDTH * SIGMA**2)
NOISE_SCALE = TRACE / GRADIENT_SQUARE  # 66 samples


def model_and_data() -> tuple[nn.Linear, Callable[[int], tuple[Tensor, Tensor]]]:
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1 / math.sqrt(WIDTH))  # this is delta: the target is the noise alone
    generator = torch.Generator().manual_seed(3)

    def draw(samples: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        return inputs, SIGMA * torch.randn(samples, 1, generator=generator, dtype=torch.float64)

    return model, draw


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def train_step(
    noise: NoiseScale, model: nn.Module, parts: list[tuple[Tensor, Tensor]], step_samples: int, scale: float = 1.0
) -> None:
    """What the training step does, and where it calls the estimator."""
    model.zero_grad(set_to_none=True)
    shares = [len(part[0]) / step_samples for part in parts]
    noise.begin(shares, torch.tensor(scale) if scale != 1.0 else None)
    last = len(parts) - 1
    for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
        with model.no_sync() if isinstance(model, DistributedDataParallel) and index < last else torch.enable_grad():
            (loss_of(model, part) * (share * noise.group.world_size * scale)).backward()
        if index == 0:
            noise.first(gradients(model))
    with torch.no_grad():
        for gradient in gradients(model):
            gradient.div_(scale)
    noise.end(gradients(model), step_samples)


def check(found: NoiseEstimate, rel: float) -> None:
    """It is near the truth, by its own interval (doubled: one run of 20 is outside of a single one) and by ours."""
    half = (found.high - found.low) / 2
    assert half < rel * NOISE_SCALE
    assert abs(found.noise_scale - NOISE_SCALE) < 2 * half


def measure(sizes: list[int], steps: int = 1500, window: int = 75) -> NoiseScale:
    model, draw = model_and_data()
    noise = NoiseScale(Group(0, 1, CPU), every_steps=1)
    for step in range(steps):
        train_step(noise, model, [draw(size) for size in sizes], sum(sizes))
        if (step + 1) % window == 0:
            noise.take()
    return noise


@pytest.mark.full
@pytest.mark.parametrize("sizes", [[16, 16], [8] * 4, [24, 8], [8, 24], [30, 2], [1, 31], [2, 3, 5, 7, 15]], ids=str)
def test_every_split_of_a_step_gives_the_analytic_noise_scale(sizes: list[int]) -> None:
    windows = measure(sizes, steps=2000, window=100).windows
    found = estimate(windows)
    assert found is not None
    check(found, rel=0.5)
    weight = sum(window.weight for window in windows)
    assert sum(window.noise for window in windows) / weight == pytest.approx(TRACE, rel=0.1)
    assert sum(window.signal for window in windows) / weight == pytest.approx(GRADIENT_SQUARE, rel=0.3)
    assert len(windows) == 20


def test_steps_of_different_sizes_and_splits_add_up() -> None:
    model, draw = model_and_data()
    noise = NoiseScale(Group(0, 1, CPU), every_steps=1)
    for step in range(1500):
        sizes = [[16, 16], [30, 12, 6], [20, 12], [9]][step % 4]  # the last one says nothing
        train_step(noise, model, [draw(size) for size in sizes], sum(sizes))
        if step % 75 == 74:
            noise.take()
    found = estimate(noise.windows)
    assert found is not None
    check(found, rel=0.35)


def test_the_mean_of_single_ratios_would_be_wrong() -> None:
    """Why sums are kept: at batch 32 a step's own ratio has a denominator near zero, as often negative as not."""
    model, draw = model_and_data()
    noise = NoiseScale(Group(0, 1, CPU), every_steps=1)
    for _ in range(500):
        train_step(noise, model, [draw(16), draw(16)], 32)
        noise.take()
    single = sum(window.noise / window.signal for window in noise.windows) / len(noise.windows)
    found = estimate(noise.windows)
    assert found is not None
    assert abs(found.noise_scale / NOISE_SCALE - 1) < 0.3
    assert abs(single / NOISE_SCALE - 1) > 0.5


def test_one_microbatch_on_one_worker_says_nothing() -> None:
    noise = measure([32], steps=20, window=5)
    assert noise.windows == []
    assert estimate(noise.windows) is None


def test_only_every_nth_step_is_measured() -> None:
    model, draw = model_and_data()
    noise = NoiseScale(Group(0, 1, CPU), every_steps=4)
    changed = []
    for _ in range(12):
        before = noise._sums.clone()
        train_step(noise, model, [draw(4), draw(4)], 8)
        changed.append(not torch.equal(before, noise._sums))
    assert changed == [True, False, False, False] * 3


def test_the_loss_scale_does_not_count_and_a_skipped_step_neither() -> None:
    sums = []
    for scale in (1.0, 2.0**12):
        model, draw = model_and_data()
        noise = NoiseScale(Group(0, 1, CPU), every_steps=1)
        for _ in range(5):
            train_step(noise, model, [draw(4), draw(12)], 16, scale)
        sums.append(noise._sums.clone())
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-9, atol=0)
    bad = (torch.full((4, WIDTH), math.inf, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    for parts in ([bad, draw(4)], [draw(4), bad]):
        train_step(noise, model, parts, 8)
        assert torch.equal(noise._sums, sums[1])


def test_half_precision_gradients_are_squared_in_float32() -> None:
    """A bfloat16 norm is off by up to 0.4 %, which the difference of two nearly equal ones does not survive."""
    torch.manual_seed(0)
    first = [torch.randn(1000).bfloat16() for _ in range(3)]
    whole = [gradient + torch.randn(1000).bfloat16() for gradient in first]
    rows = []
    for dtype in (torch.bfloat16, torch.float64):
        noise = NoiseScale(Group(0, 1, CPU), every_steps=1)
        noise.begin([0.5, 0.5])
        noise.first([gradient.to(dtype) for gradient in first])
        noise.end([gradient.to(dtype) for gradient in whole], 8)
        rows.append(noise._sums)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-3)


class _NoWait(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "local_scalar_dense" not in str(function), "this waits for the device"
        return function(*args, **(kwargs or {}))


def test_a_step_never_waits_for_the_device() -> None:
    noise = NoiseScale(Group(0, 1, CPU), every_steps=1)
    values = [torch.randn(5), torch.randn(3)]
    weights = torch.tensor([0.25, 0.75])  # shares of tokens are on the device too
    with _NoWait():
        noise.begin(list(weights), torch.tensor(8.0))
        noise.first(values)
        noise.end(values, 4)
    with pytest.raises(AssertionError, match="waits"), _NoWait():
        float(noise._sums[0])


def drawn(n: int, seed: int, signal: float = 1.0) -> list[Window]:
    rng = random.Random(seed)
    return [Window(rng.gauss(signal, 2.0), rng.gauss(50.0, 5.0), 1.0) for _ in range(n)]


@pytest.mark.parametrize("n", [4, 8, 30])
def test_the_interval_covers_the_truth_in_95_of_100_runs(n: int) -> None:
    covered = 0
    for seed in range(1000):
        found = estimate(drawn(n, seed))
        assert found is not None
        assert found.low <= found.noise_scale <= found.high
        covered += found.low <= 50.0 <= found.high
    assert 920 <= covered <= 975


def test_a_gradient_lost_in_noise_gives_no_upper_end() -> None:
    found = estimate(drawn(10, 1, signal=0.0))
    assert found is not None
    assert found.high == math.inf
    assert found.low > 5
    negative = estimate([Window(-1.0, 50.0, 1.0), Window(-1.2, 51.0, 1.0), Window(-1.1, 49.0, 1.0)])
    assert negative is not None
    assert negative.noise_scale == negative.high == math.inf


def test_two_windows_have_no_interval() -> None:
    found = estimate(drawn(2, 0))
    assert found is not None
    assert (found.low, found.high) == (0.0, math.inf)


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.3027), (4, 2.7764), (10, 2.2281), (60, 2.0003)])
def test_students_quantile(freedom: int, quantile: float) -> None:
    assert student_t95(freedom) == pytest.approx(quantile, rel=0.01)


WAYS = ("none", "hook", "first", "bf16", "plain bf16")
Figures = tuple[list[float], NoiseEstimate | None]


def _ranks(rank: int, world_size: int) -> dict[str, Figures]:
    """All gradients and the estimate of each way, of steps whose ranks have different shares."""
    return {way: _run(rank, world_size, way) for way in WAYS}


def _run(rank: int, world_size: int, way: str) -> Figures:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    bare, draw = model_and_data()
    noise = NoiseScale(Group(rank, world_size, CPU), every_steps=1)
    bare = bare.float()
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    if way in ("hook", "bf16"):
        model.register_comm_hook(None, noise.hook(bf16_compress_hook if way == "bf16" else None))
    elif way == "plain bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-5)  # it hardly moves: the truth stays what it is
    splits = ([[4, 4], [10, 3], [3, 5]] if way == "first" else [[8], [13], [8]])[:world_size]
    total = sum(sum(sizes) for sizes in splits)
    start = sum(sum(sizes) for sizes in splits[:rank])
    own = slice(start, start + sum(splits[rank]))
    seen = []
    for step in range(200):
        inputs, targets = (tensor.float() for tensor in draw(total))
        parts = list(zip(inputs[own].split(splits[rank]), targets[own].split(splits[rank]), strict=True))
        train_step(noise, model, parts, total)
        seen += gradients(bare)[0].flatten().tolist()
        optimizer.step()
        if step % 10 == 9:
            noise.take()
    return seen, estimate(noise.windows)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_are_pieces_and_looking_at_them_changes_no_bit(world_size: int, tmp_path: Path) -> None:
    results: list[dict[str, Figures]] = run_processes(world_size, _ranks, tmp_path)
    for result in results:
        assert result["hook"][0] == result["none"][0]  # 3 ranks: where dividing and multiplying round differently
        assert result["bf16"][0] == result["plain bf16"][0]
        assert result["none"][1] is None
        for way in ("hook", "first", "bf16"):
            found = result[way][1]
            assert found == results[0][way][1]  # every rank says the same
            assert found is not None
            check(found, rel=2.0)
