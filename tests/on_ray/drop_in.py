"""A user's script with the drop-in Tuner and TorchTrainer.

Prints what each of its sweeps gave as JSON.

Run as: python -m tests.on_ray.drop_in DIRECTORY
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.tune
import torch
from ray.train import ValidationConfig
from ray.train.v2.api.callback import UserCallback
from ray.tune.integration.ray_train import TuneReportCallback

from tests import lane_functions
from tests.on_ray.embedded import actors, tasks
from tune.ray import TorchTrainer, Tuner


def train(config):
    """Two dense layers, with a checkpoint after each epoch."""
    lane_functions.train(config)
    assert len(ray.train.get_all_reported_checkpoints()) == 2
    return f"rank {ray.train.get_context().get_world_rank()}"


LEFT = []


def leaks(config):
    """Leaves behind what its configuration says; reports what it found, and
    how many rows it was given.
    """
    if not ray.is_initialized():  # as it is in Ray's workers
        ray.init(num_cpus=1)
    assert ray.tune.get_context().get_trial_id() is None
    assert logging.getLogger("own").isEnabledFor(logging.INFO)
    found = [
        torch.get_default_dtype() == torch.float64,
        "LEFT_HERE" in os.environ,
        torch.add is not ADD,
        *LEFT,
    ]
    if config["case"] == "leaks":
        torch.set_default_dtype(torch.float64)
        os.environ["LEFT_HERE"] = "1"
        torch.add = lambda *args: 0
        LEFT.append(1)
        threading.Thread(
            target=time.sleep, args=(600,), name="left here", daemon=True
        ).start()
    ray.train.report(
        {
            "found": sum(map(bool, found)),
            "rows": len(config["rows"]),
            "process": os.getpid(),
        }
    )


ADD = torch.add


class Noting(UserCallback):
    """Notes what the user's own callbacks hear."""

    def __init__(self):
        self.heard = []

    def after_report(self, run_context, metrics, checkpoint):
        self.heard.append(len(metrics))


BEST = 4.0
DRIVEN = []
"""The trials whose driver has run in this process."""


def slow(config):
    """Reports a line of its own slope, so that a scheduler knows early; the
    others begin when the best is half done.
    """
    half_done = Path(config["directory"], "half-done")
    is_best = config["slope"] == BEST
    for step in range(40):
        while not is_best and not half_done.exists():
            time.sleep(0.01)
        if is_best and step == 20:
            half_done.touch()
        time.sleep(
            0.01 if is_best else 0.2 if step < 20 else 10.0
        )  # minutes in which to hear that it is to stop
        ray.train.report(
            {"score": step * config["slope"], "process": os.getpid()}
        )


FAILS = {"retried": 1, "failed": 2, "whole": -1}


def cases(config):
    """Fails, or leaks, as its configuration says."""
    if (case := config["case"]) in FAILS:
        lane_functions.train({**config, "fails": FAILS[case]})
    else:
        leaks(config)


SWEEPS = {
    "train": (
        train,
        2,
        {"lr": 1e-2, "batch_size": [16, 64], "validates": True},
    ),
    "cases": (
        cases,
        1,
        {
            "lr": 1e-2,
            "batch_size": 64,
            "shuffle": True,
            "case": [*FAILS, "leaks", "clean"],
        },
    ),
    "stops": (slow, 1, {"slope": [BEST, 0.5]}),
}
"""The training function, its workers, and the grid of its configuration."""


def sweep(name, storage):
    """Run one of them."""
    function, workers, values = SWEEPS[name]

    def driver(config):
        callback = Noting()
        trainer = TorchTrainer(
            function,
            train_loop_config=config,
            validation_config=ValidationConfig(
                lambda checkpoint: {"validated": 1},
                ray_remote_kwargs={"num_cpus": 0},
            ),
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name=ray.tune.get_context().get_trial_id(),
                storage_path=storage,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                failure_config=ray.train.FailureConfig(
                    max_failures=int(config.get("case") == "retried")
                ),
                callbacks=[TuneReportCallback(), callback],
            ),
        )
        result = trainer.fit()
        DRIVEN.append(config)
        said = {
            "returned": result.return_value,
            "kept": len(result.best_checkpoints or []),
            "driven": len(DRIVEN),
        }
        yield {"heard": len(callback.heard), **said, **(result.metrics or {})}

    def with_rows(config, rows):
        more = ray.get(config.pop("more"))
        return driver({**config, "rows": rows + more})

    trainable: Any = driver
    if name == "cases":
        trainable = ray.tune.with_parameters(with_rows, rows=[0.0] * 600)
        values = {**values, "more": ray.put([0.0] * 400)}
    scheduler = ray.tune.schedulers.ASHAScheduler(
        max_t=40, grace_period=4, reduction_factor=2
    )
    judged = (
        {"metric": "score", "mode": "max", "scheduler": scheduler}
        if name == "stops"
        else {}
    )
    tuner = Tuner(
        trainable,
        param_space={"directory": storage}
        | {
            key: ray.tune.grid_search(value)
            if isinstance(value, list)
            else value
            for key, value in values.items()
        },
        tune_config=ray.tune.TuneConfig(**judged),
        run_config=ray.tune.RunConfig(
            name=name, storage_path=storage, verbose=0
        ),
    )
    trials = []
    for result in tuner.fit():
        table = result.metrics_dataframe
        rows = (
            []
            if table is None
            else json.loads(table.to_json(orient="records"))
        )
        trials.append(
            {
                "config": {**result.config, "more": None},
                "error": str(result.error or "")[-300:],
                "rows": rows,
            }
        )
    shown = [
        actor.repr_name
        for actor in actors()
        if actor.repr_name.startswith(f"{name}, ")
    ]
    said = [
        task
        for task in tasks()
        if task.startswith(f"{name}, lane ") and ": trial " in task
    ]
    return {
        "trials": trials,
        "restarts": tuner.restarts,
        "shown": shown,
        "said": said,
    }


if __name__ == "__main__":
    for each in SWEEPS:
        print("JSON", each, json.dumps(sweep(each, sys.argv[1])), flush=True)
