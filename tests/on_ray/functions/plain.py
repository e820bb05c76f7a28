"""Functions for Tune alone, without Ray Train."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import tune
from torch import nn


def descent(config: dict[str, Any]) -> None:
    """Tune, first steps: a loop that reports a number again and again."""
    torch.manual_seed(30)
    inputs = torch.randn(64, 4)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1 * torch.randn(64)
    weights = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=config["lr"])
    for step in range(6):
        loss = nn.functional.mse_loss(inputs @ weights, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tune.report({"loss": loss.item(), "step": step})


def with_checkpoints(config: dict[str, Any]) -> None:
    """Tune, trial checkpoints: the state after each step goes along with the report, and is where a new try starts."""
    state = {"step": 0, "value": float(config["start"])}
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = json.loads(Path(directory, "state.json").read_text())
    while state["step"] < 5:
        if config["fails"] and checkpoint is None and state["step"] == 3:
            raise RuntimeError("this step succeeds at the second try only")
        state = {"step": state["step"] + 1, "value": state["value"] * 0.7 + 0.01}
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state.json").write_text(json.dumps(state))
            tune.report({"loss": state["value"], "step": state["step"]}, checkpoint=tune.Checkpoint(directory))


def final_dictionary(config: dict[str, Any]) -> dict[str, Any]:
    """Tune, first steps: a function that reports nothing and returns its metrics at the end."""
    torch.manual_seed(config["seed"])
    samples = torch.rand(10_000, 2)
    inside = samples.square().sum(dim=1) <= 1
    estimate = 4 * inside.double().mean().item()
    return {"loss": abs(estimate - torch.pi), "estimate": estimate}
