"""Is the memory that `python -m trainers memory` predicts what steps take?

Run as: python -m benchmarks.memory [--works cnn,resnet50,bert-base,gpt] [--strategies
                                    none,ddp,fsdp] [--full | --small] [--minutes 60]
                                    [--keep]
Each model in three microbatches, fp32 and bf16, with and without activation
checkpointing, under AdamW; `none` is one rank, ddp and fsdp are two (on a CPU, in
fp32). Two steps of the product's own are taken: on a CPU below torch's own trackers
(torch.distributed._tools), which count the same tensors by other means; on a GPU the
peak is its allocator's. A CPU without bf16 takes minutes for a step in it: there the
large models have fake tensors below the tracker. `ratio` is predicted over measured.
Without CUDA, or with `--small`, the models are miniatures; `--full` takes the large ones
there, for an hour.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.measure import failed, save, verdict
from benchmarks.runs import Work, example, release
from trainers.config import TrainConfig
from trainers.data.batch import map_tensors
from trainers.devices.group import Group
from trainers.launch.find_task import load_task
from trainers.launch.memory_forecast import Forecaster, fake_model, fake_world
from trainers.loop.build import make_trained
from trainers.model.strategy import wrap_model
from trainers.step.train_step import TrainStep
from trainers.task import Task

WORKS: dict[str, tuple[Work, tuple[int, ...]]] = {
    "cnn": (example("mnist", 1, synthetic=True, samples=512), (64, 128, 256)),
    "resnet50": (
        example("imagenet", 1, synthetic=True, samples=32, size=96, stored=128),
        (4, 8, 16),
    ),
    "bert-base": (
        example("bert", 1, synthetic=True, geometry="base", samples=32),
        (2, 4, 8),
    ),
    "gpt": (
        example(
            "gpt",
            1,
            context=256,
            width=768,
            heads=12,
            layers=12,
            lines=2000,
            packed=True,
        ),
        (1, 2, 4),
    ),
}
# fmt: off
SMALL: dict[str, tuple[Work, tuple[int, ...]]] = {
    "cnn": (example("mnist", 1, synthetic=True, samples=64), (4, 16)),
    "resnet50": (example("imagenet", 1, synthetic=True, samples=8, architecture="resnet18", size=32), (4, 8)),
    "bert-base": (example("bert", 1, synthetic=True, geometry="tiny", length=16, samples=32), (4, 8)),
    "gpt": (example("gpt", 1, context=16, width=32, heads=2, layers=2, lines=200, packed=True), (4, 8)),
}
# fmt: on
_STEPS = 2
_OFF = 0.1
"""By how much of what was measured a prediction may be wrong."""
_PORT_FILE = "rendezvous"


def cases(
    size: int, checkpoints: bool, strategy: str, bf16: bool = True
) -> Iterator[dict[str, Any]]:
    """The configurations of a microbatch size."""
    for precision in ("fp32", "bf16") if bf16 else ("fp32",):
        for mode in ("none", "full") if checkpoints else ("none",):
            yield {
                "precision": precision,
                "activation_checkpointing": mode,
                "strategy": strategy,
                "microbatch_size": size,
                "optimizer": {"name": "adamw", "lr": 1e-3},
            }


def predicted(
    task: Task, config: TrainConfig, size: int, world: int, device: torch.device
) -> int:
    """Bytes that fake steps take at their peak."""
    with fake_world(world if config.strategy == "fsdp" else 1):
        make = lambda: load_task(config.task, config.task_args, "benchmarks")  # noqa: E731
        return Forecaster(make, config, task.dataset("train"), Group(0, world, device))(
            size
        ).peak


def measured(
    task: Task, config: TrainConfig, size: int, group: Group, fake: bool = False
) -> int:
    """Return the bytes that steps take at their peak, as torch counts them.

    `fake` tensors have no values and take no time.
    """
    train = task.dataset("train")
    if fake:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        task, model = fake_model(lambda: task, train, mode, None, group.device)
        with mode:
            return _counted(task, model, train, config, size, group)
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(group.device)
    return _counted(task, task.model(), train, config, size, group)


def _counted(
    task: Task,
    model: nn.Module,
    train: Any,
    config: TrainConfig,
    size: int,
    group: Group,
) -> int:
    tracker: Any = None
    trained = make_trained(task, model, config, group)
    forward = trained.forward
    optimizer = trained.optimizer
    sharded = config.strategy == "fsdp" and group.world_size > 1
    if group.device.type == "cpu":
        tracker = FSDPMemTracker(model, optimizer) if sharded else MemTracker()
        if not sharded:
            tracker.track_external(model, optimizer)
        tracker.__enter__()
    wrapped = wrap_model(model, group, config.strategy)
    step = TrainStep(
        type(forward)(wrapped, task, forward.spec, forward.device), optimizer, group
    )
    for _ in range(_STEPS):
        with torch.no_grad():
            with _disable_current_modes():
                batch = task.worst_case_batch(train, size)
            batch = task.transform(
                map_tensors(lambda tensor: tensor.to(group.device, copy=True), batch),
                True,
            )
        if tracker is not None:
            tracker.reset_mod_stats()
        step(iter([batch]), [size], size * group.world_size, False)
        del batch
    if tracker is None:
        return torch.cuda.max_memory_allocated(group.device)
    tracker.__exit__(None, None, None)
    return int(
        sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
    )


def _rank(
    rank: int,
    world: int,
    directory: str,
    work: Work,
    changes: dict[str, Any],
    size: int,
) -> None:
    config = work.config(
        {"device": "cpu", "global_batch_size": size * world, **changes}
    )
    store = f"file://{directory}/{_PORT_FILE}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        task = load_task(config.task, config.task_args, "benchmarks")
        peak = measured(task, config, size, Group(rank, world, torch.device("cpu")))
        if rank == 0:
            Path(directory, "peak").write_text(str(peak))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--strategies", default="none,ddp,fsdp")
    parser.add_argument(
        "--full", action="store_true", help="large models without CUDA, too"
    )
    parser.add_argument("--small", action="store_true", help="miniatures, as on a CPU")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_large = given.full or (device.type == "cuda" and not given.small)
    works = WORKS if is_large else SMALL
    ends = time.monotonic() + given.minutes * 60
    rows: list[dict[str, Any]] = []
    print(f"{'':44}{'predicted':>14}{'measured':>14}  ratio", flush=True)
    for strategy in given.strategies.split(","):
        world = 1 if strategy == "none" else 2
        if world > 1 and device.type == "cuda":
            continue
        for name in given.works.split(","):
            work, sizes = works[name]
            for size in sizes:
                for changes in cases(
                    size,
                    name != "cnn",
                    "ddp" if world == 1 else strategy,
                    bf16=world == 1,
                ):
                    if time.monotonic() > ends:
                        break
                    slow = works is WORKS and name != "cnn" and device.type == "cpu"
                    words = f"{name} {strategy} {size} {changes['precision']} {changes['activation_checkpointing']}"
                    fake = slow and changes["precision"] == "bf16"
                    try:
                        row = one(work, changes, size, world, device, fake)
                    except Exception as error:
                        failed(words, error)
                        release()
                        continue
                    rows.append({"work": name, "ranks": world, **changes, **row})
                    sizes_mib = (
                        f"{row[key] / 2**20:>10,.1f} MiB"
                        for key in ("predicted", "measured")
                    )
                    print(
                        f"{words:44}{''.join(sizes_mib)}  {row['ratio']:.3f}  {row['tensors']}",
                        flush=True,
                    )
                    off = abs(row["ratio"] - 1)
                    verdict(f"{words}: off by", off, most=_OFF, small=not is_large)
    ratios = [row["ratio"] for row in rows]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=math.nan)
    print(f"{len(rows)} rows; furthest from 1: {worst:.3f}")
    save("memory", {"rows": rows}, given.keep)


def one(
    work: Work,
    changes: dict[str, Any],
    size: int,
    world: int,
    device: torch.device,
    fake: bool = False,
) -> dict[str, Any]:
    """Predict and measure one configuration."""
    config = work.config(
        {"device": device.type, "global_batch_size": size * world, **changes}
    )
    task = load_task(config.task, config.task_args, "benchmarks")
    expected = predicted(task, config, size, world, device)
    if world == 1:
        peak = measured(task, config, size, Group(0, 1, device), fake)
    else:
        with tempfile.TemporaryDirectory() as directory:
            start_processes(
                _rank,
                (world, directory, work, changes, size),
                nprocs=world,
                start_method="spawn",
            )
            peak = int(Path(directory, "peak").read_text())
    gc.collect()
    return {
        "tensors": "fake" if fake else "real",
        "predicted": expected,
        "measured": peak,
        "ratio": expected / peak,
    }


if __name__ == "__main__":
    main()
