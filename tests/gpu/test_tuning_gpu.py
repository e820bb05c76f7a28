"""When cuDNN searches for the fastest algorithms, which takes about a second:
for shapes of some hundred steps.
"""

import pytest
import torch

from tests.gpu.runs import CUDA, train
from tests.tasks import Blobs

pytestmark = pytest.mark.gpu

TUNED: list[tuple[int, bool]] = []


class Notes(Blobs):
    """Notes, of each pass in which cuDNN would tune, its samples and whether it trains."""

    def forward(self, model, batch):
        if torch.backends.cudnn.benchmark:
            TUNED.append((len(batch[0]), model.training))
        return model(batch[0])


@pytest.mark.parametrize(
    ("steps", "deterministic", "passes"),
    [(310, False, 248), (290, False, 0), (310, True, 0)],
)
def test_only_full_steps_of_long_runs_are_tuned(steps, deterministic, passes):
    """Not in the probe, the looks at the loss and at FLOPs, evaluations, and
    the short step of an epoch of five.
    """
    TUNED.clear()
    options = {
        "max_steps": steps,
        "evaluate__every_steps": 50,
        "log_every_steps": 50,
        "cuda_graphs": False,
    }
    options["deterministic"] = deterministic
    result = train(CUDA, task=Notes(samples=4 * 24 + 10), **options)
    assert len(TUNED) == passes
    assert {*TUNED} <= {(24, True)}
    assert not torch.backends.cudnn.benchmark
    assert {"probe", "training", "evaluation"} <= result.phases_s.keys()
