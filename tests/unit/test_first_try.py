"""Data, losses and figures as users write them at the first try: right, or
refused in one sentence.
"""

import copy
import random
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from tests.specs import error_of
from tests.unit.test_loop import Context, Power, config, curve, train
from tests.unit.test_microbatch import rng
from tests.unit.test_phases import Adversarial
from trainers.data.batch import map_tensors
from trainers.data.sampler import check_dataset
from trainers.devices.device import seed_all
from trainers.launch.user_code import load_task
from trainers.loop.fit import fit
from trainers.step.cuda_graphs import layout
from trainers.task import Task, load_split

CPU = torch.device("cpu")
MODULE = "tests.unit.test_first_try"
OFTEN = {
    "clip_grad_norm": None,
    "lr_schedule": {},
    "optimizer": {"name": "sgd", "lr": 0.01},
}


class Table(Task):
    """500 rows of which `how` draws 400 to train on; the first column is the
    number of the row.
    """

    def __init__(self, how):
        self.how = how
        self.parts = self.split() if how == "constructor" else None

    def model(self):
        return nn.Linear(8, 1)

    def dataset(self, split):
        train, val = self.parts or self.split()
        return train if split == "train" else val

    def split(self):
        x = torch.randn(500, 8, generator=torch.Generator().manual_seed(5))
        table = TensorDataset(
            torch.arange(500.0)[:, None], x, x.sum(1, keepdim=True)
        )
        if self.how in ("random_split", "constructor"):
            train, val = random_split(table, [400, 100])
            return train, val
        order = {
            "numpy": lambda: np.random.permutation(500),
            "python": lambda: random.sample(range(500), 500),
            "torch": lambda: torch.randperm(500).tolist(),
            "entropy": lambda: np.random.default_rng().permutation(500),
            "entropy in tensors": lambda: np.random.default_rng().permutation(
                500
            ),
            "all": lambda: range(500),
        }
        rows = [int(row) for row in order[self.how]()]
        if self.how == "entropy in tensors":
            return TensorDataset(*table[rows[:400]]), TensorDataset(
                *table[rows[400:]]
            )
        return Subset(
            table, rows if self.how == "all" else rows[:400]
        ), Subset(table, rows[400:])

    def forward(self, model, batch):
        return model(batch[1])

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch[2])


@pytest.mark.parametrize(
    "how", ["random_split", "constructor", "numpy", "python", "torch"]
)
def test_a_random_split_is_the_same_in_every_call_process_and_seed(how):
    found = []
    for seed in (0, 7):
        seed_all(seed)
        task = load_task(f"{MODULE}:Table", {"how": how}, "test")
        before = rng()
        parts = [
            load_split(task, split, False, CPU) for split in ("val", "train")
        ]
        after = rng()
        assert before == after
        found += [
            [int(part[index][0]) for index in range(len(part))]
            for part in parts
        ]
    assert found[:2] == found[2:]
    assert sorted(found[0] + found[1]) == list(range(500))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("entropy", "refused"),
        ("entropy in tensors", "warned"),
        ("all", "warned"),
    ],
)
def test_validation_rows_in_training_are_said(how, said):
    def run():
        return train(
            None,
            Table(how),
            max_steps=1,
            global_batch_size=50,
            microbatch_size="auto",
        ).warnings

    if said == "refused":
        with error_of('dataset("val")'):
            run()
    else:
        [words] = run()
        assert "training samples too" in words
    assert not train(
        None,
        Table("torch"),
        max_steps=1,
        global_batch_size=50,
        microbatch_size="auto",
    ).warnings


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"global_batch_size": 401}, "global_batch_size"),
        ({"global_batch_size": 401, "drop_last": True}, "global_batch_size"),
        (
            {"global_batch_size": None, "batch_size_per_worker": 5000},
            "global_batch_size",
        ),
        (
            {
                "global_batch_size": None,
                "batch_schedule": [
                    {"until_samples": 400, "size": 50},
                    {"size": 401},
                ],
            },
            "batch_schedule",
        ),
        ({"global_batch_size": 400}, None),
    ],
)
def test_a_batch_larger_than_the_data_is_refused(changes, field):
    options = {"max_steps": 1, "microbatch_size": "auto", **changes}
    if field is None:
        assert train(None, Table("torch"), **options).samples == 400
        return
    with error_of(field):
        train(None, Table("torch"), **options)


class Together(Table):
    """Evaluates what depends on the other samples of a batch: padding to the
    longest, or its own statistics.
    """

    def __init__(self, kind):
        super().__init__("torch")
        self.kind = kind

    def forward(self, model, batch):
        x = batch[1]
        if self.kind == "statistics":
            x = (x - x.mean(0)) / x.std(0)
        if self.kind == "padding":
            x = x / x.abs().amax()
        if self.kind == "noise":
            x = x + torch.randn_like(x)
        return super().forward(model, (batch[0], x))


