"""How long does a checkpoint hold up training?

The checkpoint is written at once or in the background, and a plain copy is the
baseline.

Run as: python -m benchmarks.checkpoint [ROUNDS] [--mb 10,200] [--directory
    DIR] [--short | --full] [--keep]

The state (a model and its AdamW moments) has 10, 200 or 500 MB. `--full` adds
2 GB; `--short` runs two rounds of 10 and 200 MB. Each round measures, in turn:

    memcpy       a copy of every tensor to host memory (twice, for the A/A floor)
    sync         a checkpoint that is written at once
    async        a checkpoint that is written in the background: the time in which
                 it holds up the steps of a small model (for the copy to host
                 memory, and then for each call of `advance`)
    slowdown     the time that these steps lost to the writing thread
    ray async    torch.save and Ray's `report` with CheckpointUploadMode.ASYNC,
                 until training can continue

The figures are medians in ms. They are taken in the worker of a TorchTrainer;
if Ray is not installed, they are taken in this process, without `ray async`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import interleave, save, show, summarize
from benchmarks.on_ray import in_workers
from trainers.checkpoint.store import Checkpoints
from trainers.devices.device import get_rng_state
from trainers.devices.group import Group
from trainers.storage import Storage

SIZES_MB = (10, 200, 500)
FULL_MB = 2000
_LAYERS = 12
_AGREE_EVERY_STEPS = 10


def make_state(size_mb: int, device: torch.device) -> dict[str, Any]:
    """Return a model's weights and two moments of each, `size_mb` in all."""
    numbers = size_mb * 2**20 // 4 // 3 // _LAYERS
    weights = {
        f"layers.{index}.weight": torch.randn(numbers, device=device)
        for index in range(_LAYERS)
    }
    moments = {
        index: {
            "exp_avg": torch.randn_like(weight),
            "exp_avg_sq": torch.randn_like(weight),
        }
        for index, weight in enumerate(weights.values())
    }
    return {
        "model": weights,
        "optimizer": {"state": moments},
        "position": {"step": 1},
    }


class Steps:
    """Training steps of a small model, which a checkpoint may hold up."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, fused=True
        )
        self.rows = torch.randn(64, 256, device=device)
        self.labels = torch.randint(0, 10, (64,), device=device)
        self.device = device
        self.many(20)
        self.alone_s = self.many(100) / 100

    def many(self, count: int) -> float:
        """Run `count` steps; return how long they took, s."""
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(
                self.model(self.rows), self.labels
            ).backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began


def copied(state: dict[str, Any]) -> float:
    """Copy every tensor to host memory; return how long that took, ms."""
    began = time.perf_counter()
    kept = [tensor.to("cpu", copy=True) for tensor in state["model"].values()]
    kept += [
        moment.to("cpu", copy=True)
        for pair in state["optimizer"]["state"].values()
        for moment in pair.values()
    ]
    return (time.perf_counter() - began) * 1e3


def written_at_once(checkpoints: Checkpoints, state: dict[str, Any]) -> float:
    """Write a checkpoint that training waits for; return how long that took, ms."""
    rng = get_rng_state(torch.device("cpu"))
    began = time.perf_counter()
    checkpoints.save(1, state, rng)
    return (time.perf_counter() - began) * 1e3


def written_beside(
    checkpoints: Checkpoints,
    state: dict[str, Any],
    steps: Steps,
    found: dict[str, float],
) -> float:
    """Write a checkpoint during steps; return how long it held them up, ms.

    `found["slowdown"]` becomes the ms that the steps lost to the writing thread.
    """
    rng = get_rng_state(torch.device("cpu"))
    steps.alone_s = steps.many(50) / 50
    began = time.perf_counter()
    checkpoints.start(1, state, rng)
    stalled_s = time.perf_counter() - began
    count = 0
    stepping_s = 0.0
    while checkpoints.pending:
        stepping_s += steps.many(_AGREE_EVERY_STEPS)
        count += _AGREE_EVERY_STEPS
        if not checkpoints.busy:
            began = time.perf_counter()
            checkpoints.advance()
            stalled_s += time.perf_counter() - began
    found["slowdown"] = max(0.0, stepping_s - count * steps.alone_s) * 1e3
    return stalled_s * 1e3


def reported(state: dict[str, Any], directory: Path) -> float:
    """Return how long Ray's own asynchronous upload holds up training, ms.

    This function waits until the upload is done.
    """
    import ray.train

    began = time.perf_counter()
    local = Path(tempfile.mkdtemp(dir=directory))
    torch.save(state, local / "state.pt")
    ray.train.report(
        {},
        checkpoint=ray.train.Checkpoint.from_directory(str(local)),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )
    stalled_s = time.perf_counter() - began
    while local.exists():
        time.sleep(0.05)
    return stalled_s * 1e3


def measure(
    size_mb: int,
    rounds: int,
    directory: Path,
    device: torch.device,
    on_ray: bool,
) -> dict[str, Any]:
    """Return the figures of one size."""
    torch.set_num_threads(1)
    state = make_state(size_mb, device)
    group = Group(0, 1, device)
    at_once, beside = (
        Checkpoints(Storage(str(directory / name)), group, 1)
        for name in ("sync", "async")
    )
    steps = Steps(device)
    found: dict[str, float] = {}
    peers: dict[str, Callable[[], float]] = {
        "memcpy": lambda: copied(state),
        "sync": lambda: written_at_once(at_once, state),
        # Not right after its twin: memory that was freed a moment ago is
        # quicker to get again.
        "memcpy again": lambda: copied(state),
        "async": lambda: written_beside(beside, state, steps, found),
        "slowdown": lambda: found["slowdown"],
    }
    if on_ray:
        peers["ray async"] = lambda: reported(state, directory)
    return {
        **summarize(interleave(peers, rounds), "memcpy", "memcpy again"),
        "size_mb": size_mb,
    }


def main(
    rounds: int, sizes: list[int], parent: str | None, keep: bool
) -> None:
    """Measure all sizes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_ray = importlib.util.find_spec("ray") is not None
    if on_ray:
        from trainers.on_ray.cluster import connect

        connect(show_workers=False)
    results = {}
    for size_mb in sizes:
        directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=parent))
        figures = functools.partial(
            measure, size_mb, rounds, directory, device, on_ray
        )
        try:
            results[f"{size_mb} MB"] = (
                in_workers(figures, gpu=device.type == "cuda")
                if on_ray
                else figures()
            )
        finally:
            shutil.rmtree(directory)
        show(f"{size_mb} MB", "ms", results[f"{size_mb} MB"])
    print(f"\nkept in {save('checkpoint', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument(
        "--mb", type=lambda text: [int(size) for size in text.split(",")]
    )
    parser.add_argument("--directory")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="add 2 GB")
    length.add_argument(
        "--short", action="store_true", help="two rounds, without 500 MB"
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    given = parser.parse_args()
    sizes = [
        *(SIZES_MB[:2] if given.short else SIZES_MB),
        *([FULL_MB] if given.full else []),
    ]
    main(
        2 if given.short else given.rounds,
        given.mb or sizes,
        given.directory,
        given.keep,
    )
