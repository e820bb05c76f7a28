"""A step on CUDA: the host never waits in it, memory is settled after warm-up,
and a bad step changes nothing.
"""

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.gpu.runs import CUDA, Images, make, stepper, train
from tests.tasks import Blobs
from trainers.devices.device import synchronize
from trainers.devices.group import Group
from trainers.errors import DivergedError
from trainers.model.precision import resolve_precision
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep

WARM = 24
MEASURED = 12

KINDS = {
    "resident": (Blobs, {}),
    "loaded": (Blobs, {"data__resident": False}),
    "loader processes": (Images, {"data__num_workers": 2}),
    "accumulated and clipped": (
        Images,
        {"microbatch_size": 8, "clip_grad_norm": 0.5},
    ),
    "bf16": (Images, {"precision": "bf16"}),
    "fp16": (Images, {"precision": "fp16"}),
    "bf16-pure": (Blobs, {"precision": "bf16-pure"}),
    "sgd": (
        Images,
        {"optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}},
    ),
    "captured": (Images, {"cuda_graphs": True, "clip_grad_norm": 0.5}),
    "captured fp16": (Images, {"cuda_graphs": True, "precision": "fp16"}),
}


def prepared(kind, steps):
    """The parts of a run, and its step.

    All steps are one epoch's: an epoch's order is copied to the device once,
    at its start, where the host may wait.
    """
    task, options = KINDS[kind]
    parts, config = make(CUDA, task(samples=24 * steps), **options)
    return parts, stepper(parts, config, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_never_waits_in_a_step(kind):
    parts, step = prepared(kind, WARM + MEASURED)
    for _ in range(WARM):
        step()
    synchronize(CUDA)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(MEASURED):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronize(CUDA)
    assert not bool(parts.step.bad)
    parts.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_new_is_allocated_after_the_warm_up(kind):
    """Segments are what torch takes from CUDA: the blocks in them go round."""
    parts, step = prepared(kind, 4 * WARM)

    def some():
        for number in range(WARM):
            step()
            if number % 10 == 9:  # as the loop looks at the device
                synchronize(CUDA)
        synchronize(CUDA)
        stats = torch.cuda.memory_stats(CUDA)
        return {
            name: stats[name]
            for name in (
                "segment.all.allocated",
                "num_alloc_retries",
                "num_ooms",
            )
        }

    some()
    before = some()
    after = some()
    assert after == before
    assert not bool(parts.step.bad)
    parts.close()


def optimizers(parameters):
    return {
        "sgd": SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        "adamw": AdamW(parameters, lr=0.1, fused=True),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(kind, precision, device):
    task = Blobs()
    spec = resolve_precision(precision, device)
    model = spec.convert_model(task.model().to(device))
    optimizer = optimizers(list(model.parameters()))[kind]
    step = TrainStep(
        ForwardPass(model, task, spec, device), optimizer, Group(0, 1, device)
    )
    inputs, labels = (
        tensor[:24].to(device) for tensor in task.dataset("train").tensors
    )
    for _ in range(3):
        step(iter([(inputs, labels)]), [24], 24, idle=False)
    assert not bool(step.bad)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [
        value.clone()
        for state in step.optimizer.state.values()
        for value in state.values()
    ]
    step(iter([(inputs * float("nan"), labels)]), [24], 24, idle=False)
    assert bool(step.bad)
    assert all(
        torch.equal(ours, kept)
        for ours, kept in zip(model.parameters(), weights, strict=True)
    )
    after = [
        value
        for state in step.optimizer.state.values()
        for value in state.values()
    ]
    assert all(
        torch.equal(ours, kept)
        for ours, kept in zip(after, moments, strict=True)
    )


def test_a_diverged_run_ends_within_ten_steps(device):
    with pytest.raises(DivergedError, match="between steps 10 and 20"):
        train(
            device, task=Blobs(failure="nan", fail_at=14), microbatch_size=24
        )
