"""How fast a device multiplies matrices."""

import time
from collections.abc import Callable

import torch

from trainers.devices.device import synchronize
from trainers.model.precision import TABLE, apply_matmul

_SAMPLE_S = (
    0.02  # a sample shorter than this is repeated: launches and clocks would show
)
_SAMPLES = 7
_BUDGET_S = 1.5  # of one device and format
_TRIES = 3


def matmul_times(
    precision: str, device: torch.device, n: int, sample_s: float = _SAMPLE_S
) -> list[float]:
    """Return the seconds of an n x n by n x n product in each of 3 to 7 samples.

    A CPU multiplies with torch's threads.
    """
    spec = TABLE[precision]
    apply_matmul(spec)
    left, right = torch.randn(2, n, n, device=device).to(spec.autocast or torch.float32)
    out = torch.empty_like(left)
    return measure(
        lambda: torch.mm(left, right, out=out),
        lambda: synchronize(device),
        sample_s=sample_s,
    )


def measure(
    run: Callable[[], object],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
    sample_s: float = _SAMPLE_S,
) -> list[float]:
    """Return the seconds of `run`, which `wait` waits for, in each of 3 to 7 samples.

    A few runs before them warm up.

    A sample has as many runs as take `sample_s` where nothing disturbs them, and so
    takes longer where something does.
    """

    def sample(runs: int) -> float:
        wait()
        began = clock()
        for _ in range(runs):
            run()
        wait()
        return (clock() - began) / runs

    sample(1)
    once_s = max(min(sample(1) for _ in range(_TRIES)), 1e-7)
    runs = max(1, round(sample_s / once_s))
    return [
        sample(runs)
        for _ in range(min(_SAMPLES, max(3, int(_BUDGET_S / (runs * once_s)))))
    ]
