"""Compare Paceline's loop on a GPU with a bare loop, Lightning and Accelerate.

Run as: python -m benchmarks.peers [ROUNDS] [--works resnet9,gpt,cnn] [--steps 120]
                                   [--minutes 4] [--small] [--keep]

    bare           a hand-written loop with autocast and a fused optimizer; images or text
                   are resident on the device, and rows are taken in Paceline's order;
                   without a loader, and without any check of the run
    bare again     the bare loop a second time, for the A/A floor
    lightning      Lightning's Trainer, on the same resident batches
    accelerate     the bare loop through Accelerate's `prepare`, on the same batches
    uncaptured     Paceline with `cuda_graphs: false`
    paceline       Paceline with its defaults

In each of three workloads, all of them take turns to train the same steps. The time is
wall time after the warm-up, and mean losses must be equal. With `--small` (always without
CUDA), miniatures run, without thresholds.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.measure import (
    failed,
    interleave,
    save,
    show,
    summarize,
    verdict,
)
from benchmarks.runs import (
    Budget,
    Runs,
    Work,
    arguments,
    device_and_size,
    example,
    quiet_and_cold,
    release,
)
from trainers.config import TrainConfig
from trainers.data.batch import Batch
from trainers.devices.device import synchronize
from trainers.loop._checkpointing import AGREE_EVERY_STEPS
from trainers.model.optimizer import lr_factor
from trainers.model.precision import (
    PrecisionSpec,
    apply_matmul,
    resolve_precision,
)

# fmt: off
WORKS = {
    "resnet9": example("cifar10", 512, synthetic=True),
    "gpt": example("gpt", 16, context=1024, width=768, heads=12, layers=12, lines=16 * 40 * 18, packed=True),
    "cnn": example("mnist", 64, synthetic=True),
}
SMALL = {
    "resnet9": example("cifar10", 16, synthetic=True, samples=200, width=4),
    "gpt": example("gpt", 4, context=16, width=32, heads=2, layers=1, lines=200, packed=True),
    "cnn": example("mnist", 4, synthetic=True, samples=80),
}
# fmt: on
LEAST = {"resnet9": 1.3, "gpt": 0.99, "cnn": 5.0}
"""By workload, the least ratio of Paceline's default rate to the bare loop's rate."""
LEAST_UNCAPTURED = 0.99
WARM_STEPS = 20
_CLOSE = {"cpu": 1e-5, "cuda": 0.05}
"""The largest relative difference of mean losses, by device. On CUDA, the order
of summation varies, and bf16 keeps three digits.
"""
Rate = tuple[float, float]
"""Samples/s after the warm-up, and the mean loss of all steps."""


def changes_of(work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    """Return the changes to a workload's configuration that all loops train with."""
    on_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "precision": "bf16" if on_gpu else "fp32",
        "channels_last": "auto",
        "max_steps": steps,
        "log_every_steps": 10
        * steps,  # one window: its mean loss is the run's
        "evaluate.microbatch_size": work.batch,
    }


