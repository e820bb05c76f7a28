"""Every example trains for real steps: in this process, on small or synthetic data that its output calls synthetic."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.specs import evaluations, losses
from trainers.__main__ import train as train_command
from trainers.command_line import Command
from trainers.config import TrainConfig
from trainers.errors import ConfigError
from trainers.launch.local import LocalContext
from trainers.launch.spec import RunSpec, read_spec
from trainers.measure.result import RunResult
from tune.sweeps.spec import read_sweep

EXAMPLES = REPOSITORY / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/task.py"))

# Changes to each train.yaml that make it a matter of seconds; what they leave alone is as users run it.
SHORT: dict[str, dict[str, Any]] = {
    "mnist": {"task_args": {"synthetic": True, "samples": 480}, "epochs": 2, "global_batch_size": 32},
    "fashion_mnist": {"task_args": {"synthetic": True, "samples": 480}, "epochs": 2, "global_batch_size": 32},
    "cifar10": {"task_args": {"synthetic": True, "samples": 640, "width": 8}, "epochs": 3, "global_batch_size": 64},
    "gpt": {"task_args": {"lines": 640, "width": 32}, "epochs": 3},
    "imagenet": {
        "task_args": {"synthetic": True, "samples": 64, "stored": 40, "size": 32},
        "epochs": 3,
        "global_batch_size": 16,
        "lr_scaling.rule": "none",
        "optimizer.lr": 0.003,
        "data.num_workers": 0,
        "precision": "fp32",  # minutes in bf16 where the processor has to emulate it
    },
    "bert": {
        "task_args": {"synthetic": True, "geometry": "tiny", "samples": 512, "length": 32},
        "epochs": 4,
        "optimizer.lr": 2e-3,
    },
}


def spec_of(example: str, tmp_path: Path, /, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {"launcher": "local", "storage_path": str(tmp_path / "runs"), "device": "cpu"}
    if example in SHORT:
        base |= {"log_every_steps": 1, **SHORT[example]}
    return read_spec(str(EXAMPLES / example / "train.yaml"), base | changes)


def train(spec: RunSpec) -> RunResult:
    return spec.execute(LocalContext(spec.storage, "local"))


def test_every_example_is_here() -> None:
    assert {*SHORT, "digits", "tabular", "your_model"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_of_an_example(name: str) -> None:
    """What users start with: a run and a sweep that are valid as they stand, and a README that names them."""
    folder = EXAMPLES / name
    read_spec(str(folder / "train.yaml"), {"launcher": "local"})
    assert read_sweep(str(folder / "sweep.yaml"), {}).config.space
    readme = (folder / "README.md").read_text()
    assert f"examples/{name}/train.yaml" in readme
    assert f"examples/{name}/sweep.yaml" in readme
    assert "samples/s" in readme, "the output that it gave"


@pytest.mark.parametrize("name", SHORT)
def test_an_example_learns(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_of(name, tmp_path)
    result = train(spec)
    curve = losses(spec)
    assert len(curve) == result.steps >= 10
    assert sum(curve[-3:]) < 0.9 * sum(curve[:3])
    if "synthetic" in spec.config.task_args:
        assert result.metrics["val_synthetic"] == 1.0
        assert all(record["val_synthetic"] == 1.0 for record in evaluations(spec))
        assert "SYNTHETIC" in caplog.text
        assert '"val_synthetic": 1.0' in spec.storage.read("result.json").decode()
    else:
        assert "val_synthetic" not in result.metrics


def test_tabular_reaches_its_accuracy(tmp_path: Path) -> None:
    spec = spec_of("tabular", tmp_path, **{"task_args.root": str(tmp_path)})
    result = train(spec)
    assert result.metrics["val_accuracy"] >= 0.97
    assert result.epochs == spec.config.epochs
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("tabular-*/*")}
    assert len(kept) == 5
    train(spec_of("tabular", tmp_path, **{"task_args.root": str(tmp_path), "max_steps": 1}))
    assert kept == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("tabular-*/*")}, "made once"
    assert not list(tmp_path.glob("*.tmp"))


def test_digits_reaches_its_accuracy(tmp_path: Path) -> None:
    assert train(spec_of("digits", tmp_path)).metrics["val_accuracy"] >= 0.97


def test_your_model_trains_as_the_script_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "task", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    before = importlib.import_module("examples.your_model.before")
    torch.set_num_threads(1)
    script = before.train(epochs=3)
    spec = spec_of("your_model", tmp_path, epochs=3, log_every_steps=1, precision="fp32")
    try:
        train(spec)
        task = losses(spec)
    finally:
        monkeypatch.delitem(sys.modules, "task", raising=False)
        torch.set_num_threads(threads)
    assert len(task) == len(script) == 3 * 47
    # The fused AdamW rounds otherwise, and steps amplify that: the first are equal to float's last digits.
    assert task[:20] == pytest.approx(script[:20], rel=1e-4)
    assert task == pytest.approx(script, rel=0.05, abs=0.01)
    assert (EXAMPLES / "your_model/before.py").read_text().count("def spirals") == 1


def test_the_text_of_gpt_cannot_be_predicted_better_than_its_entropy() -> None:
    from examples.gpt.task import CharacterModel
    from examples.gpt.text import draw_lines, nats_of_a_line

    lines = draw_lines(20_000, seed=3)
    # Each line names its colour and thing twice and its name twice: that much a model can copy.
    words = [line.replace(".", "").split() for line in lines]
    assert all(line[3] == line[-1] and line[0] == line[-3] and line[4] == line[-5] for line in words)
    seen = len(set(lines))
    possible = round(math.exp(nats_of_a_line()))
    expected = possible * (1 - (1 - 1 / possible) ** len(lines))
    assert seen == pytest.approx(expected, rel=0.02), "drawn evenly from all combinations"
    rows = CharacterModel(lines=100).dataset("train").tensors[0]
    assert not (rows[:, -1] != 0).any(), "no line is cut"


def test_gpt_weighs_tokens(tmp_path: Path) -> None:
    """Lines of very different lengths: two microbatches must give the loss of one."""
    text = tmp_path / "text"
    text.write_text("".join("ab" * (1 + 19 * (index % 2)) + "\n" for index in range(60)))
    changes: dict[str, Any] = {"task_args": {"text": str(text), "width": 16}, "epochs": 1}
    whole, halves = (
        spec_of("gpt", tmp_path, **changes, global_batch_size=16, microbatch_size=size, name=f"by-{size}")
        for size in (16, 3)
    )
    train(whole)
    train(halves)
    assert losses(whole) == pytest.approx(losses(halves), rel=1e-5)


def test_synthetic_is_said_in_predictions(tmp_path: Path) -> None:
    from examples.mnist.task import Mnist

    images = torch.zeros(4, 1, 28, 28)
    batch, outputs = (images, torch.zeros(4, dtype=torch.int64)), torch.zeros(4, 10)
    assert Mnist(synthetic=True).predictions(outputs, batch)["synthetic"].tolist() == [True] * 4
    assert "synthetic" not in Mnist().predictions(outputs, batch)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task_args\.text"):
        train(spec_of("gpt", tmp_path, task_args={"text": str(tmp_path / "nothing")}))
    with pytest.raises(ConfigError, match="holds no directory train"):
        train(spec_of("imagenet", tmp_path, task_args={"data": str(tmp_path)}))


def notebook_cells(kind: str) -> list[str]:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_one() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["language"] == "python"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_the_notebooks_commands_are_valid(tmp_path: Path) -> None:
    """Its Python compiles, and its training command is read by the same code as on a terminal."""
    trained = 0
    values = {"STORAGE": str(tmp_path), "MAX_TIME_S": "3600", "PRECISION": "fp16"}
    for source in notebook_cells("code"):
        python = re.sub(r"^( *)!(.*\\\n)*.*", r"\1pass", source, flags=re.MULTILINE)
        compile(python, "cell", "exec")
        for line in source.replace("\\\n", " ").splitlines():
            if not line.startswith("!python -m trainers examples"):
                continue
            for name, value in values.items():
                line = line.replace(f"{{{name}}}", value)
            typed = Command("python -m trainers", train_command, TrainConfig).parse(line.split()[3:])
            overrides = typed["overrides"]
            assert overrides["max_time_s"] == 3600
            assert overrides["storage_path"] == str(tmp_path)
            spec = read_spec(str(REPOSITORY / typed["location"]), overrides)
            assert spec.config.checkpoint.every_s is not None
            trained += 1
    assert trained == 1


def test_a_run_that_was_out_of_time_goes_on(tmp_path: Path) -> None:
    """What the notebook relies on: the same command, again, until it is done."""
    changes = {"task_args": {"lines": 320, "width": 16}, "epochs": 2, "checkpoint.every_s": 300}
    stopped = train(spec_of("gpt", tmp_path, **changes, max_time_s=1e-3))
    assert stopped.status == "stopped"
    assert 0 < stopped.steps < 10
    done = train(spec_of("gpt", tmp_path, **changes))
    assert done.status == "done"
    unbroken = spec_of("gpt", tmp_path / "unbroken", **changes)
    train(unbroken)
    assert losses(spec_of("gpt", tmp_path, **changes))[-done.steps :] == losses(unbroken)
