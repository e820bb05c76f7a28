"""How long does a checkpoint hold up training?

Written at once, in the background, and against a plain copy.

Run as: python -m benchmarks.checkpoint [ROUNDS] [--mb 10,200] [--directory DIR]
[--short | --full] [--keep] Sizes are of the state (a model and its AdamW moments);
`--full` adds 2 GB to 10, 200 and 500 MB, `--short` is two rounds of 10 and 200. Each
round takes, in turn: `memcpy`, torch.clone of every tensor (measured twice: the A/A
floor); `sync`, a checkpoint that is written at once; `async`, the time in which the
loop is held up (the copy to host memory, then each call of `advance`) while steps of a
small model go on; `slowdown`, what the same steps lost to the writing thread beside
them; `ray async`, torch.save and Ray's `report` with CheckpointUploadMode.ASYNC until
training goes on. Medians in ms. All in the worker of a TorchTrainer; where Ray is not
installed, in this process without `ray async`.
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
    """A model's weights and two moments of each, `size_mb` in all."""
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
    return {"model": weights, "optimizer": {"state": moments}, "position": {"step": 1}}


class Steps:
    """Training steps of a small model: what a checkpoint may hold up."""

    def __init__(self, device: torch.device) -> None:
        self.model = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.rows = torch.randn(64, 256, device=device)
        self.labels = torch.randint(0, 10, (64,), device=device)
        self.device = device
        self.many(20)
        self.alone_s = self.many(100) / 100

    def many(self, count: int) -> float:
        """The time of so many steps."""
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(self.model(self.rows), self.labels).backward()
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began


def copied(state: dict[str, Any]) -> float:
    """ms of a clone of every tensor, on the host."""
    began = time.perf_counter()
    kept = [tensor.to("cpu", copy=True) for tensor in state["model"].values()]
    kept += [
        moment.to("cpu", copy=True)
        for pair in state["optimizer"]["state"].values()
        for moment in pair.values()
    ]
    return (time.perf_counter() - began) * 1e3


def written_at_once(checkpoints: Checkpoints, state: dict[str, Any]) -> float:
    """ms of a checkpoint that training waits for."""
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
    """ms in which steps cannot go on; what they lost to the thread goes to `found`."""
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
    """Return the ms in which Ray's own asynchronous upload holds training up.

    Waits until it is done.
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
    size_mb: int, rounds: int, directory: Path, device: torch.device, on_ray: bool
) -> dict[str, Any]:
    """The figures of one size."""
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
        # Not beside its twin: memory that was freed a moment ago is quicker to get
        # again.
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


def main(rounds: int, sizes: list[int], parent: str | None, keep: bool) -> None:
    """All sizes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_ray = importlib.util.find_spec("ray") is not None
    if on_ray:
        from trainers.on_ray.cluster import connect

        connect(show_workers=False)
    results = {}
    for size_mb in sizes:
        directory = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=parent))
        figures = functools.partial(measure, size_mb, rounds, directory, device, on_ray)
        try:
            results[f"{size_mb} MB"] = (
                in_workers(figures, gpu=device.type == "cuda") if on_ray else figures()
            )
        finally:
            shutil.rmtree(directory)
        show(f"{size_mb} MB", "ms", results[f"{size_mb} MB"])
    print(f"\nkept in {save('checkpoint', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument(
        "--mb", type=lambda text: [int(size) for size in text.split(",")]
    )
    parser.add_argument("--directory")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="2 GB too")
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
