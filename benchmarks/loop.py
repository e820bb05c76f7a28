"""Is the shared loop as fast as a hand-written one, and faster than the frameworks?

All are measured on one rank and on two.

Run as: python -m benchmarks.loop [ROUNDS] [--short] [--keep]

The peers are a plain PyTorch loop as in PyTorch's guides, with DDP if there are
two ranks (measured twice, for the A/A floor); this loop through Accelerate,
through Lightning Fabric, and through Ray's `prepare_model` and
`prepare_data_loader`; and Lightning's Trainer. `pip install '.[peers]'` installs
Accelerate and Lightning.

All run in the same processes, which are the workers of one TorchTrainer, with
one thread each. They take turns, in another order each round, on the same
global batches and with the same fused AdamW. Every figure leaves out set-up,
evaluation and five warm-up steps. Mean losses must be equal. The environment
variables that a framework sets hold for that framework only: Lightning's
PYTORCH_NVML_BASED_CUDA_CHECK, for example, would make every `optimizer.step`
of all others look for NVML.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.measure import ahead, interleave, save, show, summarize
from benchmarks.on_ray import in_workers
from examples.digits.task import Digits
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.measure.clock import WARMUP_STEPS
from trainers.task import Task

BATCH = 64
EPOCHS = {"mlp": 2, "cnn": 4}
_LEFT: dict[str, dict[str, str]] = {}
"""The environment variables that a package sets when it is imported or first
used, by package.
"""


class Rows(Task):
    """20,000 rows of 64 floats and a small MLP: the input-bound case."""

    def model(self) -> nn.Module:
        """Return a model that maps rows [B, 64] to logits [B, 10]."""
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def dataset(self, split: str) -> TensorDataset:
        """Return random rows; a label is the index of the largest of ten columns."""
        rows = torch.randn(
            20_000 if split == "train" else 10,
            64,
            generator=torch.Generator().manual_seed(1),
        )
        return TensorDataset(rows, rows[:, :10].argmax(1))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the cross entropy."""
        return nn.functional.cross_entropy(outputs, batch[1])


WORK: dict[str, type[Task]] = {"mlp": Rows, "cnn": Digits}


class Stopwatch:
    """Measures the samples/s of all ranks after the warm-up, and the mean loss.

    The mean is over all steps and ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.steps = 0
        self.elapsed_s = 0.0
        self.samples = 0
        self.loss = 0.0
        self.began = time.perf_counter()

    def step(self, samples: int, loss: float) -> None:
        self.steps = self.steps + 1
        self.loss = self.loss + loss
        now = time.perf_counter()
        if self.steps > WARMUP_STEPS:
            self.elapsed_s = self.elapsed_s + now - self.began
            self.samples = self.samples + samples * self.world_size
        self.began = now

    def result(self) -> tuple[float, float]:
        mean = torch.tensor(self.loss / self.steps, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(mean)
        return self.samples / self.elapsed_s, float(mean) / self.world_size


def paceline(work: str, rank: int, world_size: int) -> tuple[float, float]:
    """Run Paceline's loop."""
    tree = {
        "task": "benchmarks.loop:Rows",
        "epochs": EPOCHS[work],
        "global_batch_size": BATCH,
        "drop_last": True,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "log_every_steps": 10_000,
        "evaluate": {"every_epochs": 1000},
        "launcher": "spawn",
        "device": "cpu",
    }
    context = LocalContext(None, "spawn", rank, world_size, rank, world_size)
    result = fit(WORK[work](), build(TrainConfig, tree, "benchmark"), context)
    assert result.throughput is not None
    return result.throughput.samples_per_s, result.metrics["train_loss"]


def parts(
    work: str, rank: int, world_size: int, sharded: bool = True
) -> tuple[Any, ...]:
    """Return a hand-written loop's task, model, optimizer, loader and sampler."""
    task = WORK[work]()
    data = task.dataset("train")
    sampler: Any = DistributedSampler(
        data, world_size if sharded else 1, rank if sharded else 0
    )
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.0, fused=True
    )
    loader: Any = DataLoader(
        data, batch_size=BATCH // world_size, sampler=sampler, drop_last=True
    )
    return task, model, optimizer, loader, sampler


def by_hand(
    work: str,
    rank: int,
    world_size: int,
    prepare: Callable[..., tuple[Any, ...]] | None,
    sharded: bool = True,
) -> tuple[float, float]:
    """Run a hand-written loop, through a framework's `prepare` if it is given.

    Without `prepare`, two ranks use DDP.
    """
    task, model, optimizer, loader, sampler = parts(
        work, rank, world_size, sharded
    )
    backward: Any = torch.Tensor.backward
    if prepare is not None:
        model, optimizer, loader, backward = prepare(model, optimizer, loader)
    elif world_size > 1:
        model = DistributedDataParallel(model)
    watch = Stopwatch(world_size)
    for epoch in range(EPOCHS[work]):
        sampler.set_epoch(epoch)
        watch.began = time.perf_counter()
        for fetched in loader:
            batch = task.transform(fetched, True)
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model(batch[0]), batch)
            backward(loss)
            optimizer.step()
            watch.step(len(batch[1]), loss.item())
    return watch.result()


