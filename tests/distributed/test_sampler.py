"""torch's own test of its DistributedSampler, as the wheel ships it, on ours."""

from __future__ import annotations

import functools
import inspect
import os
import unittest
import warnings
from pathlib import Path

import pytest

from tests.distributed.processes import run_processes
from trainers.data.sampler import StepSampler


def torchs_own_test(rank: int, world_size: int) -> list[str]:
    """Runs it on the CPU; gives back which samplers it made."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(world_size), "TEMP_DIR": "."}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test

    made: list[str] = []

    class Ours(StepSampler):
        __init__ = functools.partialmethod(StepSampler.__init__, global_batch_size=8)  # type: ignore[assignment]

        def __iter__(self):  # type: ignore[no-untyped-def]
            made.append(f"{len(self)} of {self.total_size}")
            return super().__iter__()

    distributed_test.DistributedSampler = Ours  # type: ignore[attr-defined]
    case = unittest.TestCase()
    case.rank = "cpu"  # type: ignore[attr-defined] # it moves tensors to the device of this index
    # Without the decorators that ask for as many GPUs as ranks.
    inspect.unwrap(distributed_test.DistributedTest._DistTestBase.test_DistributedSampler_padding)(case)
    return made


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_own_test_passes(world_size: int, tmp_path: Path) -> None:
    for made in run_processes(world_size, torchs_own_test, tmp_path):
        assert len(made) == 3
