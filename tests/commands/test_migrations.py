"""docs/migrate.md without Ray: its diffs apply, and what they make trains as the script before it did."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import migrations
from tests.conftest import Done, free_port


def val_loss(directory: Path) -> float:
    """The last evaluation of the one run below a directory."""
    [result] = directory.glob("results/*/result.json")
    return float(json.loads(result.read_text())["metrics"]["val_loss"])


def migrate(command: Callable[..., Done], section: str, directory: Path, *arguments: str) -> float:
    """What the task of a section reaches."""
    migrations.after(section, directory)
    done = command("-m", "trainers", "train.yaml", *arguments, cwd=directory, forked=True)
    assert done.code == 0, done.err
    return val_loss(directory)


def test_every_script_has_its_diff() -> None:
    found = [diff for section in migrations.sections() for diff in migrations.diffs(section)]
    assert len(found) == migrations.PAGE.count("```diff") == 7
    assert sorted(name for name, _, _ in found) == sorted(path.name for path in migrations.SCRIPTS.iterdir())


@pytest.mark.parametrize("hunk", ["@@\n one\n-two\n+2\n", "@@\n-three\n", "@@\n-on\n", "@@\n one\n+2\n@@\n-one\n"])
def test_a_diff_applies_as_it_is_or_not_at_all(hunk: str) -> None:
    if "three" in hunk or "-on\n" in hunk:
        with pytest.raises(AssertionError, match="not in the script"):
            migrations.patched("one\ntwo\n", hunk)
    else:
        assert migrations.patched("one\ntwo\n", hunk) == ("2\ntwo\n" if "-one" in hunk else "one\n2\n")


def test_plain_ddp(tmp_path: Path, command: Callable[..., Done]) -> None:
    script = migrations.before("Plain DDP", tmp_path)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}

    def rank(number: int) -> Done:  # as torchrun starts it
        ranks = {"RANK": str(number), "LOCAL_RANK": str(number)}
        return command("-m", script.removesuffix(".py"), cwd=tmp_path, env=world | ranks, forked=True)

    with ThreadPoolExecutor() as pool:
        done, _ = pool.map(rank, range(2))
    losses = re.findall(r"val_loss (\S+)", done.out)
    assert len(losses) == 5, done.err
    task = migrate(command, "Plain DDP", tmp_path, "--launcher", "spawn", "--scaling.num_workers", "2")
    assert task == pytest.approx(float(losses[-1]), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("section", ["Lightning", "transformers' Trainer"])
def test_a_trainer(section: str, tmp_path: Path, command: Callable[..., Done]) -> None:
    script = migrations.before(section, tmp_path)
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = command("-m", script.removesuffix(".py"), cwd=tmp_path, env=environment, forked=True)
    assert done.code == 0, done.err
    loss = re.findall(r"'(?:val|eval)_loss': ([\d.]+)", done.out)[-1]
    task = migrate(command, section, tmp_path, "--launcher", "local", "--device", "cpu")
    assert task == pytest.approx(float(loss), rel=1e-5)