def accelerate(model: Any, optimizer: Any, loader: Any) -> tuple[Any, ...]:
    """Prepare a loop for Hugging Face Accelerate, as its documentation says."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return (
        *accelerator.prepare(model, optimizer, loader),
        accelerator.backward,
    )


def fabric(model: Any, optimizer: Any, loader: Any) -> tuple[Any, ...]:
    """Prepare a loop for Lightning Fabric, as its documentation says."""
    from lightning.fabric import Fabric

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    runner = Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
    )
    runner.launch()
    prepared = runner.setup(model, optimizer)
    return (
        *prepared,
        runner.setup_dataloaders(loader, use_distributed_sampler=False),
        runner.backward,
    )


def ray_prepared(model: Any, optimizer: Any, loader: Any) -> tuple[Any, ...]:
    """Prepare a loop with Ray Train's own helpers, as its documentation says."""
    from ray.train.torch import prepare_data_loader, prepare_model

    return (
        prepare_model(model),
        optimizer,
        prepare_data_loader(loader),
        torch.Tensor.backward,
    )


def lightning(work: str, rank: int, world_size: int) -> tuple[float, float]:
    """Run Lightning's Trainer, without logging, checkpoints or a progress bar."""
    from lightning.pytorch import LightningModule, Trainer

    task, model, optimizer, loader, _ = parts(work, rank, world_size)
    watch = Stopwatch(world_size)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_optimizers(self) -> Any:
            return optimizer

        def training_step(self, fetched: Any, index: int) -> Any:
            batch = task.transform(fetched, True)
            return task.loss(self.model(batch[0]), batch)

        def on_train_epoch_start(self) -> None:
            watch.began = time.perf_counter()

        def on_train_batch_end(
            self, outputs: Any, batch: Any, index: int
        ) -> None:
            watch.step(len(batch[1]), outputs["loss"].item())

    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=EPOCHS[work],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), loader)
    return watch.result()


def peers(
    work: str, rank: int, world_size: int, on_ray: bool
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return the function of each peer that is installed, by name."""
    there: dict[str, Callable[[], tuple[float, float]]] = {
        "plain": lambda: by_hand(work, rank, world_size, None),
        "paceline": lambda: paceline(work, rank, world_size),
        "plain again": lambda: by_hand(work, rank, world_size, None),
    }
    if on_ray:
        there["ray prepare"] = lambda: by_hand(
            work, rank, world_size, ray_prepared
        )
    if importlib.util.find_spec("accelerate") is not None:
        # Accelerate deals whole batches of one common order to the ranks.
        there["accelerate"] = lambda: by_hand(
            work, rank, world_size, accelerate, sharded=False
        )
    if importlib.util.find_spec("lightning") is not None:
        there["fabric"] = lambda: by_hand(work, rank, world_size, fabric)
        there["lightning"] = lambda: lightning(work, rank, world_size)
    return there


@contextlib.contextmanager
def environment_of(package: str) -> Iterator[None]:
    """Set the environment variables that this package has set in earlier blocks.

    At the end of the block, all changes are remembered and undone.
    """
    before = dict(os.environ)
    os.environ.update(_LEFT.get(package, {}))
    try:
        yield
    finally:
        _LEFT[package] = {
            name: value
            for name, value in os.environ.items()
            if before.get(name) != value
        }
        for name in _LEFT[package]:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def compare(
    work: str, rounds: int, rank: int, world_size: int, on_ray: bool
) -> dict[str, Any]:
    """Run all peers on one workload; return medians, ratios, floor and losses.

    Every rank calls this.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in (
        "lightning",
        "lightning.pytorch",
        "lightning.fabric",
        "ray.train",
        "torch.distributed.ddp_model_wrapper",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    losses: dict[str, float] = {}

    def speed_of(
        name: str, run: Callable[[], tuple[float, float]]
    ) -> Callable[[], float]:
        def measured() -> float:
            if world_size > 1:
                dist.barrier()
            with environment_of("lightning" if name == "fabric" else name):
                speed, losses[name] = run()
            return speed

        return measured

    runs = {
        name: speed_of(name, run)
        for name, run in peers(work, rank, world_size, on_ray).items()
    }
    found = interleave(runs, rounds, seed=0)
    if wrong := {
        name: loss
        for name, loss in losses.items()
        if not math.isclose(loss, losses["plain"], rel_tol=1e-4)
    }:
        raise AssertionError(
            f"not the same training: {wrong} against {losses['plain']}"
        )
    return {
        **summarize(found, "plain", "plain again"),
        "ahead": ahead(found, "paceline"),
        "rounds": found,
        "train_loss": losses,
    }


def compare_all(rounds: int) -> dict[str, Any]:
    """Run all peers on both workloads; every rank of a TorchTrainer calls this."""
    import ray.train

    context = ray.train.get_context()
    rank = context.get_world_rank()
    world_size = context.get_world_size()
    return {
        work: compare(work, rounds, rank, world_size, on_ray=True)
        for work in WORK
    }


def main(rounds: int, keep: bool) -> None:
    """Measure both workloads, on one rank and on two."""
    from trainers.on_ray.cluster import connect

    connect(show_workers=False)
    found: dict[str, Any] = {}
    for world_size in (1, 2):
        for work, summary in in_workers(
            functools.partial(compare_all, rounds), world_size
        ).items():
            found[
                f"{work}, {world_size} rank{'s' if world_size > 1 else ''}"
            ] = summary
            show(
                f"{work}, {world_size} rank(s): global batch {BATCH}, {EPOCHS[work]} epochs",
                "samples/s",
                summary,
            )
            over = (
                f"{peer} {one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
                for peer, one in summary["ahead"].items()
            )
            print("  paceline over " + "   ".join(over))
    print(f"\nkept in {save('loop', found, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="two rounds")
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    given = parser.parse_args()
    main(2 if given.short else given.rounds, given.keep)
