"""Scripts in the form that Ray's documentation teaches, as a user of plain Ray
has them.

Run as: ray_scripts.py STORAGE KIND..., each of which is a key of SCRIPTS.
Prints the trials of each as a line of JSON.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray import tune
from ray.train.torch import TorchTrainer
from ray.tune import Tuner
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6


def points() -> TensorDataset:
    plane = torch.randn(256, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(
        plane, (plane[:, 1] > plane[:, 0].square() - 0.5).long()
    )


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int
) -> float:
    features, labels = points().tensors
    for rows in torch.randperm(
        256, generator=torch.Generator().manual_seed(epoch)
    ).split(64):
        loss = F.cross_entropy(model(features[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(features), labels).item()


def new_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(config):
    """Goes on from a checkpoint, if there is one, and reports one after each epoch."""
    model = new_model()
    optimizer = new_optimizer(model, config["lr"])
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None and config.get("parent"):
        checkpoint = ray.train.Checkpoint(config["parent"])
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for group in optimizer.param_groups:
        group["lr"] = config["lr"]
    for epoch in range(start, config.get("until", EPOCHS)):
        loss = train_epoch(model, optimizer, epoch)
        if (
            "fail_once" in config
            and epoch == 2
            and not (marker := Path(config["fail_once"])).exists()
        ):
            marker.touch()
            raise RuntimeError("as by a node that was lost")
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, Path(directory, "state.pt"))
            report = {"loss": loss, "epoch": epoch}
            ray.train.report(
                report,
                checkpoint=ray.train.Checkpoint.from_directory(directory),
            )


def train_lightning(config):
    import lightning.pytorch as lightning
    from ray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Points(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = new_model()

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.log(
                "loss", loss, on_step=False, on_epoch=True, sync_dist=True
            )
            return loss

        def configure_optimizers(self):
            return new_optimizer(self, config["lr"])

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="auto",
        devices="auto",
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    prepare_trainer(trainer).fit(
        Points(), DataLoader(points(), batch_size=32, shuffle=True)
    )


class Classifier(nn.Module):
    """A model as transformers' Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.layers = new_model()

    def forward(self, features, labels):
        logits = self.layers(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def train_transformers(config):
    from ray.train.huggingface.transformers import (
        RayTrainReportCallback,
        prepare_trainer,
    )
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=3,
            per_device_train_batch_size=32,
            learning_rate=config["lr"],
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        rows = [
            {"features": features, "labels": label}
            for features, label in points()
        ]
        trainer = Trainer(
            Classifier(), arguments, train_dataset=rows, eval_dataset=rows[:64]
        )
        trainer.add_callback(RayTrainReportCallback())
        prepare_trainer(trainer).train()


def fit(function, config, **run_config):
    trainer = TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.get("workers", 1)
        ),
        run_config=ray.train.RunConfig(
            storage_path=config["storage"], **run_config
        ),
    )
    return trainer.fit()


def driver(config):
    fit(train, config, callbacks=[TuneReportCallback()])


def own_name():
    """Runs without one are named by the second, and two that begin in the same
    one share their checkpoints.
    """
    return f"trial-{tune.get_context().get_trial_id()}"


def driver_of_lightning(config):
    fit(
        train_lightning,
        config,
        callbacks=[TuneReportCallback()],
        name=own_name(),
    )


def driver_of_transformers(config):
    fit(
        train_transformers,
        config,
        callbacks=[TuneReportCallback()],
        name=own_name(),
    )


def driver_that_goes_on(config):
    """A run with the name of its trial goes on from the run's newest checkpoint."""
    fit(train, config, callbacks=[TuneReportCallback()], name=own_name())


def driver_of_population(config):
    """Trains an epoch at a time, from the checkpoint that Tune hands over."""
    start = 0
    path = None
    if (parent := tune.get_checkpoint()) is not None:
        path = parent.path
        start = (
            torch.load(Path(path, "state.pt"), weights_only=True)["epoch"] + 1
        )
    for epoch in range(start, 4):
        result = fit(train, {**config, "parent": path, "until": epoch + 1})
        path = result.checkpoint.path
        tune.report(result.metrics, checkpoint=tune.Checkpoint(path))


