"""Predictions and evaluations of a trained run, in this process: every sample,
in order, with the run's own weights.
"""

import dataclasses
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import TensorDataset

from tests.specs import dotted, evaluations, make, whole_state
from tests.tasks import Blobs
from trainers.__main__ import main
from trainers.config.sections import DataConfig
from trainers.devices.group import Group
from trainers.errors import ConfigError, RunFailedError
from trainers.inference import Inference, infer, predict, run_spec
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.model.precision import TABLE
from trainers.start import prepare_storage
from trainers.step.forward import ForwardPass
from trainers.storage import Storage
from trainers.task import task_feed

CPU = torch.device("cpu")
SAMPLES = 203


class Plain(Blobs):
    """Blobs whose outputs a test chooses."""

    def __init__(self, **columns):
        super().__init__(samples=SAMPLES)
        self.columns = columns

    def predictions(self, outputs, batch):
        if not self.columns:
            return super().predictions(outputs, batch)
        if "sole" in self.columns:
            return outputs
        return {
            name: make_column(outputs)
            for name, make_column in self.columns.items()
        }


def written(task, path, size=32, precision="fp32"):
    torch.manual_seed(0)
    feed = task_feed(
        task.dataset("val"), task, DataConfig(), CPU, sharers=1, seed=0
    )
    model = TABLE[precision].convert_model(task.model())
    forward = ForwardPass(model.eval(), task, TABLE[precision], CPU)
    with torch.no_grad():
        group = Group(0, 1, CPU)
        predict(forward, feed, size, group, Storage(path), {"split": "val"})
    return pq.read_table(path)


def outputs_of(task, size):
    torch.manual_seed(0)
    model = task.model().eval()
    with torch.no_grad():
        return torch.cat(
            [
                model(part)
                for part in task.dataset("val").tensors[0].split(size)
            ]
        )


def test_memory_that_runs_out_names_the_key(tmp_path):
    class Huge(Plain):
        def forward(self, model, batch):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RunFailedError, match=r"evaluate\.microbatch_size"):
        written(Huge(), tmp_path / "out.parquet")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1, 32])
