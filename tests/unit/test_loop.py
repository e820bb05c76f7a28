"""The loop on a CPU, one worker: resume at every step, stop, divergence, and
what is written.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import IterableDataset, TensorDataset

from tests.specs import kept_result, logged
from trainers.checkpoint.store import Checkpoints
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import CheckpointError, ConfigError, DivergedError
from trainers.launch.local import LocalContext
from trainers.loop import _checkpointing
from trainers.loop.fit import fit
from trainers.measure.run_log import RunLog
from trainers.storage import Storage
from trainers.task import Task

SAMPLES = 22
BATCH = 5
PER_EPOCH = 5
RARE = {"checkpoint": {"every_steps": 99}, "evaluate": {"every_steps": 99}}


class Power(BaseException):
    """A power cut: nothing in the product may catch it."""


class Tiny(Task):
    """Dropout, BatchNorm, a random transform and a state of its own: all that
    a resume could get wrong.
    """

    def __init__(self):
        self.seen = 0

    def model(self):
        return nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.ReLU(),
            nn.Linear(8, 2),
        )

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        size = SAMPLES if split == "train" else 9
        inputs = torch.randn(size, 4, generator=generator)
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def transform(self, batch, training):
        return (
            (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1])
            if training
            else batch
        )

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs, batch):
        return {"accuracy": outputs.argmax(1) == batch[1]}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Context(LocalContext):
    """Keeps the reports, may ask to stop, and may lose power when a checkpoint
    of a step is reported.
    """

    def __init__(self, path, stop=lambda: False, cut_at_step=None):
        super().__init__(Storage(path) if path else None, "local")
        self.reports = []
        self.stop = stop
        self.cut_at_step = cut_at_step

    def report(self, metrics, checkpoint, elapsed_s):
        self.reports.append((metrics, checkpoint))
        if checkpoint is not None and metrics["step"] == self.cut_at_step:
            raise Power

    def should_stop(self, elapsed_s):
        return self.stop()


def config(**changes):
    tree = {
        "task": "task:Tiny",
        "seed": 3,
        "epochs": 3,
        "global_batch_size": BATCH,
        "microbatch_size": 3,
        "log_every_steps": 1,
        "optimizer": {"name": "adamw", "lr": 0.05},
        "lr_schedule": {"name": "cosine", "warmup": 2},
        "clip_grad_norm": 1.0,
        "checkpoint": {"every_steps": 1},
        "device": "cpu",
    }
    if "max_steps" in changes:
        tree.pop("epochs")
    return build(TrainConfig, tree | changes, "test")


def train(path, task=None, stop=lambda: False, **changes):
    return fit(task or Tiny(), config(**changes), Context(path, stop))


def curve(path):
    """(step, learning rate, loss) of the log."""
    return [
        (row["step"], row["lr"], row["train_loss"])
        for row in logged(path, "train_loss")
    ]


def evaluations(path):
    return [(row["step"], row["val_loss"]) for row in logged(path, "val_loss")]


def weights(path):
    from trainers.devices.group import Group

    loaded = Checkpoints(
        Storage(path), Group(0, 1, torch.device("cpu")), 1
    ).load()
    return dict(loaded.state["model"])


def assert_same_run(path, reference):
    assert_same_training(path, reference)
    assert evaluations(path) == evaluations(reference)


def check_resume(path, make, *cuts, **changes):
    """Train unbroken in `whole`, and in `cut` with a power cut after each of
    these steps: one run, to the last bit.
    """
    fit(make(), config(**changes), Context(path / "whole"))
    for step in cuts:
        with pytest.raises(Power):
            fit(
                make(),
                config(**changes),
                Context(path / "cut", cut_at_step=step),
            )
    fit(make(), config(**changes), Context(path / "cut"))
    assert_same_run(path / "cut", path / "whole")


def assert_same_training(path, reference):
    """Also where one was ended by its launcher now and then, and evaluated there."""
    assert curve(path) == curve(reference)
    ours = weights(path)
    theirs = weights(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken")
    result = train(path)
    assert (result.status, result.steps) == ("done", 3 * PER_EPOCH)
    return path


def test_the_log_has_each_step_once(unbroken):
    assert [step for step, _, _ in curve(unbroken)] == list(range(1, 16))
    assert [step for step, _ in evaluations(unbroken)] == [5, 10, 15]
    rates = [rate for _, rate, _ in curve(unbroken)]
    assert rates[:2] == pytest.approx([0.025, 0.05])
    assert rates[2:] == sorted(rates[2:], reverse=True)


# After the first, in an epoch, at its end, after that, and before the last.
@pytest.mark.parametrize(
    "at_step",
    [
        1,
        3,
        5,
        6,
        14,
        *(
            pytest.param(step, marks=pytest.mark.campaign)
            for step in (2, 4, *range(7, 14))
        ),
    ],
)
def test_a_power_cut_at_any_step_changes_nothing(at_step, unbroken, tmp_path):
    with pytest.raises(Power):
        fit(Tiny(), config(), Context(tmp_path, cut_at_step=at_step))
    result = train(tmp_path)
    assert (result.status, result.steps) == ("done", 3 * PER_EPOCH)
    assert_same_run(tmp_path, unbroken)


class Centred(Tiny):
    """Trains a module beside the model that assigns its buffer in each step."""

    def __init__(self):
        super().__init__()
        self.head = nn.PReLU()
        self.head.register_buffer("centre", torch.zeros(1))

    def optimizer(self, model, config):
        return AdamW([*model.parameters(), *self.head.parameters()], 0.05)

    def loss(self, outputs, batch):
        if outputs.requires_grad:
            mean = outputs.detach().mean(0)
            self.head.centre = 0.9 * self.head.centre + mean
        return super().loss(self.head(outputs - self.head.centre), batch)


def test_a_buffer_beside_the_model_that_is_assigned_comes_back(tmp_path):
    check_resume(tmp_path, Centred, 3, epochs=1)


def test_ranks_agree_after_each_slow_step(tmp_path, monkeypatch):
    monkeypatch.setattr(_checkpointing, "_SLOW_S", -1.0)
    rarely = {"every_steps": 100}
    asked = iter([False, False])
    result = train(
        tmp_path,
        stop=lambda: next(asked, True),
        max_steps=30,
        evaluate=rarely,
        checkpoint=rarely,
    )
    assert (result.status, result.steps) == ("stopped", 12)


def test_a_start_that_died_in_its_first_checkpoint_leaves_no_steps(tmp_path):
    for _ in range(2):
        train(tmp_path)
        shutil.rmtree(tmp_path / "checkpoints")
    steps = [step for step, _, _ in curve(tmp_path)]
    assert steps == sorted(set(steps))


def test_a_power_cut_in_the_middle_of_the_log_loses_no_line(
    unbroken, tmp_path, monkeypatch
):
    flush = RunLog.flush

    def cut(log, step):
        if step == 6:
            raise Power
        flush(log, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "flush", cut)
        with pytest.raises(Power):
            train(tmp_path)
    train(tmp_path)
    assert_same_run(tmp_path, unbroken)


def test_a_stop_request_checkpoints_and_the_same_command_goes_on(
    unbroken, tmp_path
):
    asked = iter([False, False, True])
    result = train(tmp_path, stop=lambda: next(asked))
    assert result.status == "stopped"
    assert result.steps == 3
    assert result.checkpoint is not None
    assert Path(result.checkpoint).is_dir()
    assert kept_result(tmp_path).status == "stopped"
    assert train(tmp_path).status == "done"
    assert_same_run(tmp_path, unbroken)


def test_fewer_steps_than_the_run_has_are_done(tmp_path):
    constant = {"lr_schedule": {"name": "constant"}}
    train(tmp_path, epochs=2, **constant)
    result = train(tmp_path, epochs=1, **constant)
    assert (result.status, result.steps) == ("done", 2 * PER_EPOCH)


class Poisoned(Tiny):
    """The loss is bad after so many good steps; needs one microbatch a step."""

    def __init__(self, good_steps, factor=math.nan):
        super().__init__()
        self.good_steps = good_steps
        self.factor = factor
        self.steps = 0

    def transform(self, batch, training):
        self.steps += training
        return super().transform(batch, training)

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (
            self.factor if self.steps > self.good_steps else 1.0
        )


@pytest.mark.parametrize(
    ("factor", "every"), [(math.nan, 1), (math.inf, 4), (math.nan, 99)]
)
def test_a_diverged_run_says_so_and_keeps_the_last_good_checkpoint(
    tmp_path, every, factor
):
    good_steps = 7
    changes = RARE | {
        "max_steps": 40,
        "microbatch_size": BATCH,
        "checkpoint": {"every_steps": every},
    }
    with pytest.raises(DivergedError) as raised:
        train(tmp_path, Poisoned(good_steps, factor), **changes)
    assert raised.value.status == "diverged"
    good = list(range(every, good_steps + 1, every))
    if not good:
        assert not (tmp_path / "checkpoints").exists()
        return
    newest = f"step-{good[-1]:012d}"
    assert newest in str(raised.value)
    assert (
        max(path.name for path in (tmp_path / "checkpoints").iterdir())
        == newest
    )
    assert all(
        tensor.isfinite().all() for tensor in weights(tmp_path).values()
    )


def test_without_storage_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context = Context(None)
    result = fit(Tiny(), config(), context)
    assert result.status == "done"
    assert result.checkpoint is None
    assert list(tmp_path.iterdir()) == []
    assert [checkpoint for _, checkpoint in context.reports] == [None] * 3
    assert set(result.metrics) == {"train_loss", "val_loss", "val_accuracy"}


def test_reports_carry_metrics_and_checkpoints(tmp_path):
    context = Context(tmp_path)
    fit(Tiny(), config(checkpoint={"every_epochs": 1}), context)
    assert [metrics["step"] for metrics, _ in context.reports] == [
        5,
        5,
        10,
        10,
        15,
        15,
    ]
    evaluated = context.reports[-2]
    kept = context.reports[-1]
    assert evaluated[1] is None
    assert {
        "step",
        "epoch",
        "train_time_s",
        "train_loss",
        "val_loss",
        "val_accuracy",
    } <= set(evaluated[0])
    assert kept[1] == str(tmp_path / "checkpoints" / "step-000000000015")
    assert kept[0]["epoch"] == 3.0
    assert all(
        isinstance(value, (int, float))
        for metrics, _ in context.reports
        for value in metrics.values()
    )


def test_the_result_is_written_as_it_is_returned(tmp_path):
    result = train(tmp_path, epochs=2)
    assert kept_result(tmp_path) == result
    assert (
        result.global_batch_size,
        result.microbatch_size,
        result.accumulation,
    ) == (
        5,
        3,
        2,
    )
    assert (result.steps, result.epochs, result.world_size) == (10, 2.0, 1)
    assert result.throughput.steps == 5  # five of warm-up are left out
    assert 0 < result.train_time_s <= result.wall_time_s
    named = {
        "the start",
        "setup",
        "dataset",
        "model",
        "probe",
        "resume",
        "training",
        "evaluation",
        "checkpoint",
        "the end",
    }
    assert named <= result.phases_s.keys()
    assert result.metrics["train_loss"] == curve(tmp_path)[-1][2]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"every_steps": 4}, [12, 15]),
        ({"every_steps": 4, "keep": 5}, [4, 8, 12, 15]),
        ({"every_epochs": 1, "keep": 9}, [5, 10, 15]),
        ({}, [10, 15]),
        ({"every_s": 3600}, [15]),
    ],
)
def test_checkpoints_are_written_when_they_are_due(tmp_path, keep, expected):
    train(tmp_path, checkpoint=keep)
    assert [
        int(path.name[5:])
        for path in sorted((tmp_path / "checkpoints").iterdir())
    ] == expected


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_dataset_that_counts_its_ranks_share_is_refused(which):
    class Sharing(IterableDataset[Any]):  # MosaicML's and LitData's
        def __iter__(self):
            return iter(Tiny().dataset("train"))

        def __len__(self):
            return SAMPLES // 2

        def __getitem__(self, row):
            return Tiny().dataset("train")[row]

    class Split(Tiny):
        def dataset(self, split):
            return Sharing() if split == which else super().dataset(split)

    with pytest.raises(
        ConfigError, match=r"dataset\(.*Sharing.*return it from stream"
    ):
        train(None, Split())


class Larger(Tiny):
    def dataset(self, split):
        return TensorDataset(torch.randn(30, 4), torch.zeros(30).long())


@pytest.mark.parametrize(
    ("field", "task", "changes"),
    [
        ("global_batch_size", Tiny(), {"global_batch_size": 6}),
        ("train_samples", Larger(), {}),
    ],
)
def test_a_checkpoint_of_other_steps_is_refused(
    tmp_path, field, task, changes
):
    train(tmp_path, epochs=1)
    with pytest.raises((ConfigError, CheckpointError), match=field):
        train(tmp_path, task, epochs=2, **changes)


def test_a_task_state_that_cannot_be_loaded_safely_is_refused_before_training():
    class Lambda(Tiny):
        def state_dict(self):
            return {"path": Path("x")}

    with pytest.raises(ConfigError, match="state_dict"):
        train(None, Lambda())


class Steep(Tiny):
    """Gradients that overflow at the scaler's first scales: it skips steps
    until its scale fits.
    """

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * 100


def test_fp16_goes_on_with_its_scale(tmp_path):
    check_resume(tmp_path, Steep, 10, precision="fp16")
