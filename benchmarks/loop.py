"""Is the shared loop as fast as a hand-written one? One process, one thread, the same samples in the same order.

Run as: python -m benchmarks.loop [ROUNDS] [--keep]
Peers: a plain PyTorch loop over a DataLoader, as the guides write it (measured twice: the A/A floor), and the same
loop through Accelerate and Lightning Fabric where they are installed (`pip install '.[peers]'`). All use the same
fused AdamW. Evaluation, set-up and five warm-up steps are left out of every figure; final losses must be equal.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import interleave, save, show, summarize
from examples.digits.task import Digits
from trainers.config import TrainConfig
from trainers.launch import LocalContext
from trainers.loop import fit
from trainers.metrics import WARMUP_STEPS
from trainers.sampler import StepSampler
from trainers.settings import build
from trainers.task import Task

BATCH = 64
EPOCHS = {"mlp": 1, "cnn": 4}


class Rows(Task):
    """20,000 rows of 64 floats and a small MLP: the input-bound case."""

    def model(self) -> nn.Module:
        """Logits [B, 10] of rows [B, 64]."""
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def dataset(self, split: str) -> TensorDataset:
        """Random rows; the label is a linear function of them."""
        rows = torch.randn(20_000 if split == "train" else 10, 64, generator=torch.Generator().manual_seed(1))
        return TensorDataset(rows, rows[:, :10].argmax(1))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(outputs, batch[1])


WORK: dict[str, type[Task]] = {"mlp": Rows, "cnn": Digits}


def paceline(work: str, losses: dict[str, float]) -> float:
    """Samples/s of our loop."""
    tree = {
        "task": "benchmarks.loop:Rows",
        "epochs": EPOCHS[work],
        "global_batch_size": BATCH,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "log_every_steps": 10_000,
        "evaluate": {"every_epochs": 1000},
        "launcher": "local",
        "device": "cpu",
    }
    result = fit(WORK[work](), build(TrainConfig, tree, "benchmark"), LocalContext(None, "local"))
    losses["paceline"] = result.metrics["train_loss"]
    assert result.throughput is not None
    return result.throughput.samples_per_s


def plain(work: str, losses: dict[str, float], name: str, prepare: Callable[..., tuple[Any, Any, Any]] | None) -> float:
    """Samples/s of a hand-written loop, bare or through a framework's `prepare`."""
    task = WORK[work]()
    data = task.dataset("train")
    sampler = StepSampler(data, global_batch_size=BATCH)
    loader: Any = DataLoader(data, batch_size=BATCH, sampler=sampler)
    torch.manual_seed(0)
    model: Any = task.model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    backward: Any = None
    if prepare is not None:
        model, optimizer, loader, backward = prepare(model, optimizer, loader)  # type: ignore[misc]
    steps, elapsed, samples, total = 0, 0.0, 0, 0.0
    for epoch in range(EPOCHS[work]):
        sampler.set_epoch(epoch)
        began = time.perf_counter()
        for batch in loader:
            batch = task.transform(batch, True)
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model(batch[0]), batch)
            (backward or torch.Tensor.backward)(loss)
            optimizer.step()
            total += loss.item()
            steps += 1
            now = time.perf_counter()
            if steps > WARMUP_STEPS:
                elapsed, samples = elapsed + now - began, samples + len(batch[1])
            began = now
    losses[name] = total / steps
    return samples / elapsed


def accelerate(model: Any, optimizer: Any, loader: Any) -> tuple[Any, ...]:
    """Hugging Face Accelerate, as its documentation migrates a loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return (*accelerator.prepare(model, optimizer, loader), accelerator.backward)


def fabric(model: Any, optimizer: Any, loader: Any) -> tuple[Any, ...]:
    """Lightning Fabric, as its documentation migrates a loop."""
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    runner.launch()
    prepared = runner.setup(model, optimizer)
    return (*prepared, runner.setup_dataloaders(loader, use_distributed_sampler=False), runner.backward)


def main(rounds: int, keep: bool) -> None:
    """All peers on both kinds of work."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for work in WORK:
        losses: dict[str, float] = {}
        peers: dict[str, Callable[[], float]] = {
            "plain": lambda work=work, losses=losses: plain(work, losses, "plain", None),  # type: ignore[misc]
            "paceline": lambda work=work, losses=losses: paceline(work, losses),  # type: ignore[misc]
            "plain again": lambda work=work, losses=losses: plain(work, losses, "plain again", None),  # type: ignore[misc]
        }
        for name, module, prepare in (("accelerate", "accelerate", accelerate), ("fabric", "lightning", fabric)):
            if importlib.util.find_spec(module) is not None:
                peers[name] = lambda work=work, losses=losses, name=name, prepare=prepare: plain(  # type: ignore[misc]
                    work, losses, name, prepare
                )
            else:
                print(f"{name}: not installed, left out")
        summary = summarize(interleave(peers, rounds), "plain", "plain again")
        show(f"{work}: batch {BATCH}, {EPOCHS[work]} epoch(s)", "samples/s", summary)
        wrong = {name: loss for name, loss in losses.items() if not math.isclose(loss, losses["plain"], rel_tol=1e-5)}
        assert not wrong, f"not the same training: {wrong} against {losses['plain']}"
        found[work] = {**summary, "train_loss": losses}
    print(f"\nkept in {save('loop', found, keep)}")


if __name__ == "__main__":
    given = [int(arg) for arg in sys.argv[1:] if arg != "--keep"]
    main(given[0] if given else 5, "--keep" in sys.argv)