def test_every_sample_in_order(size, tmp_path):
    task = Plain()
    table = written(task, tmp_path / "out.parquet", size)
    assert table.column_names == ["index", "output"]
    assert table["index"].to_pylist() == list(range(SAMPLES))
    assert torch.equal(
        torch.tensor(table["output"].to_pylist()), outputs_of(task, size)
    )
    assert table.schema.metadata == {b"split": b"val"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def test_columns_of_every_type_and_shape_come_back(tmp_path):
    task = Plain(
        label=lambda out: out.argmax(1),
        sure=lambda out: out.amax(1) > 0.5,
        half=lambda out: out[:, 0].bfloat16(),
        grid=lambda out: out.view(-1, 2, 2).double(),
        byte=lambda out: (
            out.transpose(0, 1).mul(9).to(torch.uint8).transpose(0, 1)
        ),
    )
    table = written(task, tmp_path / "out.parquet")
    out = outputs_of(task, 32)
    assert {
        name: str(table[name].type) for name in ("label", "sure", "half")
    } == {
        "label": "int64",
        "sure": "bool",
        "half": "float",
    }
    for name, column in task.columns.items():
        expected = column(out).float() if name == "half" else column(out)
        read = torch.tensor(table[name].to_pylist(), dtype=expected.dtype)
        assert torch.equal(read, expected), name


@pytest.mark.parametrize(
    "columns",
    [
        {"sole": None},
        {"mean": lambda out: out.mean()},
        {"turned": lambda out: out.t()},
        {"pair": lambda out: (out, out)},
        {"wave": lambda out: out + 1j},
        {"none": lambda out: out[:, :0]},
        {"cut": lambda out: out[:, : 3 + len(out) % 2]},
        {"index": lambda out: out.argmax(1)},
        {"sparse": lambda out: out.to_sparse()},
        {
            "ragged": lambda out: torch.nested.nested_tensor(
                [row[: 1 + number % 3] for number, row in enumerate(out)],
                layout=torch.jagged,
            )
        },
    ],
    ids=lambda value: next(iter(value)),
)
def test_what_is_no_column_is_refused_and_leaves_no_file(columns, tmp_path):
    with pytest.raises(ConfigError):
        written(Plain(**columns), tmp_path / "out.parquet")
    assert not list(tmp_path.iterdir())


class Kept(Blobs):
    """BatchNorm, dropout, a torchmetric, a state of the task's own, and a third split."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = torch.zeros(())

    def model(self):
        return nn.Sequential(
            nn.Linear(12, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 4),
        )

    def dataset(self, split):
        found = super().dataset("train" if split == "train" else "val")
        return (
            TensorDataset(*(tensor[:50] for tensor in found.tensors))
            if split == "few"
            else found
        )

    def loss(self, outputs, batch):
        if outputs.requires_grad:
            self.seen += 1
        return super().loss(outputs, batch)

    def metrics(self, outputs, batch):
        auroc = torchmetrics.classification.MulticlassAUROC(4)
        auroc.update(outputs.float().softmax(1), batch[1])
        return {
            **super().metrics(outputs, batch),
            "auroc": auroc,
            "seen": self.seen.expand(len(outputs)),
        }

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def train(tmp_path, kind=Kept, **changes):
    task = f"tests.unit.test_predict:{kind.__name__}"
    spec = make(tmp_path, name="run", task=task, **changes)
    prepare_storage(spec, fresh=False)
    fit(
        kind(**spec.config.task_args),
        spec.config,
        LocalContext(spec.storage, "local"),
    )
    return spec


class Forces(Kept):
    """Differentiates in its forward, as forces are the gradient of an energy."""

    def forward(self, model, batch):
        with torch.enable_grad():
            where = batch[0].detach().requires_grad_()
            energy = model(where).square().sum()
            graph = model.training
            [force] = torch.autograd.grad(energy, where, create_graph=graph)
        return force[:, :4]


class Turned(Kept):
    """Lists its rows in another order, as a set of names does in another process."""

    def dataset(self, split):
        return TensorDataset(
            *(tensor.flip(0) for tensor in super().dataset(split).tensors)
        )


def work(
    location, split="val", which="newest", out=None, kind=Kept, **changes
):
    spec = run_spec(
        str(location),
        dotted(changes),
        None,
    )
    job = Inference(
        **dataclasses.asdict(spec),
        split=split,
        which=which,
        out=str(out) if out else None,
    )
    result = infer(
        kind(**spec.config.task_args), LocalContext(spec.storage, "local"), job
    )
    assert job.read_result(result.to_json().encode()) == result
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_the_figures_of_training_come_out_again_to_the_last_bit(
    precision, tmp_path
):
    spec = train(
        tmp_path,
        precision=precision,
        evaluate__microbatch_size=64,
        checkpoint__keep=9,
    )
    for before in evaluations(spec):
        result = work(Path(spec.uri), which=f"step-{before['step']}")
        assert result.metrics == {
            name: value
            for name, value in before.items()
            if name.startswith("val_")
        }
        assert result.metrics["val_seen"] == before["step"], (
            "the task's own state is the checkpoint's"
        )
        assert (result.samples, result.step) == (203, before["step"])


def test_a_model_that_differentiates_does_so_here_too(tmp_path):
    spec = train(tmp_path, Forces)
    result = work(Path(spec.uri), kind=Forces)
    assert result.metrics["val_loss"] == evaluations(spec)[-1]["val_loss"]
    out = tmp_path / "out.parquet"
    assert work(Path(spec.uri), out=out, kind=Forces).samples == SAMPLES


@pytest.mark.parametrize(
    ("kind", "split", "said"),
    [(Kept, "val", 0), (Turned, "val", 1), (Turned, "few", 0)],
)
def test_other_validation_samples_than_in_training_are_said(
    kind, split, said, tmp_path, caplog
):
    spec = train(tmp_path)
    caplog.clear()
    work(Path(spec.uri), split, kind=kind)
    assert [record.levelname for record in caplog.records].count(
        "WARNING"
    ) == said


def test_predictions_are_the_trained_models(tmp_path):
    spec = train(tmp_path)
    result = work(Path(spec.uri), out=tmp_path / "deep/out.parquet")
    table = pq.read_table(result.out)
    task = Kept()
    model = Kept().model()
    model.load_state_dict(whole_state(spec.uri, 30)["model"])
    with torch.no_grad():
        expected = model.eval()(task.dataset("val").tensors[0])
    assert torch.allclose(
        torch.tensor(table["output"].to_pylist()), expected, atol=1e-6
    )
    assert table.schema.metadata[b"checkpoint"] == b"step-30"


def test_a_run_is_opened_where_it_lies_now_and_as_this_machine_can(tmp_path):
    spec = train(tmp_path)
    config = json.loads(json.dumps(spec.tree)) | {
        "launcher": "ray",
        "strategy": "fsdp",
        "scaling": {"num_workers": 64},
    }
    prepare_storage(
        dataclasses.replace(spec, tree=config, uri=str(tmp_path / "moved")),
        fresh=False,
    )
    opened = run_spec(
        str(tmp_path / "moved"), {"evaluate.microbatch_size": 7}, None
    )
    assert opened.uri == str(tmp_path / "moved")
    assert (opened.config.launcher, opened.config.scaling.num_workers) == (
        "local",
        1,
    )
    assert opened.config.evaluate.microbatch_size == 7
    assert (
        run_spec(
            str(tmp_path / "moved"), {"scaling.num_workers": 2}, None
        ).config.launcher
        == "spawn"
    )
    whole = {"scaling": {"num_workers": 2, "cpus_per_worker": 1}}
    asked = run_spec(str(tmp_path / "moved"), whole, None).config
    assert (asked.scaling.num_workers, asked.launcher) == (2, "spawn")
    assert (
        run_spec(str(tmp_path / "moved"), {}, 16).config.scaling.num_workers
        == 16
    ), "torchrun's are started already"
    with pytest.raises(ConfigError):
        run_spec(str(tmp_path / "moved"), {"launcher": "ray"}, None)


def test_only_a_regular_file_is_replaced(tmp_path, capsys):
    """The writer renames: as root, it would replace /dev/null."""
    spec = train(tmp_path)
    pipe = tmp_path / "pipe.parquet"
    os.mkfifo(pipe)
    link = tmp_path / "link.parquet"
    link.symlink_to(pipe)
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    mark = Path(spec.uri, "config.yaml")
    before = mark.read_text()
    for out in (pipe, link, folder, mark):
        assert main(["predict", spec.uri, "--out", str(out)]) == 2
        assert f'"{out}"' in capsys.readouterr().err
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert mark.read_text() == before
    long = tmp_path / ("x" * 300 + ".parquet")
    assert main(["predict", spec.uri, "--out", str(long)]) == 1
    assert "Traceback" not in capsys.readouterr().err
