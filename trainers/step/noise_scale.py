"""The gradient noise scale, from gradients that training has anyway: how much a larger batch would still help.

McCandlish et al. 2018 (arXiv 1812.06162): the gradient of b samples has E|g_b|^2 = |G|^2 + tr(Sigma) / b, with G the
true gradient and Sigma the covariance of one sample's. Their appendix A.1 solves for both from two batch sizes. Here
the large batch is the step's, B, and the small ones are pieces of it: what single ranks or microbatches contribute.
A piece has the weight w (its share of B) and contributes w * g_wB. With S = |g_B|^2 and, over the pieces that were
measured, P = sum |w g|^2, W = sum w and Q = sum w^2:

    E[W S - P]       = (W - Q) |G|^2
    E[B (P - Q S)]   = (W - Q) tr(Sigma)

Any pieces do that were not picked by their gradient, except the whole batch as one: W = Q = 1 says nothing.

Both left sides are linear in what one rank has measured: each rank adds up its own, and one sum over ranks a window is
the only collective and the only wait. The noise scale tr(Sigma) / |G|^2 is the ratio of the two sums: an average of
single steps' ratios would be biased, their denominators being often near zero and even negative.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import covariance, fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainers.config import TrainConfig
from trainers.devices.group import Group
from trainers.measure.step_times import student_t95
from trainers.model.gradient_hooks import Hook, all_reduced
from trainers.model.sharding import is_sharded

logger = logging.getLogger(__name__)

_RECENT_WINDOWS = 20
_HALVES_EVERY_STEPS = 20  # a split step costs at most as much as two, so training slows by at most 5 %


@dataclass(frozen=True)
class Window:
    """Sums over the measured steps of one stretch of training, and over all ranks."""

    signal: float
    """Sum of W S - P: `weight` x |G|^2 in expectation."""
    noise: float
    """Sum of B (P - Q S): `weight` x tr(Sigma) in expectation."""
    weight: float
    """Sum of W - Q."""


@dataclass(frozen=True)
class NoiseEstimate:
    """The gradient noise scale with its 95 % confidence interval, in samples."""

    noise_scale: float
    """tr(Sigma) / |G|^2; inf when the gradient cannot be distinguished from noise."""
    low: float
    high: float
    """inf where the data allow any larger value."""


class NoiseScale:
    """Takes its measurements inside the step, every `every_steps`-th one, without waiting for the device.

    With microbatches, the piece is each rank's first: its gradient stands in `.grad` before the second is added, so
    a measurement costs one norm and no memory. With one microbatch on each of several DDP ranks, the pieces are the
    ranks' own gradients, which only a communication hook sees: register `hook()`. With one microbatch of one worker
    every `halves_every_steps`-th step may be taken as two halves, which is the same step but for rounding. Steps that
    are captured as CUDA graphs need `every_steps` 1: a replay repeats the measurement that was captured, or none.
    """

    def __init__(self, group: Group, every_steps: int = 10, halves_every_steps: int = 0) -> None:
        self.group, self.every_steps, self.halves_every_steps = group, every_steps, halves_every_steps
        self.windows: list[Window] = []
        self._exact = torch.float32 if group.device.type == "mps" else torch.float64
        self._sums = torch.zeros(3, dtype=self._exact, device=group.device)
        self._square = torch.zeros((), dtype=self._exact, device=group.device)
        self._share: float | Tensor = 0.0
        self._scale: Tensor | None = None
        self._hooked = self._on = self._first = False
        self._steps = 0

    def begin(self, shares: Sequence[float | Tensor], scale: Tensor | None = None) -> None:
        """Begin a step, in which this rank's microbatches have these shares of the global weight.

        `scale` is the loss scale of this step, on the device: what `GradScaler.scale(ones)` gives.
        """
        split = len(shares) > 1
        self._on = (split or self._hooked) and self._steps % self.every_steps == 0
        self._first = self._on and split and not self._hooked
        self._steps += 1
        if self._on:
            self._square.zero_()
            self._scale = scale
            self._share = sum(shares) if self._hooked else shares[0]

    def microbatch_size(self, step: int, size: int) -> int:
        """Return the size for step number `step`, in a run whose microbatches have `size` samples."""
        halved = self.halves_every_steps and step % self.halves_every_steps == 0
        return -(-size // 2) if halved else size

    def first(self, gradients: Sequence[Tensor]) -> None:
        """Measure the first microbatch's gradients, where they are the piece, before anything is added to them."""
        if self._first and gradients:
            self._square += self._squared(gradients)

    def end(self, gradients: Sequence[Tensor], step_samples: int) -> None:
        """Measure a step's complete gradients: of `step_samples`, averaged over ranks, unscaled, not clipped yet."""
        if not self._on or not gradients:
            return
        self._on = False
        square = self._squared(gradients)
        # Before that, backward has multiplied the loss by the number of ranks, because DDP averages.
        piece = self._square / self.group.world_size**2
        if self._scale is not None:
            piece = piece / self._scale.to(self._exact).square()
        share = self._share
        if not isinstance(share, Tensor):
            share = self._sums.new_full((), share)  # filled on the device: a copy from the host would wait
        measured = (share > 0) & torch.isfinite(square) & torch.isfinite(piece)  # an fp16 step that is skipped is none
        row = [share * square - piece, step_samples * (piece - share**2 * square), share - share**2]
        self._sums += torch.where(measured, torch.stack(row), 0.0)

    def _squared(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the squared norm; of half-precision gradients in float32: their own norm has three digits."""
        if all(gradient.dtype in (torch.float32, torch.float64) for gradient in gradients):
            return get_total_norm(gradients).to(self._exact).square()
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        return torch.stack(norms).to(self._exact).square().sum()

    def recent(self) -> dict[str, float]:
        """Return the noise scale of the newest windows for the log, where there is any signal in them."""
        found = estimate(self.windows[-_RECENT_WINDOWS:])
        return {"noise_scale": max(0.0, found.noise_scale)} if found and math.isfinite(found.noise_scale) else {}

    def figures(self) -> dict[str, float | None] | None:
        """Return the noise scale of the whole run with its interval; None stands for infinity, for strict JSON."""
        found = estimate(self.windows)
        if found is None:
            return None
        named = {"value": max(0.0, found.noise_scale), "low": found.low, "high": found.high}
        return {name: value if math.isfinite(value) else None for name, value in named.items()}

    def hook(self, inner: Hook | None = None) -> Hook:
        """Return a DDP communication hook that measures each bucket before `inner` averages it over ranks.

        Without `inner` the average is DDP's own, to the last bit.
        """
        self._hooked = True
        average = inner or all_reduced

        def look(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            if self._on:
                self._square += self._squared([bucket.buffer()])
            return average(state, bucket)

        look.__annotations__.clear()  # DDP compares them with types, and here they are text
        return look

    def take(self) -> None:
        """Close a window: one small sum over ranks. Waits; every rank must call it, between two steps."""
        signal, noise, weight = self.group.sum(self._sums).tolist()
        self._sums.zero_()
        if weight > 0:
            self.windows.append(Window(signal, noise, weight))


def noise_scale(config: TrainConfig, group: Group, model: nn.Module, accumulation: int) -> NoiseScale | None:
    """Return what `noise_scale: true` asks for; None, with a warning, where there is nothing to measure."""
    if not config.noise_scale:
        return None
    if is_sharded(model):
        reason = "strategy fsdp averages gradients before a hook can read them"
    elif group.world_size > 1 or accumulation > 1:
        return NoiseScale(group, 1 if config.cuda_graphs else 10)
    elif config.compile != "off" or config.cuda_graphs:
        reason = "one microbatch of one worker has no pieces, and halves would be compiled or captured anew"
    elif any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        reason = "one microbatch of one worker has no pieces, and halves would change BatchNorm's statistics"
    else:
        return NoiseScale(group, 1, _HALVES_EVERY_STEPS)
    logger.warning("no gradient noise scale: %s", reason)
    return None


def estimate(windows: Sequence[Window]) -> NoiseEstimate | None:
    """Estimate the noise scale over windows as the ratio of means; None without windows.

    The interval is Fieller's (1954) for a ratio of means, from the spread of the windows.
    """
    n = len(windows)
    if n == 0:
        return None
    signals, noises = [window.signal for window in windows], [window.noise for window in windows]
    signal, noise = fmean(signals), fmean(noises)
    value = noise / signal if signal > 0 else math.inf
    if n <= 2:
        return NoiseEstimate(value, 0.0, math.inf)
    # The inverse of the interval of signal / noise, whose denominator is far from 0.
    t2 = student_t95(n - 1) ** 2 / n
    a = noise * noise - t2 * covariance(noises, noises)
    if a <= 0:
        return NoiseEstimate(value, 0.0, math.inf)
    b = signal * noise - t2 * covariance(signals, noises)
    c = signal * signal - t2 * covariance(signals, signals)
    root = math.sqrt(max(0.0, b * b - a * c))
    least, most = (b - root) / a, (b + root) / a
    return NoiseEstimate(value, 1 / most if most > 0 else math.inf, 1 / least if least > 0 else math.inf)
