"""A relative path in a task starts at the command's directory, by Ray as without it."""

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.ray

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainers import Task

class Mine(Task):
    def model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        return TensorDataset(torch.load("data/points.pt"))

    def loss(self, outputs, batch):
        return outputs.square().mean()
"""
RUN = """
task: mine:Mine
name: run
max_steps: 2
global_batch_size: 4
optimizer: {lr: 0.01}
"""
SWEEP = """
name: sweep
train: conf/train.yaml
space: {global_batch_size: [4]}
objective: {metric: val_loss}
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [("trainers", "conf/train.yaml"), ("tune", "sweep.yaml")]
)
def test_a_task_finds_its_data(arguments, tmp_path, command):
    import torch

    for name in ("conf", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "conf" / "train.yaml").write_text(RUN)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    torch.save(torch.ones(8, 2), tmp_path / "data" / "points.pt")
    done = command("-m", *arguments, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert done.code == 0, done.out + done.err
