"""What the lab's test files begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.lab.hosts import Lab, missing, outside


@contextlib.contextmanager
def lab_of(num_hosts: int) -> Iterator[Lab]:
    """A lab that must leave nothing behind; the test is skipped where there can be none."""
    if why := missing():
        pytest.skip(f"there can be no lab here: {why}")
    before = outside()
    with Lab(num_hosts=num_hosts) as lab:
        yield lab
    assert lab.processes() == []
    assert not lab.directory.exists()
    assert outside() == before
