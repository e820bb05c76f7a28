"""A capture of CUDA graphs that fails: a file of its own, and so a process of
`make gpu`, which it may spoil.
"""

import pytest

from tests.gpu.runs import CUDA, train
from tests.gpu.test_graphs_auto_gpu import Reads
from tests.tasks import Blobs
from trainers.errors import ConfigError

pytestmark = pytest.mark.gpu


def test_a_step_that_waits_is_an_error_that_says_so():
    with pytest.raises(ConfigError) as raised:
        train(CUDA, task=Reads(), cuda_graphs=True)
    text = str(raised.value)
    print(text)
    assert text.startswith(
        "`cuda_graphs: true` needs a step in which the host never waits for the device"
    )
    assert "captur" in text
    assert (
        train(CUDA, task=Blobs(), max_steps=12).status == "done"
    )  # the device is none the worse
