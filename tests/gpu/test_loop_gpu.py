"""The loop on CUDA: between two looks nothing waits for the device, and what
is read of it is read ten steps later.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.gpu.runs import CUDA, Context, Images, config
from tests.tasks import Blobs
from trainers.errors import DivergedError
from trainers.loop.fit import fit

pytestmark = pytest.mark.gpu
FIRST, LAST = (
    110,
    210,
)  # where steps are captured, the look at them before the 101st replay is over


class Guarded(Images):
    """Where 100 steps of the run have begun, whatever waits for the device is an error."""

    # Not an attribute that changes, for which a captured step would be proved
    # again.
    seen = SimpleNamespace(steps=0)

    def after_step(self, model, step):
        self.seen.steps = step
        if step == FIRST:
            torch.cuda.set_sync_debug_mode("error")
        if step == LAST:
            torch.cuda.set_sync_debug_mode("default")


KINDS = {
    "resident": {},
    "loaded": {"data__resident": False, "clip_grad_norm": 0.5},
    "loader processes": {"data__num_workers": 2},
    "fp16": {"precision": "fp16"},
    "average of weights": {"ema": {"decay": 0.9}, "cuda_graphs": False},
    "captured": {"cuda_graphs": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_waits_for_the_device_in_none_of_100_steps(kind, monkeypatch):
    """Epochs of 30 steps end in between, ten agreements are made, and a window
    is logged every five steps.
    """
    task = Guarded(samples=24 * 30)
    context = Context(None)
    told = []
    waits = []

    def take(record):
        if record["record"] == "train":
            told.append((record["step"], task.seen.steps))

    context.take = take
    synchronize = torch.cuda.synchronize

    def noted(*args):  # which the debug mode does not see
        waits.append(task.seen.steps)
        synchronize(*args)

    monkeypatch.setattr(torch.cuda, "synchronize", noted)
    options = {
        "max_steps": LAST + 5,
        "log_every_steps": 5,
        "evaluate__every_steps": 1000,
    } | KINDS[kind]
    result = fit(task, config(CUDA, **options), context)
    assert result.steps == LAST + 5
    assert result.throughput is not None
    assert not [step for step in waits if FIRST <= step < LAST]
    assert [step for step, _ in told] == list(range(5, LAST + 6, 5))
    assert all(now == min(step + 10, LAST + 5) for step, now in told), (
        "read ten steps later, but for the last ones"
    )


def test_a_bad_loss_is_seen_within_twenty_steps():
    task = Blobs(failure="nan", fail_at=11)
    with pytest.raises(DivergedError, match="between steps 10 and 20"):
        fit(
            task, config(CUDA, max_steps=60, microbatch_size=24), Context(None)
        )
    assert task.forwards == 30
