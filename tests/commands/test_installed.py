"""Paceline installed from its wheel, used from a repository that holds nothing of ours."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

USER_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainers.task import Task
from helpers import CLASSES


class Mine(Task):
    def model(self):
        return nn.Linear(8, CLASSES)

    def dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(300, 8, generator=generator)
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])
"""
TRAIN = "task: mine:Mine\nname: mine\nepochs: 3\nglobal_batch_size: 16\noptimizer: {lr: 0.05}\n"
SWEEP = "name: s\ntrain: train.yaml\nspace: {global_batch_size: [16, 32]}\nobjective: {metric: val_loss}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Paceline's wheel, unpacked to a directory of its own."""
    directory = tmp_path_factory.mktemp("wheel")
    # fmt: off
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory),
                    str(REPOSITORY)], check=True, cwd=directory, stdin=subprocess.DEVNULL)
    built, = directory.glob("paceline-*.whl")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory / "site"),
                    str(built)], check=True, cwd=directory, stdin=subprocess.DEVNULL)
    # fmt: on
    return directory / "site"


@pytest.fixture
def user_repository(tmp_path):
    repository = tmp_path / "theirs"
    (repository / "configs").mkdir(parents=True)
    (repository / "configs/train.yaml").write_text(TRAIN)
    (repository / "configs/sweep.yaml").write_text(SWEEP)
    (repository / "mine.py").write_text(USER_TASK)
    (repository / "helpers.py").write_text("CLASSES = 4\n")
    return repository


@pytest.mark.full
def test_wheel_has_what_it_needs(wheel):
    for name in (
        "trainers/py.typed",
        "tune/report/report.html",
        "cluster/files/schemas.yaml",
        "cluster/aws.yaml",
    ):
        assert (wheel / name).is_file(), name
    assert not (wheel / "tests").exists()
    assert not (wheel / "examples").exists()


@pytest.mark.full
def test_from_a_repository_of_the_users_own(wheel, user_repository, tmp_path, command):
    installed = {
        "PYTHONPATH": str(wheel),
        "PACELINE_STORAGE": str(tmp_path / "storage"),
    }
    script = (sys.executable, str(wheel / "bin/paceline-train"))
    where = command(
        "-c", "import trainers; print(trainers.__file__)", cwd=tmp_path, env=installed
    )
    assert where.out.startswith(str(wheel)), "the wheel is what is tested"
    done = command(
        "configs/train.yaml",
        "--launcher",
        "local",
        program=script,
        cwd=user_repository,
        env=installed,
    )
    assert done.code == 0, done.err
    assert (tmp_path / "storage/mine/result.json").is_file()
    script = (sys.executable, str(wheel / "bin/paceline-sweep"))
    done = command(
        "configs/sweep.yaml", program=script, cwd=user_repository, env=installed
    )
    assert done.code == 0, done.err
    # The winner trains from anywhere: best.yaml remembers where the task is.
    best = tmp_path / "storage/s/best.yaml"
    done = command(
        "-m", "trainers", str(best), "--launcher", "local", cwd=tmp_path, env=installed
    )
    assert done.code == 0, done.err
