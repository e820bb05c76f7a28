"""The least that a training script must do before its first step is done: the floor of benchmarks/startup.py.

Run as: python benchmarks/startup_floor.py [WORKERS], or by torchrun. Imports torch, joins the group where there is one,
makes the data, the model and the optimizer of examples/your_model, takes one step and says so. With WORKERS it does so
in the workers of a TorchTrainer on an embedded Ray.
"""

import gc
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def step() -> None:
    """One step."""
    distributed = "WORLD_SIZE" in os.environ
    own_group = distributed and not dist.is_initialized()
    if own_group:
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
    if own_group:
        del model
        gc.collect()  # a DDP reducer that outlives its group now and then aborts the process
        dist.destroy_process_group()


def on_ray(workers: int) -> None:
    """The same in the workers of a TorchTrainer, as Ray documents it."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            step, scaling_config=ScalingConfig(num_workers=workers), run_config=RunConfig(storage_path=storage)
        ).fit()


if __name__ == "__main__":
    if sys.argv[1:]:
        on_ray(int(sys.argv[1]))
    else:
        step()
