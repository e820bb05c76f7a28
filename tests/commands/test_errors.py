"""A mistake in a file: one sentence with field, value, rule and fix; exit code 2; before any worker starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, Done
from tests.specs import BASE
from trainers.config.yaml import dump_yaml

MODULES = ("torch", "ray")

# changes to a good file, what the sentence must say
WITHOUT_TORCH: list[tuple[dict[str, Any], list[str]]] = [
    ({"precison": "bf16"}, ["`precison`", '"bf16"', "did you mean `precision`?"]),
    ({"optimizer": {"name": "adamw", "lr": 0.1, "weight_deacy": 1}}, ["did you mean `optimizer.weight_decay`?"]),
    ({"global_batch_size": "64"}, ["`global_batch_size`", '"64"', "whole number", "for example"]),
    ({"global_batch_size": 0}, ["`global_batch_size` is 0", "at least 1"]),
    ({"batch_size_per_worker": 8}, ["`batch_size_per_worker` is 8", "conflicts with global_batch_size", "keep"]),
    ({"task": None}, ["`task`", "must be"]),
    ({"task": "tests.taks:Blobs"}, ['"tests.taks:Blobs"', "cannot be found: no tests/taks.py"]),
    ({"precision": "bf17"}, ["`precision`", '"bf17"', "'bf16'"]),
    (
        {"scaling": {"num_workers": 4096}, "launcher": "spawn"},
        ["`scaling.num_workers` is 4096", "fit on this machine", "set it to at most"],
    ),
    ({"scaling": {"num_workers": 4096}, "launcher": "ray"}, ["`scaling.num_workers` is 4096", "at most"]),
]
WITH_TORCH: list[tuple[dict[str, Any], list[str]]] = [
    ({"task": "tests.tasks:Blob"}, ["did you mean `tests.tasks:Blobs`?"]),
    ({"task": "tests.tasks:NotATask"}, ["is not a trainers.task.Task"]),
    ({"task_args": {"sample": 3}}, ["`task_args`", "sample", "its signature is Blobs("]),
    ({"precision": "tf32", "device": "cpu"}, ["`precision`", '"tf32"', "cpu", "use one of fp32, bf16"]),
    ({"device": "mps"}, ["`device`", '"mps"', "set `device: auto`"]),
]


def without_torch(package: str, *args: str) -> str:
    """A script: the command in an interpreter that can import neither torch nor Ray."""
    blocker = f"import sys; sys.modules.update(dict.fromkeys({MODULES!r})); sys.argv[1:] = {list(args)!r}"
    return f"{blocker}; from {package}.__main__ import main; raise SystemExit(main())"


def one_sentence(done: Done) -> str:
    assert done.code == 2, done.err
    lines = [line for line in done.err.splitlines() if line]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.out + done.err
    return lines[0]


@pytest.mark.parametrize(("changes", "words"), WITHOUT_TORCH, ids=lambda value: str(value)[:40])
def test_no_torch_is_needed_to_know_it(
    changes: dict[str, Any], words: list[str], tmp_path: Path, command: Callable[..., Done]
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml({**BASE, "storage_path": str(tmp_path), **changes}))
    # An interpreter in which neither torch nor Ray can be imported is the proof that they are not.
    sentence = one_sentence(command("-c", without_torch("trainers", str(file))))
    assert all(word in sentence for word in [str(file), *words]), sentence


@pytest.mark.parametrize(("changes", "words"), WITH_TORCH, ids=lambda value: str(value)[:40])
def test_torch_is_needed_to_know_it(
    changes: dict[str, Any], words: list[str], tmp_path: Path, command: Callable[..., Done]
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml({**BASE, "storage_path": str(tmp_path / "runs"), **changes}))
    sentence = one_sentence(command("-m", "trainers", str(file), forked=True))
    assert all(word in sentence for word in [str(file), *words]), sentence
    assert not (tmp_path / "runs").exists(), "nothing was written"


def test_a_task_that_cannot_be_imported(tmp_path: Path, command: Callable[..., Done]) -> None:
    (tmp_path / "broken.py").write_text("import torch\nimport no_such_module\n")
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml({**BASE, "task": "broken:Task", "task_dir": str(tmp_path), "storage_path": "runs"}))
    sentence = one_sentence(command("-m", "trainers", str(file), cwd=tmp_path))
    assert "No module named 'no_such_module', at broken.py:2" in sentence


def test_overrides_are_checked_like_files(command: Callable[..., Done]) -> None:
    train = "examples/digits/train.yaml"
    for args, words in (
        (["--optimizer.lr", "fast"], ["`optimizer.lr`", '"fast"', "number"]),
        (["--optimizer.lr"], ["needs a value"]),
        (["--storage_path", "s4://bucket/x", "--launcher", "local"], ["`storage_path`", "s4://bucket/x"]),
        (["oops"], ["`oops`", "is one argument too many"]),
    ):
        sentence = one_sentence(command("-m", "trainers", train, *args))
        assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--space", "{precison: [fp32]}"], ["space.precison", "did you mean"]),
        (["--space", "{precision: [fp32, bf17]}"], ["space.precision", '"bf17"']),
        (["--space", "{global_batch_size: {min: 8, max: 64}}"], ["`search`", "set `search: random`"]),
        (["--objective", "{metric: time_to_target}"], ["objective.target", "add `target:"]),
        (["--searh", "grid"], ["`searh`", "did you mean `search`?"]),
        (["--train.optimizer.lr", "-1"], ["`optimizer.lr` is -1", "greater than 0"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sweeps(args: list[str], words: list[str], command: Callable[..., Done]) -> None:
    sentence = one_sentence(command("-c", without_torch("tune", "examples/digits/sweep.yaml", *args)))
    assert all(word in sentence for word in words), sentence


def test_relative_storage_inside_a_ray_job(command: Callable[..., Done]) -> None:
    inside = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    sentence = one_sentence(command("-m", "trainers", "examples/digits/train.yaml", env=inside))
    assert "`storage_path`" in sentence
    assert "set PACELINE_STORAGE" in sentence


def test_help_names_every_key(command: Callable[..., Done]) -> None:
    for package in ("trainers", "tune"):
        done = command("-m", package, "--help")
        assert done.code == 0
        assert "python -m" in done.out
    assert "scaling.num_workers" in command("-m", "trainers", "--help").out
    assert "objective.target" in done.out


def test_another_run_of_the_same_name_is_not_overwritten(tmp_path: Path, command: Callable[..., Done]) -> None:
    # fmt: off
    args = ["-m", "trainers", str(REPOSITORY / "examples/digits/train.yaml"), "--launcher", "local",
            "--storage_path", str(tmp_path), "--epochs", "1"]
    # fmt: on
    assert command(*args, forked=True).code == 0
    again = command(*args, forked=True)
    assert again.code == 0
    assert "is complete already" in again.out
    sentence = one_sentence(command(*args, "--seed", "1", forked=True))
    assert "`seed` is 1, but differs from 0" in sentence
    assert "--fresh" in sentence
    assert command(*args, "--seed", "1", "--fresh", forked=True).code == 0
