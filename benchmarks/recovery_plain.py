"""The peer of benchmarks/recovery.py: a TorchTrainer as Ray documents it, and the work and timeline that both share.

Run as: python -m benchmarks.recovery_plain DIRECTORY WORKERS STEPS INTERVAL
Reports a checkpoint every INTERVAL steps, starts again from the newest one (`FailureConfig(max_failures)`), and has
none of Paceline's settings. After each step every rank adds a line to DIRECTORY/timeline: time, step, rank, process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH = 64
LEARNING_RATE = 1e-3
_PAUSE_S = 0.02
"""A step's own time is short: with this it takes about as long as one of a model that is worth restarting."""


@dataclass(frozen=True)
class Moment:
    """One line of the timeline."""

    time_s: float
    step: int
    """Optimizer steps of the run so far; 0: a worker's own code begins."""
    rank: int
    process: int


def write_moment(timeline: Path, step: int) -> None:
    """Add a line; one write, so that lines of several processes do not mix."""
    line = f"{time.time():.6f} {step} {os.environ.get('RANK', '0')} {os.getpid()}\n"
    descriptor = os.open(timeline, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def read_moments(timeline: Path) -> list[Moment]:
    """All lines that are whole."""
    text = timeline.read_text() if timeline.exists() else ""
    rows = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
    return [Moment(float(at), int(step), int(rank), int(process)) for at, step, rank, process in rows]


def make_model() -> nn.Module:
    """Logits [B, 10] of rows [B, 256]; 16 MB with the moments of AdamW."""
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def make_data() -> TensorDataset:
    """4,096 random rows in ten classes."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(4096, 256, generator=generator), torch.randint(10, (4096,), generator=generator))


def watch(optimizer: torch.optim.Optimizer, timeline: Path) -> None:
    """From now on each step pauses and adds its line; AdamW's own count of steps comes back with its state."""

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        time.sleep(_PAUSE_S)
        first = optimizer.param_groups[0]["params"][0]
        write_moment(timeline, int(optimizer.state[first]["step"]))

    optimizer.register_step_post_hook(after_step)


def train(config: dict[str, Any]) -> None:
    """What each worker of the TorchTrainer runs."""
    import ray.train
    import ray.train.torch
    from torch.utils.data import DataLoader

    timeline = Path(config["timeline"])
    write_moment(timeline, 0)
    torch.set_num_threads(1)
    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    loader = ray.train.torch.prepare_data_loader(DataLoader(make_data(), batch_size=BATCH // world_size, shuffle=True))
    bare = make_model()
    model = ray.train.torch.prepare_model(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), map_location="cpu", weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    watch(optimizer, timeline)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    for rows, labels in batches():
        loss = nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % config["interval"] == 0:
            with tempfile.TemporaryDirectory() as directory:
                kept = None
                if rank == 0:
                    state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(directory, "state.pt"))
                    kept = ray.train.Checkpoint.from_directory(directory)
                ray.train.report({"loss": loss.item(), "step": step}, checkpoint=kept)
        if step == config["steps"]:
            return


def main(directory: Path, workers: int, steps: int, interval: int) -> None:
    """One run."""
    import ray.train
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"timeline": str(directory / "timeline"), "steps": steps, "interval": interval},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(directory), failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
