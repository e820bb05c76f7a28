"""The peer of benchmarks/head.py: the same trials as Ray documents it, a Tuner over TorchTrainers.

Run as: python -m benchmarks.head_plain          (in a job; it goes on with what Tune has kept, by `Tuner.restore`)
https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from examples.digits.task import Digits
from tests.lab.held_sweep import BATCH, DIRECTORY, RATES, STEPS
from tests.lab.hosts import REPOSITORY

COMMAND = f"env PYTHONPATH={REPOSITORY} python -m benchmarks.head_plain"  # .rayignore leaves it out of a job
RECORDS = "held/ended/*"
_STORAGE = f"{DIRECTORY}/runs"


def train(config: dict[str, Any]) -> None:
    """What the worker of a trial runs."""
    import ray.train
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader

    held, task = runpy.run_path(f"{DIRECTORY}/held.py"), Digits()
    held["note"]("begun", config["lr"])
    model = ray.train.torch.prepare_model(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = DataLoader(task.dataset("train"), batch_size=BATCH, shuffle=True)
    step, loss = 0, torch.tensor(torch.nan)
    while step < STEPS:
        for batch in loader:
            held["hold"](config["lr"])
            images, labels = task.transform(batch, training=True)
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == STEPS:
                break
    ray.train.report({"loss": loss.item()})


def drive(config: dict[str, Any]) -> None:
    """A trial."""
    import ray.train
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name=f"trial-{config['lr']}",
            storage_path=_STORAGE,
            callbacks=[TuneReportCallback()],  # type: ignore[list-item]
        ),
    ).fit()
    Path(DIRECTORY, "ended", str(config["lr"])).touch()  # for who measures


def main() -> None:
    """The sweep, two trials at a time."""
    import ray
    from ray import tune

    ray.init()
    beside_driver = {f"node:{ray.util.get_node_ip_address()}": 0.001}  # else Ray may put a trial on the head
    Path(DIRECTORY, "ended").mkdir(exist_ok=True)
    where, trainable = f"{_STORAGE}/sweep", tune.with_resources(drive, beside_driver)
    if tune.Tuner.can_restore(where):
        tuner = tune.Tuner.restore(where, trainable, resume_unfinished=True, restart_errored=True)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={"lr": tune.grid_search(RATES)},
            tune_config=tune.TuneConfig(max_concurrent_trials=2),
            run_config=tune.RunConfig(name="sweep", storage_path=_STORAGE),
        )
    if errors := tuner.fit().errors:
        raise RuntimeError(f"{len(errors)} trials failed: {errors[0]}")


if __name__ == "__main__":
    main()
