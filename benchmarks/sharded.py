"""What does a sharded checkpoint, which all ranks write together, cost?

Its time and memory are compared with those of torch's DCP.

Run as: python -m benchmarks.sharded [ROUNDS] [--mb 200] [--ranks 4]
    [--directory DIR] [--full] [--keep]

The state is a model of `--mb` in FSDP2 units, with the moments of AdamW: three
times `--mb` in all. `--full` sets 2 GB of parameters. Each round measures, in
turn: `ours`, a checkpoint of Paceline, which is written with checksums that are
verified when it is read; and `dcp`, torch.distributed.checkpoint.save and load
of the same state (measured twice, for the A/A floor). Times are medians in ms,
until the last rank has ended. Memory is the peak of the rank with the highest
one, above what that rank held before.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from benchmarks.measure import interleave, save, show, summarize
from trainers.checkpoint._row_shards import cut_rows
from trainers.checkpoint.store import Checkpoints
from trainers.devices.device import get_rng_state
from trainers.devices.group import Group
from trainers.model.sharding import is_shard, local, place_rows
from trainers.storage import Storage

_FULL_MB = 2000
_WIDTH = 1024
_PORT_FILE = "rendezvous"
CPU = torch.device("cpu")


def make_state(size_mb: int) -> dict[str, Any]:
    """Return a sharded model's parameters and moments; no rank holds a whole tensor."""
    layers = max(1, size_mb * 2**20 // (4 * _WIDTH**2))
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    parameters = [parameter.detach() for parameter in model.parameters()]
    for parameter in parameters:
        nn.init.normal_(local(parameter))
    moments = {
        number: {
            name: torch.rand_like(parameter)
            for name in ("exp_avg", "exp_avg_sq")
        }
        for number, parameter in enumerate(parameters)
    }
    return {
        "model": model.state_dict(),
        "optimizer": {"state": moments, "param_groups": []},
        "position": {"step": 1},
    }


def ours(
    checkpoints: Checkpoints, state: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one writes a checkpoint of ours, the other reads it.

    Parameters are read into the tensors that each rank already has.
    """
    like = next(filter(is_shard, state["model"].values()))
    group = checkpoints.group

    def write() -> None:
        cut = cut_rows(state, group)
        checkpoints.save(1, cut.rest, get_rng_state(CPU), {}, cut.rows)

    def read() -> None:
        found = checkpoints.load()
        assert found is not None
        assert found.rows is not None
        place = lambda rows, whole: place_rows(rows, whole, like)  # noqa: E731
        found.rows.fill(
            found.state["model"],
            group.rank,
            group.world_size,
            place,
            into=state["model"],
        )
        state[
            "optimizer"
        ] = {}  # a run that resumes has no moments yet, and keeps what it reads
        state["optimizer"] = found.rows.fill(
            found.state["optimizer"], group.rank, group.world_size, place
        )

    return write, read


def plain(
    directory: Path, state: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: one writes the state by torch's DCP, the other reads it."""

    def write() -> None:
        dcp.save(tensors(state), checkpoint_id=directory)

    def read() -> None:
        dcp.load(tensors(state), checkpoint_id=directory)

    return write, read


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the state that DCP saves and loads."""
    return {"model": state["model"], "optimizer": state["optimizer"]["state"]}


def timed(action: Callable[[], None]) -> float:
    """Call `action`; return how long it took until every rank had done it, ms."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return (time.perf_counter() - began) * 1e3


def peak(action: Callable[[], None]) -> float:
    """Call `action`; return by how many MB this process grew at its peak."""
    status = Path("/proc/self/status")
    clear = Path("/proc/self/clear_refs")

    def read(field: str) -> int:
        return int(
            next(
                line
                for line in status.read_text().splitlines()
                if line.startswith(field)
            ).split()[1]
        )

    before = read("VmRSS")
    clear.write_text("5")  # resets VmHWM, the highest resident size
    timed(action)
    return (read("VmHWM") - before) / 1024


def measure(
    rank: int, world_size: int, directory: str, size_mb: int, rounds: int
) -> None:
    """Measure on one rank; rank 0 writes the figures to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore"
    )  # DCP warns in each round that a checkpoint exists already
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/{_PORT_FILE}",
        rank=rank,
        world_size=world_size,
    )
    group = Group(rank, world_size, CPU)
    state = make_state(size_mb)
    checkpoints = Checkpoints(Storage(f"{directory}/ours"), group, 1)
    peers = {"ours": ours(checkpoints, state)}
    peers |= {
        name: plain(Path(directory, name), state)
        for name in ("dcp", "dcp again")
    }
    parts: list[Tensor] = [local(value) for value in state["model"].values()]
    found: dict[str, Any] = {
        "share_mb": 3 * sum(part.nbytes for part in parts) / 2**20
    }
    memory = {}
    for name, (write, read) in peers.items():
        memory[name] = {
            "write": max(group.gather(peak(write))),
            "read": max(group.gather(peak(read))),
        }
    found["memory_mb"] = memory
    for number, action in enumerate(("write", "read")):
        actions = {
            name: functools.partial(timed, pair[number])
            for name, pair in peers.items()
        }
        found[action] = summarize(
            interleave(actions, rounds, seed=0), "dcp", "dcp again"
        )
    if rank == 0:
        Path(directory, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(
    rounds: int, size_mb: int, ranks: int, parent: str | None, keep: bool
) -> None:
    """Measure on all ranks; print and save the figures."""
    directory = tempfile.mkdtemp(prefix="sharded-", dir=parent)
    try:
        start_processes(
            measure,
            (ranks, directory, size_mb, rounds),
            nprocs=ranks,
            start_method="spawn",
        )
        found = json.loads(Path(directory, "found.json").read_text())
    finally:
        shutil.rmtree(directory)
    for action in ("write", "read"):
        show(
            f"{action}, {size_mb} MB of parameters on {ranks} ranks",
            "ms",
            found[action],
        )
    print(
        f"\na rank's share: {found['share_mb']:,.0f} MB; its peak above what it held before, MB:"
    )
    for name, figures in found["memory_mb"].items():
        print(
            f"    {name:12}{figures['write']:>8,.0f} writing{figures['read']:>8,.0f} reading"
        )
    print(
        f"\nkept in {save('sharded', {'mb': size_mb, 'ranks': ranks, **found}, keep)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rounds", nargs="?", type=int, default=9)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--directory")
    parser.add_argument(
        "--full", action="store_true", help="2 GB of parameters"
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    given = parser.parse_args()
    main(
        given.rounds,
        _FULL_MB if given.full else given.mb,
        given.ranks,
        given.directory,
        given.keep,
    )