class Bare:
    """A hand-written loop's parts, and its clock."""

    def __init__(self, runs: Runs, config: TrainConfig) -> None:
        self.runs = runs
        self.config = config
        self.task = runs.task
        self.device = runs.device
        self.steps = config.max_steps or 0
        spec = resolve_precision(config.precision, self.device)
        apply_matmul(spec)
        torch.backends.cudnn.benchmark = True
        torch.set_num_threads(1)
        model = self.task.model().to(self.device)
        self.spec: PrecisionSpec = spec.with_layout("auto", model, self.device)
        self.model: nn.Module = self.spec.convert_model(model)
        self.optimizer: Optimizer = runs.new_optimizer(self.model, config)
        self.loss_sum = torch.zeros(
            (), dtype=torch.float64, device=self.device
        )
        self._base_lr = self.optimizer.param_groups[0]["lr"]
        self._step = 0
        self._began = 0.0
        torch.manual_seed(config.seed)

    def batches(self) -> Iterator[Batch]:
        """Yield the batch of each step; Lightning fetches each batch one step ahead."""
        size = self.runs.work.batch
        split = self.task.dataset("train").tensors
        resident = [tensor.to(self.device) for tensor in split]
        per_epoch = len(resident[0]) // size
        order = torch.empty(0)
        for step in range(self.steps):
            epoch, at = divmod(step, per_epoch)
            if at == 0:
                generator = torch.Generator().manual_seed(
                    self.config.seed + epoch
                )
                order = torch.randperm(len(resident[0]), generator=generator)
                order = order.to(self.device)
            rows = order[at * size : (at + 1) * size]
            batch = tuple(tensor.index_select(0, rows) for tensor in resident)
            yield self.spec.convert_batch(self.task.transform(batch, True))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Begin a step: set the learning rate, and return the loss of the batch."""
        if self._step == WARM_STEPS:
            synchronize(self.device)
            self._began = time.perf_counter()
        factor = lr_factor(self.config.lr_schedule, self._step, self.steps)
        self.optimizer.param_groups[0]["lr"] = self._base_lr * factor
        self._step += 1
        loss: Tensor = self.task.loss(self.task.forward(model, batch), batch)
        self.loss_sum += loss.detach()
        return loss

    def rate(self) -> Rate:
        """Return the rate and the mean loss, once all steps are done."""
        synchronize(self.device)
        elapsed_s = time.perf_counter() - self._began
        mean_loss = float(self.loss_sum) / self.steps
        release()
        return (
            self.steps - WARM_STEPS
        ) * self.runs.work.batch / elapsed_s, mean_loss


def bare(runs: Runs, config: TrainConfig) -> Rate:
    """Train by a hand-written loop."""
    parts = Bare(runs, config)
    for batch in parts.batches():
        parts.optimizer.zero_grad(set_to_none=True)
        with parts.spec.autocast_context(parts.device):
            loss = parts.loss(parts.model, batch)
        loss.backward()
        if config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(
                parts.model.parameters(), config.clip_grad_norm
            )
        parts.optimizer.step()
    return parts.rate()


def accelerate(runs: Runs, config: TrainConfig) -> Rate:
    """Train by a loop that was migrated to Accelerate as its documentation says."""
    from accelerate import Accelerator

    parts = Bare(runs, config)
    mixed = "no" if parts.spec.autocast is None else "bf16"
    runner = Accelerator(cpu=parts.device.type == "cpu", mixed_precision=mixed)
    model, optimizer = runner.prepare(parts.model, parts.optimizer)
    for batch in parts.batches():
        optimizer.zero_grad(set_to_none=True)
        with runner.autocast():
            loss = parts.loss(model, batch)
        runner.backward(loss)
        if config.clip_grad_norm is not None:
            runner.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        optimizer.step()
    return parts.rate()


def lightning(runs: Runs, config: TrainConfig) -> Rate:
    """Train by Lightning's Trainer, without logging, checkpoints or a progress bar."""
    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parts = Bare(runs, config)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def configure_optimizers(self) -> Any:
            return parts.optimizer

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return parts.loss(self.model, batch)

        def configure_gradient_clipping(
            self,
            optimizer: Any,
            gradient_clip_val: Any = None,
            gradient_clip_algorithm: Any = None,
        ) -> None:
            # Lightning's own method refuses every fused optimizer, even with
            # bf16.
            if gradient_clip_val is not None:
                nn.utils.clip_grad_norm_(
                    self.model.parameters(), gradient_clip_val
                )

    trainer = Trainer(
        accelerator="cpu" if parts.device.type == "cpu" else "gpu",
        devices=1,
        precision="32-true" if parts.spec.autocast is None else "bf16-mixed",
        max_steps=parts.steps,
        gradient_clip_val=config.clip_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), parts.batches())
    return parts.rate()


