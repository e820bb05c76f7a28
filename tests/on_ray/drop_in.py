"""A user's script: Ray's Tuner and TorchTrainer, from Ray or from Paceline. Prints what a sweep gave as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import ray.tune
import torch
from ray.train.v2.api.callback import UserCallback
from ray.tune.integration.ray_train import TuneReportCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, Any]) -> str:
    """Two dense layers, with a checkpoint after each epoch."""
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    begun = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
            nn.modules.utils.consume_prefix_in_state_dict_if_present(state["model"], "module.")
            getattr(model, "module", model).load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            begun = state["epoch"] + 1
    rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, (rows.sum(1) > 0).long() + (rows[:, 0] > 1).long())
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=config["batch_size"], shuffle=True))
    for epoch in range(begun, config.get("epochs", 3)):
        if config.get("fails") == epoch and not begun:
            raise RuntimeError("asked to fail")
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            kept = None
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(directory, "state.pt"))
                kept = ray.train.Checkpoint.from_directory(directory)
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=kept)
    assert len(ray.train.get_all_reported_checkpoints()) == min(2, config.get("epochs", 3))
    return f"rank {rank}"


LEFT: list[Any] = []


def leaks(config: dict[str, Any]) -> None:
    """Leaves behind what its configuration says; reports what it found."""
    found = [torch.get_default_dtype() == torch.float64, "LEFT_HERE" in os.environ, torch.add is not ADD, *LEFT]
    kind = config["leaves"]
    if kind == "dtype":
        torch.set_default_dtype(torch.float64)
    elif kind == "variable":
        os.environ["LEFT_HERE"] = "1"
    elif kind == "patch":
        torch.add = lambda *args: 0
    elif kind == "global":
        LEFT.append(1)
    elif kind == "thread":
        threading.Thread(target=time.sleep, args=(600,), name="left here", daemon=True).start()
    ray.train.report({"found": sum(map(bool, found)), "process": os.getpid()})


ADD = torch.add


class Noting(UserCallback):
    """Notes what the user's own callbacks hear."""

    def __init__(self) -> None:
        self.heard: list[float] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.heard.append(len(metrics))


BEST = 4.0


def slow(config: dict[str, Any]) -> None:
    """Reports a line of its own slope, so that a scheduler knows early; the others begin when the best is half done."""
    half_done = Path(config["directory"], "half-done")
    is_best = config["slope"] == BEST
    for step in range(40):
        while not is_best and not half_done.exists():
            time.sleep(0.01)
        if is_best and step == 20:
            half_done.touch()
        time.sleep(0.01 if is_best else 0.2)  # it hears within 36 of its steps that it is to stop
        ray.train.report({"score": step * config["slope"], "process": os.getpid()})


def draws(config: dict[str, Any]) -> None:
    """Reports what depends on the trials before it in the same process, in the state of a C library."""
    ray.train.report({"score": ctypes.CDLL(None).lrand48(), "process": os.getpid()})


def main(way: str, sweeps: str, storage: str) -> None:
    """Run some of the sweeps below, with commas between their names."""
    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=2 if way == "ours" else 6)  # Ray's way reserves one for each trial's driver
    if way == "ours":
        from tune.ray import TorchTrainer, Tuner
    else:
        from ray.train.torch import TorchTrainer
        from ray.tune import Tuner
    for name in sweeps.split(","):
        print("JSON", name, json.dumps(sweep(way, name, storage, TorchTrainer, Tuner)), flush=True)


SWEEPS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "train": (train, 2, {"lr": 1e-2, "batch_size": [16, 64]}),
    "retries": (train, 1, {"lr": 1e-2, "batch_size": 16, "fails": [1]}),
    "fails": (train, 1, {"lr": 1e-2, "batch_size": 16, "fails": [1, 2, -1]}),
    "leaks": (
        leaks,
        1,
        {"leaves": ["no", "dtype", "variable", "patch", "global", "no", "thread", "no", "thread", "no", "no"]},
    ),
    "stops": (slow, 1, {"slope": [BEST, 3.0, 2.0, 1.0, 0.5]}),
    "draws": (draws, 1, {"x": [0, 1, 2]}),
}
"""The training function, its workers, and the grid of its configuration."""


def sweep(way: str, name: str, storage: str, trainer_class: Any, tuner_class: Any) -> dict[str, Any]:
    """Run one of them, with Ray's classes or Paceline's."""
    function, workers, values = SWEEPS[name]
    stops = name == "stops"

    def driver(config: dict[str, Any]) -> None:
        callback = Noting()
        trainer = trainer_class(
            function,
            train_loop_config=config,
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name=f"{way}-{ray.tune.get_context().get_trial_id()}",
                storage_path=storage,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                failure_config=ray.train.FailureConfig(max_failures=int(config.get("fails") == 1)),
                callbacks=[TuneReportCallback(), callback],
            ),
        )
        result = trainer.fit()
        said = {"returned": result.return_value, "kept": len(result.best_checkpoints or [])}
        ray.tune.report({"heard": len(callback.heard), **said, **(result.metrics or {})})

    scheduler = ray.tune.schedulers.ASHAScheduler(max_t=40, grace_period=4, reduction_factor=2)
    judged = {"metric": "score", "mode": "max", "scheduler": scheduler} if stops else {}
    tuner = tuner_class(
        driver,
        param_space={"directory": storage}
        | {key: ray.tune.grid_search(value) if isinstance(value, list) else value for key, value in values.items()},
        tune_config=ray.tune.TuneConfig(**judged),
        run_config=ray.tune.RunConfig(name=f"{way}-{name}", storage_path=storage, verbose=0),
    )
    trials = []
    for result in tuner.fit():
        table = result.metrics_dataframe
        rows = [] if table is None else json.loads(table.to_json(orient="records"))
        keys = ("loss", "epoch", "found", "process", "score", "heard", "returned", "kept")
        kept = [{key: row[key] for key in keys if row.get(key) is not None} for row in rows]
        trials.append({"config": result.config, "error": str(result.error or "")[-300:], "rows": kept})
    return {"trials": trials, "restarts": getattr(tuner, "restarts", [])}


if __name__ == "__main__":
    main(*sys.argv[1:])