@pytest.mark.parametrize(
    ("kind", "said"),
    [("statistics", 1), ("padding", 1), ("noise", 0), ("alone", 0)],
)
def test_figures_that_depend_on_the_evaluation_batch_are_said(kind, said):
    result = train(
        None,
        Together(kind),
        max_steps=1,
        global_batch_size=50,
        microbatch_size=50,
    )
    assert len(result.warnings) == said
    assert all(
        "evaluate.microbatch_size" in words for words in result.warnings
    )


def windows(path):
    return [(step, loss) for step, _, loss in curve(path)]


@pytest.mark.parametrize("phased", [False, True])
def test_windows_are_those_of_the_log_whatever_else_is_due_and_over_resumes(
    phased, tmp_path
):
    options = {
        "max_steps": 22,
        "log_every_steps": 1,
        **({} if phased else OFTEN),
    }
    task = Adversarial if phased else lambda: Table("torch")
    if not phased:
        options |= {"global_batch_size": 24, "microbatch_size": 10}
    rare = {"checkpoint": {"every_steps": 99}, "evaluate": {"every_steps": 99}}
    train(tmp_path / "each", task(), **options, **rare)
    each = [loss for _, loss in windows(tmp_path / "each")]
    right = [
        (end, sum(each[start:end]) / (end - start))
        for start, end in ((0, 8), (8, 16), (16, 22))
    ]

    options["log_every_steps"] = 8
    found = []
    for checkpoint, evaluate in ((99, 99), (5, 7)):
        path = tmp_path / f"{checkpoint}-{evaluate}"
        every = {
            "checkpoint": {"every_steps": checkpoint},
            "evaluate": {"every_steps": evaluate},
        }
        result = train(path, task(), **options, **every)
        assert result.metrics["train_loss"] == windows(path)[-1][1]
        found.append(windows(path))
    assert all(one == found[0] for one in found)
    assert [step for step, _ in found[0]] == [8, 16, 22]
    assert [loss for _, loss in found[0]] == pytest.approx(
        [loss for _, loss in right], rel=1e-6
    )

    every = {"checkpoint": {"every_steps": 3}, "evaluate": {"every_steps": 99}}
    with pytest.raises(Power):
        fit(
            task(),
            config(**options, **every),
            Context(tmp_path / "cut", cut_at_step=12),
        )
    stops = iter([False] * 1 + [True] * 99)
    stopped = train(
        tmp_path / "cut", task(), stop=lambda: next(stops), **options, **every
    )
    assert stopped.status == "stopped"
    train(tmp_path / "cut", task(), **options, **every)
    assert windows(tmp_path / "cut") == found[0]


class Shaped(Table):
    """One method gives something of another shape."""

    def __init__(self, **given):
        super().__init__("torch")
        self.given = given

    def loss(self, outputs, batch):
        return self.given.get("loss", torch.mean)((outputs - batch[2]) ** 2)

    def weight(self, batch):
        return self.given.get("weight", len)(batch[0])

    def metrics(self, outputs, batch):
        return self.given.get("metrics", lambda error: {})(
            (outputs - batch[2]).abs()
        )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"loss": lambda error: error[:, 0]}, "Shaped.loss()"),
        ({"loss": lambda error: error}, "Shaped.loss()"),
        ({"loss": lambda error: float(error.mean())}, "Shaped.loss()"),
        ({"loss": lambda error: None}, "Shaped.loss()"),
        ({"loss": lambda error: error.mean() * 1j}, "Shaped.loss()"),
        (
            {"metrics": lambda error: {"error": error[:, 0] * 1j}},
            "metric error",
        ),
        ({"loss": lambda error: error.mean().reshape(1)}, None),
        ({"weight": lambda rows: torch.ones(len(rows))}, "Shaped.weight()"),
        ({"weight": lambda rows: None}, "Shaped.weight()"),
        ({"weight": lambda rows: -1}, "Shaped.weight()"),
        ({"weight": lambda rows: torch.ones(1) * len(rows)}, None),
        ({"metrics": lambda error: {"mae": error.mean()}}, "metric mae"),
        (
            {"metrics": lambda error: {"mae": float(error.mean())}},
            "metric mae",
        ),
        (
            {"metrics": lambda error: {"mae": error.expand(-1, 2)}},
            "metric mae",
        ),
        ({"metrics": lambda error: error[:, 0]}, "Shaped.metrics()"),
        (
            {
                "metrics": lambda error: {
                    "of": {"mae": error[:, 0]},
                    "of_mae": error[:, 0],
                }
            },
            "metric",
        ),
        ({"loss": lambda error: error.detach().mean()}, "Shaped.loss()"),
        (
            {
                "metrics": lambda error: {
                    "of": {"mae": error[:, 0], "rmse": {"squared": error**2}}
                }
            },
            None,
        ),
    ],
)
def test_shapes_are_refused_before_training(given, field, tmp_path):
    options = {
        "max_steps": 3,
        "global_batch_size": 50,
        "microbatch_size": 25,
        "evaluate": {"every_steps": 3},
    }
    if field is None:
        metrics = train(tmp_path, Shaped(**given), **options).metrics
        names = (
            {"val_of_mae", "val_of_rmse_squared"}
            if "metrics" in given
            else set()
        )
        assert metrics.keys() == {"train_loss", "val_loss", *names}
        return
    with error_of(field):
        train(tmp_path, Shaped(**given), **options)
    assert not list((tmp_path / "log").glob("*"))


