"""Run a function in real processes that share a gloo group, and give back what
each of them returns.

The processes are forked from one server, which has imported torch and the loop
and computes nothing itself: a start costs a few hundredths of a second in
place of seconds.
"""

import gc
import json
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.specs import REPOSITORY
from tests.waits import HANG_S
from trainers.launch import local

PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "trainers.loop.fit",
    "trainers.launch.local",
    "tests.tasks",
    "torchmetrics",
]


def run_processes(
    world_size: int, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """`function(rank, world_size, *args)` in `world_size` new processes; the
    results in rank order.
    """
    # A file of its own each time: a process that ends without closing its
    # store leaves the group's addresses in it.
    with tempfile.TemporaryDirectory() as meeting:
        _fork(
            _enter,
            (world_size, function, Path(meeting), args),
            nprocs=world_size,
        )
        return [
            pickle.loads(Path(meeting, f"result-{rank}").read_bytes())  # noqa: S301
            for rank in range(world_size)
        ]


@contextmanager
def forked_launcher() -> Iterator[None]:
    """The launcher `spawn` forks its workers from the server, too; all else is
    as users have it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainers.launch.local.start_processes", _fork)
        yield


def run_module(
    module: str,
    arguments: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    directory: Path,
    timeout_s: float,
) -> int:
    """`python -m module arguments` in a forked process, its output in
    `directory`/out and /err; the exit code.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(
        target=run_command,
        args=(module, list(arguments), str(cwd), environment, str(directory)),
    )
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired([module, *arguments], timeout_s)
    return process.exitcode


def printed_by(module: str, directory: Path) -> Any:
    """What `python -m module directory` prints last, as JSON: a process of its
    own, which itself forks workers.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def end_server() -> None:
    """The server ends with the session that started it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _fork(*args: Any, **options: Any) -> Any:
    forkserver.set_forkserver_preload(PRELOADED)
    return start_processes(*args, **{**options, "start_method": "forkserver"})


def run_command(
    module: str,
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    directory: str,
) -> None:
    gc.freeze()
    asking = multiprocessing.parent_process().pid
    niceness = os.getpriority(os.PRIO_PROCESS, asking)  # not the server's
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    for name, descriptor in (("out", 1), ("err", 2)):
        with Path(directory, name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.argv = [module, *arguments]
    sys.path[0] = cwd
    # Workers of its own are forked too: this process has imported torch, and
    # computed nothing.
    local.start_processes = lambda *args, **options: start_processes(
        *args, **{**options, "start_method": "fork"}
    )
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _enter(
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    meeting: Path,
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # what the server has imported: a collection would go through it all
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"file://{meeting}/store",
        timedelta(seconds=300),
        world_size,
        rank,
    )
    # A rank that leaves while another still connects would fail that one.
    dist.barrier()
    try:
        result = function(rank, world_size, *args)
    finally:
        gc.collect()
        dist.destroy_process_group()
    (meeting / f"result-{rank}").write_bytes(pickle.dumps(result))
