"""`ddp.sync_batchnorm`: refused on a CPU by torch; with a layer that works
there, equal to one worker.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.processes import run_processes
from tests.distributed.test_collectives import run
from tests.tasks import Blobs

ON = {"ddp.sync_batchnorm": True}


class Normed(Blobs):
    """The clusters, with BatchNorm."""

    def __init__(self, samples=96):
        super().__init__(samples=samples, dtype="float64")

    def model(self):
        return nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)
        ).to(self.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def forward_on_cpu(layer, inputs):
    """What torch's layer does on a GPU, by sums over ranks."""
    assert layer.momentum is not None
    if not layer.training:
        return F.batch_norm(
            inputs,
            layer.running_mean,
            layer.running_var,
            layer.weight,
            layer.bias,
            eps=layer.eps,
        )
    sums = _Sum.apply(
        torch.cat(
            [
                inputs.sum(0),
                inputs.square().sum(0),
                inputs.new_full((1,), len(inputs)),
            ]
        )
    )
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    variance = square - mean.square()
    with torch.no_grad():
        unbiased = variance * sums[-1] / (sums[-1] - 1)
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(unbiased, layer.momentum)
    return (inputs - mean) / (
        variance + layer.eps
    ).sqrt() * layer.weight + layer.bias


def train_all(rank, world_size):
    """Refused by torch as it is; then with a layer and a device check that let it be."""
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        run(Normed(), rank, world_size, **ON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.SyncBatchNorm, "forward", forward_on_cpu)
        patch.setattr(
            DistributedDataParallel,
            "_passing_sync_batchnorm_handle",
            lambda *args: None,
        )
        whole = run(Normed(), rank, world_size, **ON, microbatch_size=24)
        # Accumulation, evaluation in batches that come out uneven, and a short
        # last step that not all ranks have.
        few = {
            **ON,
            "microbatch_size": 5,
            "evaluate.microbatch_size": 40,
            "global_batch_size": 95,
        }
        uneven = run(Normed(), rank, world_size, **few)
    return [whole.metrics, uneven.steps]


def test_two_workers_normalise_as_one_does():
    alone = run(Normed(), 0, 1, microbatch_size=24, **ON).metrics
    for metrics, steps in run_processes(2, train_all):
        assert metrics == pytest.approx(alone, rel=1e-10)
        assert steps == 7
