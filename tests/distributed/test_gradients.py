"""The gradient of a global batch is one process's, however it is split into
workers and microbatches.
"""

import pytest
import torch
import torchmetrics

from tests.distributed.processes import run_processes
from tests.tasks import Blobs
from trainers.config.sections import DataConfig
from trainers.data.sampler import StepSampler
from trainers.devices.group import Group
from trainers.model.precision import TABLE
from trainers.model.sharding import is_sharded, whole
from trainers.model.strategy import place_model, wrap_model
from trainers.step.evaluation import evaluate
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep
from trainers.task import task_feed

CPU = torch.device("cpu")
# (global batch size, step of the epoch, microbatch size): even, uneven, short
# last step, ranks without a sample
SPLITS = [
    (24, 0, 100),
    (23, 1, 4),
    (24, 8, 3),
    (2, 0, 1),
    (1, 5, 1),
    (7, 28, 2),
    (203, 0, 9),
]


class Tokens(Blobs):
    """Weighs samples unevenly, as token counts do."""

    def weight(self, batch):
        return (batch[1] + 1).sum().to(self.dtype)

    def loss(self, outputs, batch):
        losses = torch.nn.functional.cross_entropy(
            outputs, batch[1], reduction="none"
        )
        weights = (batch[1] + 1).to(self.dtype)
        return (losses * weights).sum() / weights.sum()


def gradient(task, rank, world_size, split, strategy="ddp"):
    """Gradient and loss of one step, before any update; of a sharded model
    whole, on rank 0.
    """
    size, step, microbatch = split
    group = Group(rank, world_size, CPU)
    torch.manual_seed(0)
    model = place_model(task.model(), group, strategy)
    data = task.dataset("train")
    sampler = StepSampler(
        data,
        global_batch_size=size,
        num_replicas=world_size,
        rank=rank,
        seed=5,
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0, fused=strategy == "ddp"
    )
    forward = ForwardPass(
        wrap_model(model, group, strategy), task, TABLE["fp32"], CPU
    )
    train = TrainStep(forward, optimizer, group)
    microbatches, sizes = sampler.plan(
        step, microbatch, even=is_sharded(model)
    )
    feed = task_feed(data, task, DataConfig(), CPU, sharers=1, seed=0)
    train(
        feed.batches(microbatches, training=True),
        sizes,
        sampler.step_size(step),
        idle=not any(sizes),
    )
    found = whole([parameter.grad for parameter in model.parameters()], group)
    return [
        one.clone() for one in found if one is not None
    ], train.take_losses(1)()["train_loss"][0]


def all_gradients(rank, world_size):
    tasks = [
        cls(dtype=dtype)
        for cls in (Blobs, Tokens)
        for dtype in ("float64", "float32")
    ]
    wide = Blobs(
        dtype="float64", features=9000
    )  # too large to go to every rank directly
    found = [gradient(wide, rank, world_size, split) for split in SPLITS[:2]]
    return found + [
        gradient(task, rank, world_size, split)
        for task in tasks
        for split in SPLITS
    ]


@pytest.mark.parametrize(
    "world_size", [3, pytest.param(2, marks=pytest.mark.campaign)]
)
def test_every_factoring_gives_one_gradient(world_size):
    alone = all_gradients(0, 1)
    ranks = run_processes(world_size, all_gradients)
    for ours, theirs in zip(ranks[0], ranks[-1], strict=True):
        assert all(map(torch.equal, ours[0], theirs[0])), (
            "the same bits on every rank"
        )
    for rank, results in enumerate(ranks):
        for (expected, loss), (found, found_loss) in zip(
            alone, results, strict=True
        ):
            assert len(expected) == 4
            for ours, theirs in zip(found, expected, strict=True):
                tolerance = 1e-12 if theirs.dtype == torch.float64 else 1e-6
                error = (ours - theirs).abs().max() / theirs.abs().max()
                assert error <= tolerance, (rank, error)
            assert found_loss == pytest.approx(loss, rel=1e-6)


class Measured(Tokens):
    """torchmetrics of counts, whole data, sums, states that depend on the
    order of batches; names of some batches.
    """

    def metrics(self, outputs, batch):
        made = {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(4),
            "auroc": torchmetrics.classification.MulticlassAUROC(4),
        }
        for metric in made.values():
            metric.update(outputs.softmax(1), batch[1])
        error = torchmetrics.MeanSquaredError()
        error.update(outputs[:, 0], batch[1])
        correlation = torchmetrics.PearsonCorrCoef()
        correlation.update(outputs[:, 0], batch[1].float())
        some = "high" if batch[0][0, 0] > 0 else "low"
        part = torchmetrics.MeanMetric()
        part.update(outputs)
        made |= {
            "error": error,
            "correlation": correlation,
            f"part_{some}": part,
        }
        return {some: outputs[:, 0], **made, **super().metrics(outputs, batch)}


def all_evaluations(rank, world_size):
    torch.set_num_threads(1)
    found = []
    for task in (
        Tokens(samples=1),
        *(Measured(samples=samples) for samples in (7, 64, 97, 1797)),
    ):
        torch.manual_seed(0)
        feed = task_feed(
            task.dataset("val"), task, DataConfig(), CPU, sharers=1, seed=0
        )
        found.append(
            evaluate(
                ForwardPass(task.model(), task, TABLE["fp32"], CPU),
                feed,
                32,
                Group(rank, world_size, CPU),
            )
        )
    return found


@pytest.mark.parametrize(
    "world_size", [3, pytest.param(2, marks=pytest.mark.campaign)]
)
def test_evaluation_is_one_figure_for_any_number_of_workers(world_size):
    alone = all_evaluations(0, 1)
    assert alone[-1].keys() >= {
        "val_auroc",
        "val_error",
        "val_correlation",
        "val_part_low",
        "val_high",
    }
    assert 0 < alone[-1]["val_accuracy"] < 1
    assert 0 < alone[-1]["val_auroc"] < 1
    assert run_processes(world_size, all_evaluations) == [alone] * world_size
