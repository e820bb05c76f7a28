"""Run as: python ray_tune.py"""

from pathlib import Path

import ray.train
import torch
from ray import tune
from ray.train.torch import TorchTrainer
from ray.tune import Tuner
from ray.tune.integration.ray_train import TuneReportCallback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STORAGE = str(Path("results").resolve())


def train(config):
    torch.manual_seed(0)
    plane = torch.randn(1024, 2)
    data = TensorDataset(plane, (plane[:, 1] > plane[:, 0].square() - 0.5).long())
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(data, batch_size=64, shuffle=True)
    )
    model = ray.train.torch.prepare_model(
        nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for _ in range(3):
        for features, labels in loader:
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ray.train.report({"loss": loss.item()})


def driver(config):
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            storage_path=STORAGE, callbacks=[TuneReportCallback()]
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    tuner = Tuner(
        driver,
        param_space={"lr": tune.grid_search([0.001, 0.01])},
        run_config=tune.RunConfig(storage_path=STORAGE),
    )
    for result in tuner.fit():
        print(result.config, result.metrics["loss"])
