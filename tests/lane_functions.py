"""Training functions for Ray Train, as a sweep's file names them."""

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray import tune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOUND = []


def train(config: dict[str, Any]):
    """Two dense layers, with a checkpoint after each epoch; fails as its
    configuration says.
    """
    FOUND.append(1)
    print("own words")
    assert len(FOUND) == 1, "an earlier trial has left this behind"
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank = context.get_world_rank()
    size = context.get_world_size()
    assert context.get_storage().experiment_fs_path.endswith(
        context.get_experiment_name()
    )
    assert ray.train.collective.broadcast_from_rank_zero(rank) == 0
    if "note" in config and rank == 0:
        with Path(config["note"]).open("a") as file:
            file.write(f"{config['batch_size']}-{config.get('place')}\n")
    model = ray.train.torch.prepare_model(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    begun = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
            getattr(model, "module", model).load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            begun = state["epoch"] + 1
    rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(
        rows, (rows.sum(1) > 0).long() + (rows[:, 0] > 1).long()
    )
    order = {
        "batch_size": config["batch_size"],
        "shuffle": config.get("shuffle", False),
    }
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, **order))
    for epoch in range(begun, 3):
        if config.get("fails") == epoch and not begun:
            raise RuntimeError("asked to fail")
        for features, labels in loader:
            place = (
                config.get("place")
                if rank == size - 1 and config["batch_size"] >= 64
                else None
            )
            outputs = model(features)
            if place == "backward":
                outputs.register_hook(_run_out)
            loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            if place == "optimizer":
                _run_out()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if rank == 0:
                state = {
                    "model": getattr(model, "module", model).state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(
                    {**state, "epoch": epoch}, Path(directory, "state.pt")
                )
                kept = ray.train.Checkpoint.from_directory(directory)
            ray.train.report(
                {"loss": loss.item(), "epoch": epoch, "words": "no number"},
                checkpoint=kept,
                validation=kept is not None and "validates" in config,
            )


def _run_out(gradient: Any = None):
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )


def by_tune(config: dict[str, Any]):
    """Knows only `ray.tune`."""
    for step in range(3):
        tune.report(
            {
                "loss": config["lr"] / (step + 1),
                "drawn": random.random(),
                "process": os.getpid(),
                7: 1.0,  # a name that is no text
            }
        )
