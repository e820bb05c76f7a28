"""The least that a training script must do before its first step is done: the floor of benchmarks/startup.py.

Run as: python benchmarks/startup_floor.py, or by torchrun. Imports torch, joins the group where there is one, makes the
data, the model and the optimizer of examples/your_model, takes one step and says so.
"""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """One step."""
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    points, arms = torch.randn(3000, 2), torch.randint(3, (3000,))
    data = TensorDataset(points, arms)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data) if distributed else None)
    inputs, labels = next(iter(loader))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    if os.environ.get("RANK", "0") == "0":
        print("step 1/1", flush=True)
    if distributed:
        del model
        gc.collect()  # a DDP reducer that outlives its group now and then aborts the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
