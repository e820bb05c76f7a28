"""What goes from step to step on several ranks: the curve of one, and a run that is moved in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.curves import check_resume, losses
from tests.distributed.processes import run_processes
from tests.unit.test_carry import Text

pytestmark = pytest.mark.full

IN_ORDER = {"data": {"shuffle": False}}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("size", [1, 6])
def test_the_curve_is_that_of_one_rank(world_size: int, size: int, tmp_path: Path) -> None:
    """The last step of an epoch has the first three slots, which other ranks had; one of four then has none."""
    [alone] = run_processes(1, losses, tmp_path, Text(), IN_ORDER | {"microbatch_size": 6})
    assert len(alone) == 12
    for found in run_processes(world_size, losses, tmp_path, Text(), IN_ORDER | {"microbatch_size": size}):
        assert found == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_a_run_goes_on_with_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    check_resume(Text(), IN_ORDER, (9, 3), (before, after), tmp_path)
