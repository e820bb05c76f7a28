"""Run as: torchrun --nproc-per-node 2 plain_ddp.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def points(count, seed):
    plane = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(plane, (plane[:, 1] > plane[:, 0].square() - 0.5).long())


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(
        f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    training = points(1024, seed=1)
    held_out = points(256, seed=2)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = F.cross_entropy(model(features.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                features, labels = (column.to(device) for column in held_out[:])
                val_loss = F.cross_entropy(model.module(features), labels)
            print(f"epoch {epoch + 1}: val_loss {val_loss.item():.6f}")
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
