"""Run a function in real processes that share a gloo group, and give back what each of them returns."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def run_processes(world_size: int, function: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """`function(rank, world_size, *args)` in `world_size` new processes; the results in rank order."""
    start_processes(_enter, (world_size, function, str(directory), args), nprocs=world_size, start_method="spawn")
    return [pickle.loads((directory / f"result-{rank}").read_bytes()) for rank in range(world_size)]  # noqa: S301


def _enter(rank: int, world_size: int, function: Callable[..., Any], directory: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    where = f"file://{directory}/rendezvous-{world_size}"
    dist.init_process_group("gloo", where, timedelta(seconds=60), world_size, rank)
    try:
        result = function(rank, world_size, *args)
    finally:
        gc.collect()
        dist.destroy_process_group()
    Path(directory, f"result-{rank}").write_bytes(pickle.dumps(result))
