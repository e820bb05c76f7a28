"""The roofline of a step: each operator by hand, and a whole step of the product's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import ladder
from benchmarks.roofline import Ceiling, Operators, bandwidth, ceiling, lowest, rates
from benchmarks.runs import Runs, matmul_flops

CPU = torch.device("cpu")
RATE, BYTES_S = 1e6, 1e3


def counted(operators: Operators, rate: float = RATE) -> Ceiling:
    return lowest(operators.found, {torch.float32: rate}, BYTES_S)


def test_a_product_takes_its_flops_or_its_bytes() -> None:
    for rate, expected in ((10.0, 2 * 4 * 5 * 6 / 10.0), (1e12, 4 * (4 * 5 + 5 * 6 + 4 * 6) / BYTES_S)):
        left, right, operators = torch.ones(4, 5), torch.ones(5, 6), Operators()
        with operators:
            left.new_empty(4, 5)  # makes no value
            left @ right
        found = counted(operators, rate)
        assert found.eager_s == found.fused_s == pytest.approx(expected)


def test_views_are_free_and_what_is_changed_is_read_and_written() -> None:
    values, other, operators = torch.ones(8, 10), torch.ones(10), Operators()
    with operators:
        values.t()[2:].view(-1, 8)
        assert not operators.found
        values.add_(other.expand(8, 10))
    found = counted(operators)
    assert found.eager_s == pytest.approx((320 + 40 + 320) / BYTES_S)  # an expanded tensor has its own ten numbers
    assert found.fused_s == 0


def test_the_optimizer_counts_for_compiled_steps_too() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    with Operators() as operators:
        optimizer.step()
    found = counted(operators)
    # Reads parameter, gradient, two moments and a step; writes all but the gradient.
    assert found.fused_s == pytest.approx((4 * 4000 + 4 + 3 * 4000) / BYTES_S, rel=0.3)
    assert found.fused_s <= found.eager_s


def test_tf32_has_a_peak_of_its_own() -> None:
    matmuls = {"fp32": 1.0, "tf32": 8.0, "bf16": 16.0}
    assert rates("tf32", CPU, matmuls) == {torch.float32: 8.0, torch.bfloat16: 16.0}
    assert rates("bf16", CPU, matmuls) == {torch.float32: 1.0, torch.bfloat16: 16.0}


@pytest.mark.parametrize("name", ladder.SMALL)
def test_a_step_of_the_product_has_a_ceiling(name: str) -> None:
    torch.set_num_threads(1)
    runs = Runs(ladder.SMALL[name], CPU)
    peaks = rates("fp32", CPU, {"fp32": matmul_flops("fp32", CPU, 64)})
    found = ceiling(runs, {"precision": "fp32"}, peaks, bandwidth(CPU, 1 << 20, 3))
    assert 0 < found.fused_s <= found.eager_s
    # Three times the forward pass's products, at the peak: no ceiling is below it.
    narrow = ceiling(runs, {"precision": "fp32"}, peaks, 1e30)
    assert narrow.eager_s == pytest.approx(narrow.fused_s)
    assert narrow.fused_s < found.fused_s