def halved(config):
    return {**config, "lr": config["lr"] / 2}


def asha(space):
    scheduler = ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=2)
    judged = {
        "metric": "loss",
        "mode": "min",
        "scheduler": scheduler,
        "max_concurrent_trials": 1,
    }
    return (
        driver,
        {**space, "lr": tune.grid_search([0.03, 0.1, 0.001, 0.01])},
        judged,
    )


def optuna(space):
    from optuna.samplers import TPESampler
    from ray.tune.search.optuna import OptunaSearch

    search = OptunaSearch(
        metric="loss",
        mode="min",
        sampler=TPESampler(seed=0, n_startup_trials=2),
    )
    searched = {
        "search_alg": search,
        "num_samples": 4,
        "max_concurrent_trials": 1,
    }
    return (
        driver,
        {**space, "lr": tune.loguniform(1e-3, 1e-1), "until": 2},
        searched,
    )


def pbt(space):
    scheduler = PopulationBasedTraining(
        metric="loss",
        mode="min",
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.5,
        custom_explore_fn=halved,
        synch=True,
    )
    return (
        driver_of_population,
        {**space, "lr": tune.grid_search([0.2, 0.001])},
        {"scheduler": scheduler},
    )


def lightning(space):
    return (
        driver_of_lightning,
        {**space, "lr": tune.grid_search([0.1, 0.01]), "workers": 2},
        {},
    )


def transformers(space):
    return (
        driver_of_transformers,
        {**space, "lr": tune.grid_search([0.1, 0.01]), "workers": 2},
        {},
    )


def restore(space):
    failing = {
        "lr": tune.grid_search([0.1, 0.01]),
        "fail_once": f"{space['storage']}-failed",
    }
    return (
        driver_that_goes_on,
        {**space, **failing},
        {"max_concurrent_trials": 1},
    )


SCRIPTS = {
    one.__name__: one
    for one in (asha, pbt, optuna, lightning, transformers, restore)
}


def weights(path):
    """Those in a checkpoint of any of the functions."""
    if (file := Path(path, "state.pt")).exists():
        found = torch.load(file, weights_only=True)["model"]
    elif (file := Path(path, "checkpoint.ckpt")).exists():
        found = torch.load(file, weights_only=False)["state_dict"]
    else:
        found = load_file(Path(path, "checkpoint", "model.safetensors"))
    return torch.cat(
        [value.flatten() for _, value in sorted(found.items())]
    ).tolist()


def told(result):
    """What a script's user sees of a trial: its learning rate, its rows and
    its newest checkpoint.
    """
    names = ("loss", "eval_loss", "epoch", "training_iteration")
    rows = [
        {name: row[name] for name in names if name in row}
        for row in result.metrics_dataframe.to_dict("records")
    ]
    path = result.metrics.get("checkpoint_path") or result.checkpoint.path
    return {
        "lr": result.config["lr"],
        "rows": rows,
        "weights": weights(path),
        "error": str(result.error or ""),
    }


def sweep(kind, storage):
    """Run one of them; returns its ResultGrid."""
    trainable, space, config = SCRIPTS[kind](
        {"storage": f"{storage}/{kind}-train"}
    )
    tuner = Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(**config),
        run_config=tune.RunConfig(name=kind, storage_path=storage),
    )
    results = tuner.fit()
    if kind == "restore":
        assert len(results.errors) == 1
        results = Tuner.restore(
            f"{storage}/{kind}", trainable, resume_errored=True
        ).fit()
    return results


if __name__ == "__main__":
    ray.init(**({} if "RAY_ADDRESS" in os.environ else {"num_cpus": 6}))
    for kind in sys.argv[2:]:
        print(
            "TRIALS",
            kind,
            json.dumps([told(result) for result in sweep(kind, sys.argv[1])]),
            flush=True,
        )
