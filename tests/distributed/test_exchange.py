"""Small gradients go to every rank directly: the same average as an all-reduce gives, the same bits on every rank."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.processes import run_processes
from trainers.model.gradient_hooks import exchanged

WIDTHS = {"small": [5, 7, 3], "large": [5, 300, 900, 3]}


def gradients(rank: int, hook: Any, widths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of three steps, each with a batch of the rank's own."""
    torch.manual_seed(0)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(dtype), gradient_as_bucket_view=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model.zero_grad()
        model(torch.randn(4, widths[0], generator=generator).to(dtype)).sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Whether the exchange gives DDP's own bits, the largest difference, and this rank's bits."""
    answer: dict[str, Any] = {}
    for name, widths in WIDTHS.items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            own = gradients(rank, None, widths, dtype)
            hook = exchanged(rank, world_size)
            found = gradients(rank, hook, widths, dtype)
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, own, strict=True))
            same = all(torch.equal(a, b) for a, b in zip(found, own, strict=True))
            answer[f"{name} {dtype}"] = (same, off, [tensor.float().numpy().tobytes() for tensor in found])
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_average_is_that_of_an_all_reduce(world_size: int, tmp_path: Path) -> None:
    found = run_processes(world_size, compare, tmp_path)
    for case in found[0]:
        assert len({tuple(answer[case][2]) for answer in found}) == 1, f"{case}: ranks differ"
        same, off, _ = found[0][case]
        if world_size == 2 or case.startswith("large"):
            assert same, case
        assert off <= {"float32": 1e-5, "float64": 1e-14, "bfloat16": 0.05}[case.rpartition(".")[2]], case
