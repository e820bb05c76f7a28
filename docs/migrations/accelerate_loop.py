"""Run as: accelerate launch accelerate_loop.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def points(count, seed):
    plane = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(plane, (plane[:, 1] > plane[:, 0].square() - 0.5).long())


def train():
    accelerator = Accelerator()
    set_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = DataLoader(points(1024, seed=1), batch_size=64, shuffle=True)
    held_out = DataLoader(points(256, seed=2), batch_size=64)
    model, optimizer, training, held_out = accelerator.prepare(
        model, optimizer, training, held_out
    )
    for epoch in range(3):
        for features, labels in training:
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        right = 0
        for features, labels in held_out:
            with torch.no_grad():
                guesses = model(features).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right += (guesses == labels).sum().item()
        accelerator.print(
            {"epoch": epoch, "loss": loss.item(), "accuracy": right / 256}
        )


if __name__ == "__main__":
    train()
