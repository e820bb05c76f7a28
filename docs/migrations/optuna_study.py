"""Run as: python optuna_study.py"""

import optuna
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def points(count, seed):
    plane = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(plane, (plane[:, 1] > plane[:, 0].square() - 0.5).long())


def objective(trial):
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    batch_size = trial.suggest_categorical("batch_size", [32, 64])
    width = trial.suggest_categorical("width", [8, 32])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    features, labels = points(1024, seed=1).tensors
    held_out = points(256, seed=2).tensors
    for epoch in range(4):
        order = torch.randperm(1024, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(batch_size):
            loss = F.cross_entropy(model(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
        trial.report(val_loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return val_loss


if __name__ == "__main__":
    study = optuna.create_study(
        direction="minimize", pruner=optuna.pruners.SuccessiveHalvingPruner()
    )
    study.optimize(objective, n_trials=6)
    print(study.best_value, study.best_params)
