"""Hooks of a Task: when they are called, with what, and that a task without
them pays nothing.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.unit.test_loop import Context, config
from trainers.loop.fit import fit
from trainers.task import Task

STEPS = 12
LIMIT = 0.3


class Clipped(Task):
    """A critic as in WGAN: its weights are clipped after every step.

    Every call leaves a line in a file.
    """

    def __init__(self, calls):
        self.calls = calls
        self.seen = 0.0

    def model(self):
        return nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)
        ).double()

    def dataset(self, split):
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        return TensorDataset(
            torch.randn(20, 4, generator=generator, dtype=torch.float64)
        )

    def loss(self, outputs, batch):
        return (outputs - batch[0].sum(1, keepdim=True)).square().mean()

    def after_step(self, model, step):
        assert not torch.is_grad_enabled()
        for parameter in model.parameters():
            parameter.clamp_(-LIMIT, LIMIT)
        self.say(f"step {step}")

    def on_evaluate(self, metrics, step):
        self.seen = metrics["val_loss"]
        self.say(f"evaluated {step} {metrics['val_loss']!r}")

    def say(self, words):
        with self.calls.open("a") as file:
            file.write(f"{words}\n")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


CHANGES = {
    "max_steps": STEPS,
    "microbatch_size": "auto",
    "lr_schedule": {},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "clip_grad_norm": None,
    "evaluate": {"every_steps": 4},
}


def test_each_step_and_each_evaluation_is_told_once_and_no_other_pass(
    tmp_path,
):
    context = Context(tmp_path / "run")
    fit(Clipped(tmp_path / "calls"), config(**CHANGES), context)
    figures = {
        row["step"]: row["val_loss"]
        for row, _ in context.reports
        if "val_loss" in row
    }
    expected = []
    for step in range(1, STEPS + 1):
        expected += [f"step {step}"] + (
            [f"evaluated {step} {figures[step]!r}"] if step % 4 == 0 else []
        )
    assert (tmp_path / "calls").read_text().splitlines() == expected