class Returns(Table):
    """Returns something else than a dataset."""

    def __init__(self, what):
        super().__init__("torch")
        self.what = what

    def dataset(self, split):
        return self.what


class Endless:
    """A dataset that does not say how long it is."""

    def __getitem__(self, index):
        return torch.ones(2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            pd.DataFrame({"x": [1.0]}),
            '"DataFrame"` must be indexed by sample',
        ),
        (pa.table({"x": [1.0]}), '"Table"` must be indexed by sample'),
        (DataLoader([1.0]), "return its `.dataset`"),
        ((torch.ones(4, 2), torch.ones(4)), "return TensorDataset"),
        (TensorDataset, "return an instance"),
        (iter([1.0]), "return a map-style dataset"),
        (None, '"NoneType"` has no sample'),
        ([], '"list"` has no sample'),
        (Endless(), '"Endless"` has no sample, or no length'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_dataset_is_refused_in_one_sentence(what, said):
    with error_of('dataset("train")', re.escape(said)):
        train(None, Returns(what), max_steps=1, global_batch_size=1)


class Columns:
    """A dataset of one's own, whose class derives from nothing."""

    columns = ("inputs", "label")

    def __len__(self):
        return 4

    def __getitems__(self, indices):
        return [(torch.ones(2), torch.ones(1)) for _ in indices]


def test_what_gives_samples_is_a_dataset():
    check_dataset('dataset("train")', Columns())
    check_dataset('dataset("train")', ((torch.ones(2), 0), (torch.ones(2), 1)))


class Clears(Table):
    """Clears gradients where the run does not expect it."""

    def __init__(self, how):
        super().__init__("torch")
        self.cleared = how

    def optimizer(self, model, config):
        self.made = torch.optim.SGD(model.parameters(), lr=0.1)
        return self.made

    def loss(self, outputs, batch):
        last = self.made.param_groups[0]["params"][-1]
        self.made.zero_grad(set_to_none=self.cleared != "zeros")
        if self.cleared == "anew":
            last.grad = torch.ones_like(last)
        return super().loss(outputs, batch)


@pytest.mark.parametrize("how", ["none", "zeros", "anew"])
def test_gradients_that_a_loss_clears_are_noticed(how):
    options = {"max_steps": 2, "global_batch_size": 50}
    assert train(None, Clears(how), microbatch_size=50, **options).steps == 2
    with error_of("Clears.loss()", "leave out zero_grad"):
        train(None, Clears(how), microbatch_size=25, **options)


class Teacher(Table):
    """A copy of the model, which may follow it."""

    def __init__(self, follows):
        super().__init__("torch")
        self.follows = follows

    def model(self):
        model = super().model()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def after_step(self, model, step):
        if self.follows:
            for theirs, ours in zip(
                self.teacher.parameters(), model.parameters(), strict=True
            ):
                theirs.data.lerp_(ours, 0.1)


class KeptTeacher(Teacher):
    def state_dict(self):
        return {"teacher": self.teacher.state_dict()}


@pytest.mark.parametrize(
    ("task", "said"),
    [(Teacher(True), 1), (Teacher(False), 0), (KeptTeacher(True), 0)],
)
def test_what_changes_and_no_checkpoint_has_is_said(
    task, said, tmp_path, caplog
):
    train(
        tmp_path,
        task,
        max_steps=4,
        global_batch_size=50,
        microbatch_size=50,
        checkpoint={"every_steps": 1},
        **OFTEN,
    )
    assert [record.levelname for record in caplog.records].count(
        "WARNING"
    ) == said


def test_a_packed_sequence_keeps_its_sizes_on_the_host():
    packed = pack_sequence(
        [torch.ones(3, 2), torch.ones(5, 2)], enforce_sorted=False
    )
    moved = map_tensors(lambda tensor: tensor.to("meta"), {"words": packed})[
        "words"
    ]
    assert (moved.data.is_meta, moved.sorted_indices.is_meta) == (True, True)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    other = pack_sequence(
        [torch.ones(4, 2), torch.ones(4, 2)], enforce_sorted=False
    )
    assert layout(packed) != layout(other), (
        "a captured step has the sizes in it"
    )
