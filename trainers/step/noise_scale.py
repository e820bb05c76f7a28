"""Estimate the gradient noise scale from gradients that training has anyway.

It says how much a larger batch would still help.

McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1): the gradient of b samples has
E|g_b|^2 = |G|^2 + tr(Sigma) / b, so two batch sizes give |G|^2 and tr(Sigma), and the
noise scale is their ratio. Here the large batch is the step's, and the small one is
what this rank contributes to it, as DDP's hook sees it, or its first microbatch. Both
terms are averaged over steps and ranks before they are divided: a mean of single steps'
ratios would be biased.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainers.devices.device import to_host
from trainers.devices.group import Group
from trainers.model.gradient_hooks import Hook, all_reduced

EVERY_STEPS = 10
"""Steps between two that are measured, at the cost of two norms each."""
_KEPT = 0.9
"""What the averages keep of themselves from one window of the log to the next."""


class NoiseScale:
    """Takes its measurements inside the step, without waiting for the device."""

    def __init__(self, group: Group) -> None:
        exact = torch.float32 if group.device.type == "mps" else torch.float64
        self._group = group
        self._sums = torch.zeros(2, dtype=exact, device=group.device)
        """Of |G|^2 and tr(Sigma), over the steps that were measured since the last
        window.
        """
        self._signal = self._trace = 0.0
        self._small = torch.zeros((), dtype=exact, device=group.device)
        """The squared norm of what the small batch has contributed to this step."""
        self._share: float | Tensor = 0.0
        self._hooked = self._on = False
        self._steps = 0

    def begin(self, shares: Sequence[float | Tensor]) -> None:
        """Begin a step, with this rank's microbatches' shares of the global weight."""
        # A short step may have one microbatch on each rank, whose gradient is the whole
        # step's after DDP's average.
        is_part = self._hooked or len(shares) > 1
        self._on = is_part and self._steps % EVERY_STEPS == 0
        self._steps += 1
        self._small.zero_()
        self._share = sum(shares) if self._hooked else shares[0]

    def first(self, gradients: Sequence[Tensor]) -> None:
        """Measure the first microbatch's gradients before anything is added to them."""
        if self._on and not self._hooked:
            self._add(gradients)

    def contributed(self, gradients: Sequence[Tensor]) -> None:
        """Measure what this rank contributes, where no hook of DDP's sees it."""
        if self._on and self._hooked:
            self._add(gradients)

    def end(
        self, gradients: Sequence[Tensor], step_samples: int, scale: float | Tensor
    ) -> None:
        """Measure a step's gradients, averaged over ranks, unscaled, not clipped.

        They are of `step_samples`.

        `scale` is what the loss was multiplied by against underflow.
        """
        if not self._on:
            return
        self._on = False
        share = self._share
        if not isinstance(share, Tensor):
            share = self._sums.new_full(
                (), share
            )  # filled on the device: a copy from the host would wait
        samples = share * step_samples
        small = (
            self._small / (share * scale * self._group.world_size).square()
        )  # DDP averages: hence the world size
        large = self._squared(gradients)
        signal = (step_samples * large - samples * small) / (step_samples - samples)
        trace = (small - large) / (1 / samples - 1 / step_samples)
        found = torch.stack([signal, trace])
        self._sums += torch.where(
            torch.isfinite(found).all(), found, 0.0
        )  # a rank may have nothing in a step, or all

    def hook(self, inner: Hook | None = None) -> Hook:
        """Return a DDP hook that measures each bucket before `inner` averages it.

        `inner` is DDP's own by default.
        """
        self._hooked = True
        average = inner or all_reduced

        def look(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
            if self._on:
                self._add([bucket.buffer()])
            return average(state, bucket)

        # DDP compares them with types, and here they are text
        look.__annotations__.clear()
        return look

    def take(self) -> Callable[[], float | None]:
        """End a window, between two steps.

        What is returned waits for its noise scale in samples, of the newest windows
        mostly; None where noise hides the gradient. Every rank must call both, in the
        order of windows.
        """
        read = to_host(self._group.sum(self._sums))
        self._sums.zero_()

        def scale() -> float | None:
            signal, trace = read()
            self._signal = _KEPT * self._signal + signal
            self._trace = _KEPT * self._trace + trace
            return (
                self._trace / self._signal
                if self._signal > 0 and self._trace > 0
                else None
            )

        return scale

    def _add(self, gradients: Sequence[Tensor]) -> None:
        self._small += self._squared(gradients)

    def _squared(self, gradients: Sequence[Tensor]) -> Tensor:
        # In float32: a half-precision gradient's own norm has three digits.
        norms = [
            torch.linalg.vector_norm(gradient, dtype=self._wide(gradient))
            for gradient in gradients
        ]
        return torch.stack(norms).to(self._small).square().sum()

    def _wide(self, gradient: Tensor) -> torch.dtype:
        return torch.promote_types(gradient.dtype, torch.float32)
