"""What a parameter costs: the third part of benchmarks/scale.py, with what its other parts also reckon by.

Beside each cost stands what the machine itself takes for it (`floor`, measured twice: the A/A floor).
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.checkpoint import make_state, written_at_once
from trainers.checkpoint.checkpoints import Checkpoints
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.devices.group import Group
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.measure.clock import WARMUP_STEPS
from trainers.storage import Storage
from trainers.task import Task

PARAMETERS = (10**5, 10**6, 10**7, 10**8)
_LAYERS, _BATCH = 4, 8
_STATE_BYTES = 12  # a parameter's: its weight and two moments
_NEAR = 1.5
"""Within this factor of a line a cost is on it."""
_CPU = torch.device("cpu")


class Square(Task):
    """Square layers with about so many parameters in all."""

    def __init__(self, parameters: int) -> None:
        self.width = round((parameters / _LAYERS) ** 0.5)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(self.width, self.width, bias=False) for _ in range(_LAYERS)]
        return nn.Sequential(*layers)

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.randn(_BATCH, self.width))

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return outputs.square().mean()


def explain(sizes: Sequence[int], costs: Sequence[float]) -> dict[str, float]:
    """The line through the first and the last cost, and by how much (at least 1) the worst of all is off it.

    A cost that falls is laid beside a level line.
    """
    unit = max(0.0, (costs[-1] - costs[0]) / (sizes[-1] - sizes[0]))
    fixed = max(0.0, costs[0] - unit * sizes[0])
    ratios = [cost / (fixed + unit * size) for size, cost in zip(sizes, costs, strict=True)]
    return {"fixed": fixed, "unit": unit, "off": max(max(ratio, 1 / ratio) for ratio in ratios)}


def verdict(sizes: Sequence[int], costs: Sequence[float], floors: Sequence[float] | None = None) -> str:
    """Whether a unit costs the same at every size, or what explains that it does not, in words."""
    off = explain(sizes, costs)["off"]
    if off <= _NEAR:
        return "flat" if costs[-1] > _NEAR * costs[0] else "the same at every size"
    if floors is not None and off <= _NEAR * (own := explain(sizes, floors)["off"]):
        return f"the machine's own cost bends as much ({own:.2f} x)"
    return "NOT EXPLAINED"


def spread(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure."""
    return {
        name: {
            "median": statistics.median(row[name] for row in rows),
            "min": min(row[name] for row in rows),
            "max": max(row[name] for row in rows),
            "n": len(rows),
        }
        for name in rows[0]
    }


def in_turn(sizes: Sequence[int], rounds: int, measure: Callable[[int], dict[str, float]]) -> dict[int, Any]:
    """Every size once a round; the figures of each."""
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            found[size].append(measure(size))
    return {size: spread(rows) for size, rows in found.items()}


def step_ms(parameters: int, steps: int) -> float:
    """A step of our loop."""
    tree = {
        "task": "benchmarks.scale_parameters:Square",
        "max_steps": WARMUP_STEPS + steps,
        "global_batch_size": _BATCH,
        "microbatch_size": _BATCH,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "log_every_steps": 10_000,
        "evaluate": {"every_steps": 10_000},
        "launcher": "local",
        "device": "cpu",
    }
    context = LocalContext(None, "local")
    result = fit(Square(parameters), build(TrainConfig, tree, "benchmark"), context)
    assert result.throughput is not None
    return result.throughput.step_time_s * 1e3


def plain_step_ms(parameters: int, steps: int) -> float:
    """The same step, by hand."""
    task = Square(parameters)
    model, (rows,) = task.model(), task.dataset("train").tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    began = 0.0
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        task.loss(model(rows), (rows,)).backward()
        optimizer.step()
    return (time.perf_counter() - began) / steps * 1e3


def plain_write_ms(state: dict[str, Any], directory: Path) -> float:
    """The tensors' bytes to one file that is on the disk at the end."""
    tensors = [
        *state["model"].values(),
        *(one for pair in state["optimizer"]["state"].values() for one in pair.values()),
    ]
    path = directory / "plain"
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    with path.open("wb") as stream:
        for tensor in tensors:
            stream.write(memoryview(tensor.numpy()).cast("B"))
        stream.flush()
        os.fsync(stream.fileno())
    return (time.perf_counter() - began) * 1e3


def of_parameters(parameters: int, directory: Path, restore: Callable[[], list[str]]) -> dict[str, float]:
    """All figures of one size, in ms."""
    steps = max(10, min(200, 2 * 10**8 // parameters))
    found = {
        "step floor": plain_step_ms(parameters, steps),
        "step": step_ms(parameters, steps),
        "step floor again": plain_step_ms(parameters, steps),
    }
    began = time.perf_counter()
    left = restore()
    found["lane reset"] = (time.perf_counter() - began) * 1e3
    assert not left, left
    state = make_state(max(1, round(parameters * _STATE_BYTES / 2**20)), _CPU)
    run = directory / "run"  # empty: the newest checkpoint deletes the one before, and that may be a large one
    checkpoints = Checkpoints(Storage(str(run)), Group(0, 1, _CPU), 1)
    found["checkpoint floor"] = plain_write_ms(state, directory)
    found["checkpoint"] = written_at_once(checkpoints, state)
    found["checkpoint floor again"] = plain_write_ms(state, directory)
    shutil.rmtree(run)
    return found


def by_parameters(sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Costs of each number of parameters; the first, smallest, round is a warm-up."""
    from tune.lanes.process_state import Baseline

    directory = Path(tempfile.mkdtemp(prefix="paceline-scale-"))
    baseline = Baseline(_CPU, ())
    try:
        of_parameters(sizes[0], directory, baseline.restore)
        rows = in_turn(sizes, rounds, lambda size: of_parameters(size, directory, baseline.restore))
    finally:
        baseline.close()
        gc.unfreeze()  # a lane's process freezes what it has imported, and ends without looking back
        shutil.rmtree(directory, ignore_errors=True)
    lines: dict[str, Any] = {}
    print("\nparameters: ms, and ns a parameter")
    for cost in ("step", "checkpoint", "lane reset"):
        medians = [row[cost]["median"] for row in rows.values()]
        floors = [row[f"{cost} floor"]["median"] for row in rows.values()] if cost != "lane reset" else None
        lines[cost] = line = explain(sizes, medians)
        for size, row in rows.items():
            here, floor = row[cost], row.get(f"{cost} floor")
            beside = ""
            if floor is not None:
                noise = abs(row[f"{cost} floor again"]["median"] / floor["median"] - 1)
                beside = f"   {here['median'] / floor['median']:5.2f} x its floor (A/A {noise:.0%})"
            print(
                f"  {cost:10} {size:>11,}  {here['median']:>9,.2f} ms [{here['min']:,.2f}, {here['max']:,.2f}] "
                f"n={here['n']}  {here['median'] / size * 1e6:>9,.2f} ns{beside}"
            )
        print(
            f"  {cost:10} = {line['fixed']:.2f} ms + {line['unit'] * 1e6:.3f} ns a parameter, "
            f"within {line['off']:.2f} x: {verdict(sizes, medians, floors)}"
        )
    return {"rows": rows, "lines": lines}