def paceline(runs: Runs, changes: dict[str, Any]) -> Rate:
    """Train by Paceline's loop; return the rate after the warm-up, and the mean loss.

    The times are those at which the loop asks whether to stop, every ten steps.
    """
    measured = runs.run(changes, math.inf)
    looks = measured.looks[WARM_STEPS // AGREE_EVERY_STEPS - 1 :]
    samples = (measured.result.steps - WARM_STEPS) * runs.work.batch
    return samples / (looks[-1] - looks[0]), measured.result.metrics[
        "train_loss"
    ]


def measure(
    work: Work, device: torch.device, rounds: int, steps: int
) -> dict[str, Any]:
    """Run all peers in turn; return medians, ratios to the bare loop, floor and losses.

    Args:
        steps: The number of steps of each run, a multiple of ten.
    """
    runs = Runs(work, device)
    changes = changes_of(work, device, steps)
    config = work.config(changes)
    losses: dict[str, float] = {}
    run: dict[str, Callable[[], Rate]] = {
        "bare": lambda: bare(runs, config),
        "bare again": lambda: bare(runs, config),
        "paceline": lambda: paceline(runs, changes),
    }
    if device.type == "cuda":
        eager = changes | {"cuda_graphs": False}
        run["uncaptured"] = lambda: paceline(runs, eager)
    for name, peer in (("lightning", lightning), ("accelerate", accelerate)):
        if importlib.util.find_spec(name) is not None:
            run[name] = lambda peer=peer: peer(runs, config)  # type: ignore[misc]

    def timed(name: str) -> Callable[[], float]:
        def rate() -> float:
            found, losses[name] = run[name]()
            return found

        return rate

    peers = {name: timed(name) for name in run}
    summary = summarize(interleave(peers, rounds), "bare", "bare again")
    apart = {
        name: loss
        for name, loss in losses.items()
        if not math.isclose(loss, losses["bare"], rel_tol=_CLOSE[device.type])
    }
    if apart:
        raise AssertionError(
            f"mean losses differ: {apart}, bare {losses['bare']}"
        )
    return {**summary, "train_loss": losses}


def judge(name: str, summary: dict[str, Any]) -> None:
    """Print whether each threshold held on a workload."""
    rows = summary["rows"]
    ratio = {peer: row["ratio"] for peer, row in rows.items()}
    verdict(
        f"{name}: Paceline over the bare loop", ratio["paceline"], LEAST[name]
    )
    uncaptured = ratio["uncaptured"]
    verdict(
        f"{name}: uncaptured over the bare loop", uncaptured, LEAST_UNCAPTURED
    )
    for peer in ("lightning", "accelerate"):
        if peer in ratio:
            ahead = ratio["paceline"] / ratio[peer]
            verdict(f"{name}: Paceline over {peer}", ahead, 1.0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument(
        "--works", type=lambda text: text.split(","), default=[*WORKS]
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="a multiple of ten"
    )
    given = parser.parse_args()
    if given.steps % AGREE_EVERY_STEPS or given.steps <= 2 * WARM_STEPS:
        rule = f"must be a multiple of ten above {2 * WARM_STEPS}"
        parser.error(f"--steps is {given.steps}, but {rule}: write 120")
    device, small = device_and_size(given.small)
    budget = Budget(given.minutes)
    results = {}
    longest_s = 0.0
    with quiet_and_cold():
        for name in given.works:
            if not budget.affords(name, longest_s):
                continue
            began = budget.spent_s()
            work = (SMALL if small else WORKS)[name]
            try:
                results[name] = measure(
                    work, device, given.rounds, given.steps
                )
            except Exception as error:
                failed(name, error)
                continue
            title = f"{name}, batch {work.batch}, {given.steps} steps"
            show(title, "samples/s", results[name])
            if not small:
                judge(name, results[name])
            longest_s = max(longest_s, budget.spent_s() - began)
    budget.say()
    kept = save("peers-small" if small else "peers", results, given.keep)
    print(f"\nkept in {kept}")


if __name__ == "__main__":
    main()
