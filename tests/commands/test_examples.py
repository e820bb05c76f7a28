"""Every example trains for real steps: in this process, on small or synthetic
data that its output calls synthetic.
"""

import importlib
import re
import sys

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.specs import error_of, evaluations, losses, read_json, read_spec
from trainers.__main__ import train as train_command
from trainers.command_line import Command
from trainers.config import TrainConfig
from trainers.errors import ConfigError
from trainers.launch.local import LocalContext
from tune.sweeps.spec import read_sweep

EXAMPLES = REPOSITORY / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/task.py"))

# Changes to each train.yaml that make it a matter of seconds; what they leave
# alone is as users run it.
SHORT = {
    "mnist": {
        "task_args": {"synthetic": True, "samples": 480},
        "epochs": 2,
        "global_batch_size": 32,
    },
    "cifar10": {
        "task_args": {"synthetic": True, "samples": 640, "width": 8},
        "epochs": 3,
        "global_batch_size": 64,
        "precision": "fp32",  # as below
    },
    "gpt": {"task_args": {"lines": 640, "width": 32}, "epochs": 3},
    "imagenet": {
        "task_args": {
            "synthetic": True,
            "samples": 64,
            "stored": 40,
            "size": 32,
            "architecture": "resnet18",
        },
        "epochs": 3,
        "global_batch_size": 16,
        "lr_scaling.rule": "none",
        "optimizer.lr": 0.003,
        "data.num_workers": 0,
        "precision": "fp32",  # minutes in bf16 where the processor has to emulate it
    },
    "bert": {
        "task_args": {
            "synthetic": True,
            "geometry": "tiny",
            "samples": 512,
            "length": 16,
        },
        "epochs": 4,
        "optimizer.lr": 2e-3,
    },
}


def spec_of(example, tmp_path, /, **changes):
    base = {
        "launcher": "local",
        "storage_path": str(tmp_path / "runs"),
        "device": "cpu",
    }
    if example in SHORT:
        base |= {"log_every_steps": 1, **SHORT[example]}
    return read_spec(str(EXAMPLES / example / "train.yaml"), base | changes)


def train(spec):
    return spec.execute(LocalContext(spec.storage, "local"))


def test_every_example_is_here():
    assert {*SHORT, "digits", "fashion_mnist", "tabular", "your_model"} == set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_files_of_an_example(name):
    """What users start with: a run and a sweep that are valid as they stand,
    and a README that names them.
    """
    folder = EXAMPLES / name
    read_spec(str(folder / "train.yaml"), {"launcher": "local"})
    assert read_sweep(str(folder / "sweep.yaml"), {}).config.space
    readme = (folder / "README.md").read_text()
    assert f"examples/{name}/train.yaml" in readme
    assert f"examples/{name}/sweep.yaml" in readme
    assert "samples/s" in readme, "the output that it gave"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.full] * (name not in ("mnist", "gpt"))
        )
        for name in SHORT
    ],
)
def test_an_example_learns(name, tmp_path, caplog):
    spec = spec_of(name, tmp_path)
    result = train(spec)
    curve = losses(spec)
    assert len(curve) == result.steps >= 10
    assert sum(curve[-3:]) < 0.9 * sum(curve[:3])
    if "synthetic" in spec.config.task_args:
        assert result.metrics["val_synthetic"] == 1.0
        assert all(
            record["val_synthetic"] == 1.0 for record in evaluations(spec)
        )
        assert "SYNTHETIC" in caplog.text
        assert (
            '"val_synthetic": 1.0' in spec.storage.read("result.json").decode()
        )
    else:
        assert "val_synthetic" not in result.metrics


@pytest.mark.full
def test_tabular_reaches_its_accuracy(tmp_path):
    spec = spec_of("tabular", tmp_path, **{"task_args.root": str(tmp_path)})
    result = train(spec)
    assert result.metrics["val_accuracy"] >= 0.97
    assert result.epochs == spec.config.epochs
    kept = {
        path.name: path.stat().st_mtime_ns
        for path in tmp_path.glob("tabular-*/*")
    }
    assert len(kept) == 5
    train(
        spec_of(
            "tabular",
            tmp_path,
            **{"task_args.root": str(tmp_path), "max_steps": 1},
        )
    )
    assert kept == {
        path.name: path.stat().st_mtime_ns
        for path in tmp_path.glob("tabular-*/*")
    }, "made once"
    assert not list(tmp_path.glob("*.tmp"))


def test_your_model_trains_as_the_script_before_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "task", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    before = importlib.import_module("examples.your_model.before")
    torch.set_num_threads(1)
    script = before.train(epochs=3)
    spec = spec_of(
        "your_model", tmp_path, epochs=3, log_every_steps=1, precision="fp32"
    )
    try:
        train(spec)
        task = losses(spec)
    finally:
        monkeypatch.delitem(sys.modules, "task", raising=False)
        torch.set_num_threads(threads)
    assert len(task) == len(script) == 3 * 47
    # The fused AdamW rounds otherwise, and steps amplify that: the first are
    # equal to float's last digits.
    assert task[:20] == pytest.approx(script[:20], rel=1e-4)
    assert task == pytest.approx(script, rel=0.05, abs=0.01)
    assert (EXAMPLES / "your_model/before.py").read_text().count(
        "def spirals"
    ) == 1


def test_a_missing_file_is_a_sentence(tmp_path):
    with error_of("task_args.text"):
        train(
            spec_of(
                "gpt", tmp_path, task_args={"text": str(tmp_path / "nothing")}
            )
        )
    with pytest.raises(ConfigError):
        train(spec_of("imagenet", tmp_path, task_args={"data": str(tmp_path)}))


def notebook_cells(kind):
    notebook = read_json(EXAMPLES / "notebook.ipynb")
    return [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == kind
    ]


def test_the_notebooks_commands_are_valid(tmp_path):
    """Its Python compiles, and its training command is read by the same code
    as on a terminal.
    """
    trained = 0
    values = {
        "STORAGE": str(tmp_path),
        "MAX_TIME_S": "3600",
        "PRECISION": "fp16",
    }
    for source in notebook_cells("code"):
        python = re.sub(
            r"^( *)!(.*\\\n)*.*", r"\1pass", source, flags=re.MULTILINE
        )
        compile(python, "cell", "exec")
        for line in source.replace("\\\n", " ").splitlines():
            if not line.startswith("!python -m trainers examples"):
                continue
            for name, value in values.items():
                line = line.replace(f"{{{name}}}", value)
            typed = Command(
                "python -m trainers", train_command, TrainConfig
            ).parse(line.split()[3:])
            overrides = typed["overrides"]
            assert overrides["max_time_s"] == 3600
            assert overrides["storage_path"] == str(tmp_path)
            spec = read_spec(str(REPOSITORY / typed["location"]), overrides)
            assert spec.config.checkpoint.every_s is not None
            trained += 1
    assert trained == 1
