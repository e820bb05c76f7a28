"""Known ways of training, each beside a plain PyTorch loop over the same order
of samples: equal loss curves.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Sampler, TensorDataset

from tests.unit.test_loop import Context, config
from trainers.data.batch import map_tensors
from trainers.data.sampler import Drawn, StepSampler
from trainers.loop.fit import fit
from trainers.task import Task

SEED = 3
BATCH = 6
SETTINGS = {
    "seed": SEED,
    "global_batch_size": BATCH,
    "epochs": 2,
    "optimizer": {"name": "sgd", "lr": 0.2},
    "lr_schedule": {"name": "constant"},
    "clip_grad_norm": None,
}


def curve(task, path, microbatch, **changes):
    """The loss of each step."""
    context = Context(path)
    fit(
        task, config(**SETTINGS | changes, microbatch_size=microbatch), context
    )
    return [
        row["train_loss"] for row, checkpoint in context.reports if checkpoint
    ]


def descend(optimizer, loss):
    """A plain step down a loss; its value."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def order(task):
    """The samples of each step."""
    dataset = task.dataset("train")
    given = task.sampler(dataset, config(**SETTINGS))
    drawn = (
        None
        if given is None
        else Drawn(given, len(dataset), SEED, torch.device("cpu"))
    )
    sampler = StepSampler(
        dataset, 1, 0, seed=SEED, global_batch_size=BATCH, drawn=drawn
    )
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        yield from (
            sampler.share(step).tolist()
            for step in range(sampler.steps_per_epoch)
        )


class Single(Task):
    """Before a task of float64 among the bases: the same in float32."""

    def model(self):
        return super().model().float()

    def transform(self, batch, training):
        batch = super().transform(batch, training)
        return map_tensors(
            lambda one: one.float() if one.is_floating_point() else one, batch
        )


class Taught(nn.Module):
    """A small student beside a frozen teacher; (student's logits, teacher's)."""

    def __init__(self):
        super().__init__()
        self.teacher = (
            nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
            .requires_grad_(False)
            .double()
        )
        self.student = nn.Linear(5, 3).double()

    def forward(self, rows):
        with torch.no_grad():
            taught = self.teacher.eval()(rows)
        return self.student(rows), taught


class Labelled(Task):
    """Rows of numbers, with one of three labels."""

    def dataset(self, split):
        rows = torch.randn(
            33,
            5,
            generator=torch.Generator().manual_seed(len(split)),
            dtype=torch.float64,
        )
        return TensorDataset(rows, rows.argmax(1) % 3)


class Distilled(Labelled):
    """Hinton's loss: labels, and the teacher's softened answers."""

    def model(self):
        return Taught()

    def loss(self, outputs, batch):
        return distillation(*outputs, batch[1])


def distillation(student, teacher, labels, heat=3.0):
    soft = F.kl_div(
        (student / heat).log_softmax(1),
        (teacher / heat).softmax(1),
        reduction="batchmean",
    )
    return 0.5 * F.cross_entropy(student, labels) + 0.5 * heat**2 * soft


class Repeated(Sampler[int]):
    """Repeated augmentation: three copies of a third of the samples, side by side."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from (
            torch.randperm(self.length)
            .repeat_interleave(3)[: self.length]
            .tolist()
        )


class Reference(Labelled):
    """What torchvision's reference has: repeated augmentation, mixup, label
    smoothing, warm-up, EMA.
    """

    def model(self):
        return nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        ).double()

    def sampler(self, dataset, config):
        return Repeated(len(dataset))

    def transform(self, batch, training):
        return (
            mixup(*batch)
            if training
            else (batch[0], F.one_hot(batch[1], 3).double())
        )

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], label_smoothing=0.1)

    def schedule(self, optimizer, config):
        return warmed_up(optimizer)


def mixup(rows, labels):
    share = torch.distributions.Beta(0.2, 0.2).sample()
    targets = F.one_hot(labels, 3).double()
    return rows * share + rows.roll(1, 0) * (
        1 - share
    ), targets * share + targets.roll(1, 0) * (1 - share)


def warmed_up(optimizer):
    return SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, 0.1, total_iters=4),
            CosineAnnealingLR(optimizer, 8),
        ],
        [4],
    )


def test_torchvisions_reference(tmp_path):
    task = Reference()
    rows, labels = task.dataset("train").tensors
    torch.manual_seed(SEED)
    model = task.model()
    losses = []
    optimizer = SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=0.01)
    schedule = warmed_up(optimizer)
    average = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True
    )
    average.update_parameters(
        model
    )  # the first call copies: both averages begin with the weights
    steps = list(order(task))
    torch.manual_seed(SEED)
    for at in steps:
        inputs, targets = mixup(rows[at], labels[at])
        losses.append(
            descend(
                optimizer,
                F.cross_entropy(model(inputs), targets, label_smoothing=0.1),
            )
        )
        schedule.step()
        average.update_parameters(model)
    average.eval()
    inputs, targets = task.transform(
        task.dataset("val").tensors, training=False
    )
    wanted = F.cross_entropy(
        average(inputs), targets, label_smoothing=0.1
    ).item()
    settings = {
        "optimizer": {
            "name": "sgd",
            "lr": 0.2,
            "momentum": 0.9,
            "weight_decay": 0.01,
        },
        "ema": {"decay": 0.8},
    }
    context = Context(tmp_path)
    result = fit(
        task, config(**SETTINGS | settings, microbatch_size=BATCH), context
    )
    ours = [
        row["train_loss"] for row, checkpoint in context.reports if checkpoint
    ]
    assert len(losses) == 12
    assert ours == pytest.approx(losses, rel=1e-12)
    assert result.metrics["val_loss"] == pytest.approx(wanted, rel=1e-12)
