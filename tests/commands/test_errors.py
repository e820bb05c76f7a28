"""A mistake in a file or an option: one sentence, exit code 2, before any worker starts.

One process without torch and Ray is given all commands in turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done
from tests.specs import BASE
from trainers.config.yaml import dump_yaml

DIGITS = "examples/digits/train.yaml"
SWEEP = "examples/digits/sweep.yaml"

# What a file changes of a good one, and what the sentence must say.
FILES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a nested one": ({"optimizer": {"lr": 0.1, "weight_deacy": 1}}, ["did you mean `optimizer.weight_decay`?"]),
    "text for a number": ({"global_batch_size": "64"}, ["`global_batch_size`", '"64"', "whole number"]),
    "two of one": ({"batch_size_per_worker": 8}, ["`batch_size_per_worker` is 8", "global_batch_size"]),
    "missing": ({"task": None}, ["`task`", "must be"]),
    "no such module": ({"task": "tests.taks:Blobs"}, ['"tests.taks:Blobs"', "no tests/taks.py"]),
    "too many here": ({"scaling": {"num_workers": 4096}, "launcher": "spawn"}, ["`scaling.num_workers` is 4096"]),
    "too many on Ray": ({"scaling": {"num_workers": 4096}, "launcher": "ray"}, ["`scaling.num_workers` is 4096"]),
}
OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "text for a number": (["trainers", DIGITS, "--optimizer.lr", "fast"], ["`optimizer.lr`", '"fast"', "number"]),
    "no value": (["trainers", DIGITS, "--optimizer.lr"], ["needs a value"]),
    "one too many": (["trainers", DIGITS, "oops"], ["`oops`"]),
    "a sweep's key": (["tune", SWEEP, "--searh", "grid"], ["`searh`", "did you mean `search`?"]),
    "a space's key": (["tune", SWEEP, "--space", "{precison: [fp32]}"], ["space.precison", "did you mean"]),
    "a range in a grid": (
        ["tune", SWEEP, "--space", "{global_batch_size: {min: 8, max: 64}}"],
        ["`search`", "set `search: random`"],
    ),
    "no target": (["tune", SWEEP, "--objective", "{metric: time_to_target}"], ["objective.target", "add `target:"]),
    "a run's value": (["tune", SWEEP, "--train.optimizer.lr", "-1"], ["`optimizer.lr` is -1", "greater than 0"]),
}
WITH_TORCH: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no such class": ({"task": "tests.tasks:Blob"}, ["did you mean `tests.tasks:Blobs`?"]),
    "no task": ({"task": "tests.tasks:NotATask"}, ["is not a trainers.task.Task"]),
    "no such argument": ({"task_args": {"sample": 3}}, ["`task_args`", "sample", "Blobs("]),
    "not on this device": ({"precision": "tf32", "device": "cpu"}, ["`precision`", '"tf32"', "cpu"]),
}

# An interpreter in which neither torch nor Ray can be imported is the proof that they are not.
ALL_IN_TURN = """
import contextlib, importlib, io, json, sys
sys.modules.update(dict.fromkeys(("torch", "ray")))
said = {}
for name, (package, *arguments) in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module(f"{package}.__main__").main(arguments)
    said[name] = code, out.getvalue(), err.getvalue()
print(json.dumps(said))
"""


def check(code: int, out: str, err: str, words: list[str]) -> None:
    """It is one sentence, which has all words."""
    assert code == 2, err
    [line] = [line for line in err.splitlines() if line]
    assert line.startswith("error: ")
    assert "Traceback" not in out + err
    assert all(word in line for word in words), line


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, command: Callable[..., Done]) -> dict[str, Any]:
    """What the commands have said, by the names of the tables."""
    directory = tmp_path_factory.mktemp("files")
    typed = {f"option: {name}": arguments for name, (arguments, _) in OPTIONS.items()}
    for name, (changes, _) in FILES.items():
        file = directory / f"{name.replace(' ', '-')}.yaml"
        file.write_text(dump_yaml({**BASE, "storage_path": str(directory), **changes}))
        typed[f"file: {name}"] = ["trainers", str(file)]
    done = command("-c", ALL_IN_TURN, json.dumps(typed))
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_file(name: str, said: dict[str, Any]) -> None:
    check(*said[f"file: {name}"], [f"{name.replace(' ', '-')}.yaml", *FILES[name][1]])


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name: str, said: dict[str, Any]) -> None:
    check(*said[f"option: {name}"], OPTIONS[name][1])


@pytest.mark.parametrize("name", WITH_TORCH)
def test_what_torch_has_to_say(name: str, tmp_path: Path, command: Callable[..., Done]) -> None:
    changes, words = WITH_TORCH[name]
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml({**BASE, "storage_path": str(tmp_path / "runs"), **changes}))
    done = command("-m", "trainers", str(file), forked=True)
    check(done.code, done.out, done.err, [str(file), *words])
    assert not (tmp_path / "runs").exists(), "nothing was written"


def test_a_task_that_cannot_be_imported(tmp_path: Path, command: Callable[..., Done]) -> None:
    (tmp_path / "broken.py").write_text("import torch\nimport no_such_module\n")
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml({**BASE, "task": "broken:Task", "task_dir": str(tmp_path), "storage_path": "runs"}))
    done = command("-m", "trainers", str(file), cwd=tmp_path, forked=True)
    check(done.code, done.out, done.err, ["No module named 'no_such_module', at broken.py:2"])


def test_another_run_of_the_same_name_is_not_overwritten(tmp_path: Path, command: Callable[..., Done]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml({**BASE, "storage_path": str(tmp_path / "runs"), "device": "cpu"}))
    run = ["-m", "trainers", str(file)]
    assert command(*run, forked=True).code == 0
    again = command(*run, forked=True)
    assert again.code == 0
    assert "is complete already" in again.out
    other = command(*run, "--seed", "1", forked=True)
    check(other.code, other.out, other.err, ["`seed` is 1, but differs from 0", "--fresh"])
    assert command(*run, "--seed", "1", "--fresh", forked=True).code == 0
