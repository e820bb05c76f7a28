"""The training loop of the guides, with their loader.

benchmarks/guides.py measures the loading claims against it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import torch
from torch.utils.data import DataLoader

from benchmarks.input import Kind, PerSample, guides_transform, make_data
from trainers.devices.device import synchronize
from trainers.task import Task


def plain_training(
    kind: Kind, task: Task, workers: int, device: torch.device
) -> Generator[int, None, None]:
    """Run a guide's training loop over its loader, for ever.

    Gives the samples of each step, which is only issued.

    Per-sample transforms of torchvision; with `workers`, loader processes, pinned
    memory and asynchronous copies.
    """
    data = PerSample(*make_data(kind).tensors, guides_transform("cifar"))
    on_gpu = device.type == "cuda"
    loader = DataLoader(
        data,
        kind.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=on_gpu and workers > 0,
        persistent_workers=workers > 0,
    )
    model = task.model().to(device)
    if on_gpu:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True
    )
    while True:
        for images, labels in loader:
            batch = (
                images.to(device, non_blocking=True),
                labels.to(device, non_blocking=True),
            )
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
                loss = task.loss(model(batch[0]), batch)
            loss.backward()
            optimizer.step()
            yield len(labels)


def plain_rate(
    steps: Iterator[int], warm_steps: int, seconds: float, device: torch.device
) -> float:
    """Return samples/s of the steps after some.

    As many are left out as were loaded ahead while nobody trained.
    """
    for _ in range(warm_steps):
        next(steps)
    synchronize(device)
    samples = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or samples == 0:
        samples += next(steps)
    synchronize(device)
    return samples / (time.perf_counter() - began)
