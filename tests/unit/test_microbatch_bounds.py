"""The probe with what other trials know: what is known is not tried, and what was tried is told."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from tests.unit.test_microbatch import CPU, Hungry, Net
from trainers.devices.group import Group
from trainers.model.precision import resolve_precision
from trainers.step.forward import ForwardPass
from trainers.step.microbatch import Probe, choose_microbatch


def choose(
    fits: int, wanted: int | str, bounds: tuple[int | None, int | None]
) -> tuple[int, set[int], list[tuple[int, bool]]]:
    """The size, the sizes that were tried, and what was told."""
    task, model, told = Hungry(fits), Net(), list[tuple[int, bool]]()
    forward = ForwardPass(model, task, resolve_precision("fp32", CPU), CPU)
    probe = Probe(forward, AdamW(model.parameters(), fused=True), task.dataset("train"), Group(0, 1, CPU))
    size = choose_microbatch(wanted, 64, probe, bounds=bounds, tell=lambda size, fits: told.append((size, fits)))
    return size, set(task.tried), told


@pytest.mark.parametrize("fits", [2, 5, 13, 31, 63, 64])
def test_it_lands_where_it_would_without(fits: int) -> None:
    size, tried, told = choose(fits, "auto", (None, None))
    assert {one for one, _ in told} == tried
    assert all(verdict == (one <= fits) for one, verdict in told)
    # The next trial knows it all: the same size, and nothing runs out of memory again.
    low = max((one for one, verdict in told if verdict), default=None)
    high = min((one for one, verdict in told if not verdict), default=None)
    assert choose(fits, "auto", (low, high)) == (size, set(), [])


def test_a_wanted_size_that_is_known_to_fit_is_not_tried() -> None:
    assert choose(40, 32, (40, None)) == (32, set(), [])


@pytest.mark.parametrize("wanted", [32, 33, 64])
def test_a_wanted_size_that_is_known_not_to_fit_is_refused(wanted: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="a microbatch of 32 is known not to fit"):
        choose(31, wanted, (16, 32))


def test_when_not_even_one_sample_fits_auto_is_refused() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="a microbatch of 1 is known not to fit"):
        choose(0, "auto", (None, 1))
