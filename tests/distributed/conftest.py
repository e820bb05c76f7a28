"""Real processes, forked from one server that has torch imported."""

import pytest
import torch

import tests.drawn  # noqa: F401
from tests.distributed.processes import forked_launcher

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def forked():
    """The launcher `spawn` forks."""
    with forked_launcher():
        yield
