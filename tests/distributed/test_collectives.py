"""A task whose forward or loss is a collective trains on several ranks, and no
throw-away pass waits for another.
"""

from dataclasses import asdict
from functools import partial

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.processes import run_processes
from tests.specs import BASE, ranked, train_on
from tests.tasks import Blobs
from trainers.config import TrainConfig
from trainers.config.model import override
from trainers.errors import ConfigError
from trainers.inference import Inference, infer
from trainers.launch.spec import make_spec
from trainers.loop.fit import fit
from trainers.start import prepare_storage

COLLECTIVES = ("gather", "reduce", "objects", "group", "broadcast")


class Gathers(Blobs):
    """Meets the other ranks in its loss, one way or another; more than `fits`
    samples do not fit on the last rank.
    """

    def __init__(self, how, fits=99, in_forward=False):
        super().__init__(samples=96, dtype="float64")
        self.how = how
        self.fits_here = fits
        self.in_forward = in_forward

    def forward(self, model, batch):
        if (
            model.training
            and len(batch[0]) > self.fits_here
            and dist.get_rank() == dist.get_world_size() - 1
        ):
            raise torch.OutOfMemoryError("injected: on the last rank")
        outputs = super().forward(model, batch)
        return outputs + self.meet(outputs) if self.in_forward else outputs

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) + (
            0.0 if self.in_forward else self.meet(outputs)
        )

    def meet(self, outputs):
        """Zero, which takes all ranks to know."""
        size = dist.get_world_size()
        mine = outputs.detach().mean(0)
        if self.how == "gather":
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine)
            return 0.0 * torch.stack(parts).sum()
        if self.how == "reduce":
            dist.all_reduce(mine)
            return 0.0 * mine.sum()
        if self.how == "objects":
            found = [None] * size
            dist.all_gather_object(found, len(outputs))
            return outputs.new_tensor(0.0 * sum(found))
        if self.how == "group":
            self.own = getattr(self, "own", None) or dist.new_group(
                list(range(size))
            )
            dist.all_reduce(mine, group=self.own)
            return 0.0 * mine.sum()
        dist.broadcast(mine, 0)
        return 0.0 * mine.nan_to_num().sum()


def run(task, rank, world_size, **changes):
    dotted = {
        "global_batch_size": 24,
        "max_steps": 7,
        "evaluate.every_steps": 3,
        "log_every_steps": 7,
    } | changes
    return train_on(task, ranked(rank, world_size), **dotted)


def train_all(rank, world_size):
    """The plain loss; then each collective's: evaluated in uneven batches,
    trained in several microbatches.
    """
    found = []
    plain = {"microbatch_size": 5, "evaluate.microbatch_size": 40}
    for task in (
        Blobs(samples=96, dtype="float64"),
        *(Gathers(how) for how in COLLECTIVES),
        Gathers("gather", in_forward=True),
    ):
        result = run(task, rank, world_size, **plain)
        found.append(
            (result.metrics["train_loss"], result.metrics["val_loss"])
        )
    found += [run(Gathers("gather", fits=4), rank, world_size).microbatch_size]
    # Ranks with unequal shares, and one without a sample in the short last
    # step.
    uneven = {"global_batch_size": 95, "microbatch_size": 7, "max_steps": 4}
    found += [
        run(task, rank, world_size, **uneven).metrics["train_loss"]
        for task in (Blobs(96, dtype="float64"), Gathers("reduce"))
    ]
    return found


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.campaign)]
)
def test_a_collective_in_the_task_trains_and_evaluates(world_size):
    plain, *others, size, wanted, uneven = run_processes(
        world_size, train_all
    )[0]
    assert others == [plain] * 6
    assert size == 4
    assert uneven == pytest.approx(wanted, rel=1e-5)


def use(rank, world_size, path):
    """Evaluate and predict in batches that ranks cannot share evenly."""
    changes = {"storage_path": str(path), "max_steps": 1}
    tree = override(
        TrainConfig, BASE, changes | {"evaluate.microbatch_size": 40}
    )
    spec = make_spec(tree, "test", path)
    context = ranked(rank, world_size, spec.uri)
    if rank == 0:
        prepare_storage(spec, fresh=False)
    task = Gathers("reduce", in_forward=True)
    fit(task, spec.config, context)
    job = partial(Inference, **asdict(spec), split="val", which="newest")
    infer(task, context, job(out=str(path / "all.parquet")))
    figures = infer(task, context, job(out=None)).metrics
    return figures["val_loss"], pq.read_table(path / "all.parquet").num_rows


def test_a_collective_in_the_task_is_evaluated_and_predicts(tmp_path):
    (first, rows), second = run_processes(2, use, tmp_path)
    assert second == (first, rows)
    assert rows == len(Gathers("reduce").dataset("val"))


class Net(nn.Sequential):
    """A layer that is left out from some call on."""

    def __init__(self, layers, uses):
        super().__init__(*layers.children())
        self.spare = nn.Linear(4, 4, dtype=torch.float64)
        self.uses = uses
        self.calls = 0

    def forward(self, inputs):
        self.calls += self.training
        outputs = self[2](self[1](self[0](inputs)))
        return self.spare(outputs) if self.calls <= self.uses else outputs


class Spare(Blobs):
    """Trains such a model."""

    def __init__(self, uses):
        super().__init__(samples=96, dtype="float64")
        self.uses = uses

    def model(self):
        return Net(super().model(), self.uses)


def unused(rank, world_size):
    with pytest.raises(ConfigError) as raised:
        run(Spare(uses=3), rank, world_size)
    return str(raised.value)


def test_a_parameter_that_ends_to_have_a_gradient_is_named():
    for said in run_processes(2, unused):
        assert "`spare.weight`, `spare.bias`" in said


class Noisy(Blobs):
    """Draws in evaluation."""

    def transform(self, batch, training):
        return batch[0] + torch.randn_like(batch[0]), batch[1]


def evaluated(rank, world_size):
    """Of weights that do not move: training's own draws differ between ranks."""
    changes = {
        "max_steps": 1,
        "optimizer.lr": 1e-300,
        "evaluate.microbatch_size": 10,
    }
    return run(
        Noisy(samples=96, dtype="float64"), rank, world_size, **changes
    ).metrics["val_loss"]


def test_what_evaluation_draws_does_not_depend_on_the_number_of_ranks():
    assert run_processes(2, evaluated)[0] == pytest.approx(
        evaluated(0, 1), rel=1e-12
    )


class Told(Blobs):
    """Its hooks are told the same on every rank, and may meet the others."""

    def __init__(self):
        super().__init__(samples=96, dtype="float64")
        self.told = []

    def after_step(self, model, step):
        total = torch.tensor(float(step))
        dist.all_reduce(total)
        self.told.append((step, float(total)))

    def on_evaluate(self, metrics, step):
        self.told.append((step, metrics))


def hear(rank, world_size):
    task = Told()
    result = run(
        task,
        rank,
        world_size,
        **{"microbatch_size": 5, "evaluate.every_steps": 7},
    )
    assert task.told[-1] == (
        7,
        {
            name: one
            for name, one in result.metrics.items()
            if name.startswith("val_")
        },
    )
    return task.told


def test_every_rank_is_told_the_same():
    first, second = run_processes(2, hear)
    assert first == second
    assert first[:-1] == [(step, 2.0 * step) for step in range(1, 8)]
