"""Launchers without Ray: this process, spawned processes of this machine, or torchrun's.

Environment read (torchrun sets it): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.errors import RunFailedError
from trainers.loop.watchdog import HUNG_EXIT_CODE
from trainers.storage import Storage

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800


class Result(Protocol):
    """What a worker's work gave."""

    def to_json(self) -> str:
        """As it crosses between processes."""


R = TypeVar("R", bound=Result)
R_co = TypeVar("R_co", bound=Result, covariant=True)


class Job(Protocol[R_co]):
    """What the launchers start: a training run (RunSpec) or an inference pass (Inference)."""

    @property
    def config(self) -> TrainConfig:
        """Device and workers."""

    @property
    def storage(self) -> Storage:
        """The run's directory."""

    def execute(self, context: RunContext) -> R_co:
        """The work of one worker."""

    def read_result(self, text: bytes) -> R_co:
        """What `execute` gave, from its JSON."""


class LocalContext(RunContext):
    """RunContext of the launchers in this file. SIGTERM and the first Ctrl-C ask the loop to stop."""

    _asked_to_stop = False

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether a signal came."""
        return self._asked_to_stop

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as the wish to stop; a second Ctrl-C interrupts at once."""

        def handler(number: int, frame: FrameType | None) -> None:
            if self._asked_to_stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._asked_to_stop = True
            if self.rank == 0:
                logger.info("asked to stop (%s): writing a checkpoint first", signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)


def setup_logging(rank: int) -> None:
    """Progress of our packages on standard output: rank 0 as it is, other ranks from warnings on, with their rank."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    for name in ("trainers", "cluster", "tune"):
        package = logging.getLogger(name)
        package.handlers[:] = [handler]
        package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        package.propagate = False


def run_local(spec: Job[R]) -> R:
    """One worker, in this process."""
    context = LocalContext(spec.storage, "local")
    context.listen()
    return spec.execute(context)


def run_torchrun(spec: Job[R]) -> R:
    """This process is one of torchrun's workers; each of them calls this."""
    env = os.environ
    context = LocalContext(
        spec.storage,
        "torchrun",
        int(env["RANK"]),
        int(env["WORLD_SIZE"]),
        int(env["LOCAL_RANK"]),
        int(env["LOCAL_WORLD_SIZE"]),
    )
    return _run_in_group(spec, context, "env://")


def run_spawn(spec: Job[R]) -> R:
    """`scaling.num_workers` processes on this machine; the result is rank 0's.

    A group that ran out of memory in mid-training starts again with a smaller microbatch. Raises RunFailedError with
    the words of the rank that failed first.
    """
    while True:
        try:
            return _spawn_group(spec)
        except RunFailedError as failure:
            if not failure.smaller:
                raise
            logger.warning("%s; the workers start again with a smaller one", failure.message)


def _spawn_group(spec: Job[R]) -> R:
    workers = spec.config.scaling.max_workers
    with tempfile.TemporaryDirectory(prefix="paceline-spawn-") as directory:
        processes = start_processes(
            _spawned, (spec, workers, directory), nprocs=workers, join=False, start_method="spawn"
        )
        assert processes is not None
        # Ctrl-C reaches the workers too (one terminal, one process group): they stop, and this process waits.
        interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            while not processes.join(timeout=1):
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            exits = {rank: process.exitcode for rank, process in enumerate(processes.processes)}
            raise _failure(Path(directory), error, exits) from None
        finally:
            signal.signal(signal.SIGINT, interrupts)
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return spec.read_result(Path(directory, "result.json").read_bytes())


def _spawned(rank: int, spec: Job[Any], world_size: int, directory: str) -> None:
    setup_logging(rank)
    context = LocalContext(spec.storage, "spawn", rank, world_size, rank, world_size)
    try:
        result = _run_in_group(spec, context, f"file://{directory}/rendezvous")
        if rank == 0:
            Path(directory, "result.json").write_text(result.to_json())
    except BaseException as error:
        failure = RunFailedError.of(error, rank)
        Path(directory, f"failed-{rank}").write_text(json.dumps(failure.args))
        raise


def _failure(directory: Path, error: Exception, exits: dict[int, int | None]) -> RunFailedError:
    """A rank that died without a word, else the error of the rank that failed first; the others followed from it."""
    failures = [RunFailedError(*json.loads(path.read_text())) for path in directory.glob("failed-*")]
    for rank, code in exits.items():
        # SIGTERM is how torch ends the ranks that are left.
        if code == HUNG_EXIT_CODE:
            failures.append(RunFailedError("hung", f"rank {rank} made no step; see hangs/ in the run's directory"))
        elif code not in (None, 0, -signal.SIGTERM) and not (directory / f"failed-{rank}").exists():
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return RunFailedError("node_lost", f"rank {rank} died {how}")
    if not failures:
        return RunFailedError("node_lost", str(error).strip().splitlines()[-1])
    first = RunFailedError.first(failures)
    if not first.config:
        logger.error("%s", str(error).strip())
    return first


def _run_in_group(spec: Job[R], context: LocalContext, init_method: str) -> R:
    context.listen()
    use_cuda = spec.config.device in ("auto", "cuda") and torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(context.local_rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if use_cuda else "gloo",
        init_method=init_method,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        return spec.execute(context)
    finally:
        # A DDP reducer in a reference cycle would outlive the group: the process then aborts one time in eight.
        gc.collect()
        dist.destroy_process_group()
