"""Real processes, forked from one server that has torch imported."""

from __future__ import annotations

import pytest

import tests.drawn  # noqa: F401
from tests.distributed.processes import forked_launcher


@pytest.fixture(autouse=True)
def forked():
    """The launcher `spawn` forks."""
    with forked_launcher():
        yield
