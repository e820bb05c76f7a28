"""What does the loop cost where nothing else does?

A CIFAR-shaped run against the same training without any loader.

Run as: python -m benchmarks.resident [ROUNDS] [--steps 320] [--minutes 1] [--small]
[--keep] The limit is `bare`: ResNet-9 of examples/cifar10 in bf16 and channels last,
its 50,000 images resident on the device as uint8, rows taken from them by the same
permutation, the task's own augmentation, autocast, the same fused SGD and schedule; no
DataLoader, no check, nothing that waits for the device. Measured twice: the A/A floor.
`paceline` is the product's loop on the same steps, and `captured` the same with
`cuda_graphs: true` (CUDA only). All in turn, by a clock on the wall after 20 steps of
warm-up, whatever happens between steps and epochs included. Mean losses must be equal.
Target: paceline at 0.95 of the limit or more. `--small` (the default without CUDA) is a
miniature.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import interleave, save, show, summarize
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
from trainers.devices.device import synchronize
from trainers.loop.agreement import AGREE_EVERY_STEPS
from trainers.model.optimizer import lr_factor
from trainers.model.precision import apply_matmul, resolve_precision

FULL = example("cifar10", 512, synthetic=True)
SMALL = example("cifar10", 16, synthetic=True, samples=200, width=4)
TARGET = 0.95
WARM_STEPS = 20
_CLOSE = {"cpu": 1e-5, "cuda": 0.05}
"""How far mean losses may lie apart: on CUDA products sum in another order every time,
and bf16 keeps three digits.
"""
_BUILD_S = 1.5  # of a run of the product, beside its steps: probes, counts, evaluation
_CAPTURED = "captured"


def changes_of(work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    """What both loops train."""
    on_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "precision": "bf16" if on_gpu else "fp32",
        "channels_last": on_gpu,
        "max_steps": steps,
        "log_every_steps": 10 * steps,  # one window: its mean loss is the run's
        "evaluate.microbatch_size": work.batch,
    }


def bare(runs: Runs, config: TrainConfig) -> tuple[float, float]:
    """Run the loop without a loader: samples/s after the warm-up, and the mean loss."""
    task = runs.task
    device = runs.device
    size = runs.work.batch
    steps = config.max_steps or 0
    spec = resolve_precision(config.precision, device)
    apply_matmul(spec)
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(1)
    layout = (
        torch.channels_last if config.channels_last is True else torch.contiguous_format
    )
    images, labels = (tensor.to(device) for tensor in task.dataset("train").tensors)
    model = task.model().to(device).to(memory_format=layout)
    optimizer = runs.new_optimizer(model, config)
    base = optimizer.param_groups[0]["lr"]
    torch.manual_seed(config.seed)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    per_epoch = len(images) // size
    began = 0.0
    for step in range(steps):
        if step == WARM_STEPS:
            synchronize(device)
            began = time.perf_counter()
        epoch, at = divmod(step, per_epoch)
        if at == 0:
            generator = torch.Generator().manual_seed(config.seed + epoch)
            order = torch.randperm(len(images), generator=generator).to(device)
        rows = order[at * size : (at + 1) * size]
        pixels, answers = task.transform(
            (images.index_select(0, rows), labels.index_select(0, rows)), True
        )
        optimizer.param_groups[0]["lr"] = base * lr_factor(
            config.lr_schedule, step, steps
        )
        optimizer.zero_grad(set_to_none=True)
        with spec.autocast_context(device):
            loss = task.loss(
                model(pixels.contiguous(memory_format=layout)), (pixels, answers)
            )
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
    synchronize(device)
    elapsed_s = time.perf_counter() - began
    release()
    return (steps - WARM_STEPS) * size / elapsed_s, float(loss_sum) / steps


def paceline(runs: Runs, changes: dict[str, Any]) -> tuple[float, float]:
    """Run the product's loop: samples/s after the warm-up, and the mean loss.

    From its look at the end of the warm-up to the one at the last step.
    """
    measured = runs.run(changes, math.inf)
    looks = measured.looks[WARM_STEPS // AGREE_EVERY_STEPS - 1 :]
    steps = measured.result.steps - WARM_STEPS
    return steps * runs.work.batch / (looks[-1] - looks[0]), measured.result.metrics[
        "train_loss"
    ]


def measure(
    work: Work, device: torch.device, rounds: int, steps: int, budget: Budget
) -> dict[str, Any]:
    """All peers in turn: medians, ratios to the limit, floor, losses.

    `steps` must be a multiple of ten.
    """
    runs = Runs(work, device)
    changes = changes_of(work, device, steps)
    config = work.config(changes)
    losses: dict[str, float] = {}

    def rate(name: str, run: Callable[[], tuple[float, float]]) -> Callable[[], float]:
        def measured() -> float:
            found, losses[name] = run()
            return found

        return measured

    peers = {
        "bare": rate("bare", lambda: bare(runs, config)),
        "paceline": rate("paceline", lambda: paceline(runs, changes)),
        "bare again": rate("bare again", lambda: bare(runs, config)),
    }
    if device.type == "cuda":
        peers["bare"]()  # CUDA's own start is over
        began = time.monotonic()
        peers["bare"]()
        run_s = time.monotonic() - began + _BUILD_S
        if budget.affords(_CAPTURED, (rounds + 1) * (len(peers) + 1) * run_s):
            captured = changes | {"cuda_graphs": True}
            peers[_CAPTURED] = rate(_CAPTURED, lambda: paceline(runs, captured))
    summary = summarize(interleave(peers, rounds), "bare", "bare again")
    show(
        f"ResNet-9, images [3, 32, 32], batch {work.batch}, {steps} steps",
        "samples/s",
        summary,
    )
    close = _CLOSE[device.type]
    if wrong := {
        name: loss
        for name, loss in losses.items()
        if not math.isclose(loss, losses["bare"], rel_tol=close)
    }:
        raise AssertionError(
            f"not the same training: mean losses {wrong} against {losses['bare']}"
        )
    ratio = summary["rows"]["paceline"]["ratio"]
    met = ratio >= TARGET
    print(
        f"  target: at least {TARGET} of the bare loop; {'met' if met else 'MISSED'} with {ratio:.3f}"
    )
    return {**summary, "train_loss": losses, "target": TARGET, "met": met}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=320, help="of each run, in tens, warm-up included"
    )
    given = parser.parse_args()
    if given.steps % AGREE_EVERY_STEPS or given.steps <= 2 * WARM_STEPS:
        parser.error(
            f"--steps is {given.steps}, but must be a multiple of ten above {2 * WARM_STEPS}: write 320"
        )
    device, small = device_and_size(given.small)
    budget = Budget(given.minutes)
    with quiet_and_cold():
        results = measure(
            SMALL if small else FULL, device, given.rounds, given.steps, budget
        )
    budget.say()
    print(
        f"\nkept in {save('resident-small' if small else 'resident', results, given.keep)}"
    )


if __name__ == "__main__":
    main()
