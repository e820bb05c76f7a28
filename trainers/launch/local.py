"""Launchers without Ray: this process, spawned processes of this machine, or torchrun's.

Environment read (torchrun sets it): RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_ERROR_FILE.
"""

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from trainers.context import RunContext
from trainers.errors import PacelineError, RunFailedError, last_line
from trainers.launch.spec import Job, R
from trainers.loop.watchdog import HUNG_EXIT_CODE

logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=1800)


class LocalContext(RunContext):
    """RunContext of the launchers in this file. SIGTERM and the first Ctrl-C ask the loop to stop."""

    _asked_to_stop = False
    failed: Path | None = None
    """Where this rank leaves its failure for the process that spawned it."""

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether a signal came."""
        return self._asked_to_stop

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """Leave it for the process that started this one."""
        _leave(failure, stack, self.failed)

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
    """Send our packages' log to standard output: rank 0's progress as it is, other ranks' warnings with their rank."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    for name in ("trainers", "cluster", "tune"):
        package = logging.getLogger(name)
        package.handlers[:] = [handler]
        package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        package.propagate = False


@contextlib.contextmanager
def failing_as_run(rank: int) -> Iterator[None]:
    """Print the traceback of an exception that is not ours, and raise it as RunFailedError."""
    try:
        yield
    except PacelineError as error:
        _leave(RunFailedError.of(error, rank), "", None)
        raise
    except Exception as error:
        failure = RunFailedError.of(error, rank)
        _leave(failure, traceback.format_exc(), None)
        if not failure.follows:
            traceback.print_exc()
        raise failure from error


def _leave(failure: RunFailedError, trace: str, file: Path | None) -> None:
    """Write a worker's failure where its launcher looks: a file of the spawning process's, or torchrun's own, of which
    it shows the earliest as the root cause.
    """
    with contextlib.suppress(OSError):  # the failure itself matters more
        if file is not None:
            aside = file.with_name(f".{file.name}")  # the launcher may end this process at any moment
            aside.write_text(json.dumps([failure.args, trace]))
            aside.replace(file)
        elif "TORCHELASTIC_ERROR_FILE" in os.environ:
            said = {"message": str(failure), "extraInfo": {"timestamp": str(int(failure.when))}}
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": said}))


def run_local(job: Job[R]) -> R:
    """Run one worker in this process."""
    context = LocalContext(job.storage, "local")
    context.listen()
    return job.execute(context)


def run_torchrun(job: Job[R]) -> R:
    """Run this process as one of torchrun's workers; each of them calls this."""
    numbers = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return _run_in_group(job, LocalContext(job.storage, "torchrun", *numbers), "env://")


def run_spawn(job: Job[R]) -> R:
    """Run `scaling.num_workers` processes on this machine, and return rank 0's result.

    A group that ran out of memory in mid-training starts again with a smaller microbatch. Raises RunFailedError with
    the message of the rank that failed first.
    """
    while True:
        try:
            return _spawn_group(job)
        except RunFailedError as failure:
            if not failure.smaller:
                raise
            logger.warning("%s; the workers start again with a smaller one", failure.message)


def _spawn_group(job: Job[R]) -> R:
    workers = job.config.scaling.max_workers
    with tempfile.TemporaryDirectory(prefix="paceline-spawn-") as directory:
        arguments = (job, workers, directory)
        processes = start_processes(_spawned, arguments, nprocs=workers, join=False, start_method="spawn")
        assert processes is not None
        # Ctrl-C reaches the workers too (one terminal, one process group): they stop, and this process waits.
        interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            while not processes.join(timeout=1):
                pass
        except ProcessException as error:
            exits = {rank: process.exitcode for rank, process in enumerate(processes.processes)}
            raise _failure(Path(directory), error, exits) from None
        finally:
            signal.signal(signal.SIGINT, interrupts)
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return job.read_result(Path(directory, "result.json").read_bytes())


def _spawned(rank: int, job: Job[Any], world_size: int, directory: str) -> None:
    setup_logging(rank)
    context = LocalContext(job.storage, "spawn", rank, world_size, rank, world_size)
    context.failed = Path(directory, f"failed-{rank}")
    try:
        result = _run_in_group(job, context, f"file://{directory}/rendezvous")
        if rank == 0:
            Path(directory, "result.json").write_text(result.to_json())
    except BaseException as error:
        _leave(RunFailedError.of(error, rank), traceback.format_exc(), context.failed)
        raise


def _failure(directory: Path, error: ProcessException, exits: dict[int, int | None]) -> RunFailedError:
    """Return the cause among what the ranks left: exceptions and hangs in files, else the codes of their exits."""
    left = [json.loads(path.read_text()) for path in directory.glob("failed-*")]
    failures = [RunFailedError(*args) for args, _ in left]
    traces = {failure.message: trace for failure, (_, trace) in zip(failures, left, strict=True)}
    for rank, code in exits.items():
        if code in (None, 0) or (directory / f"failed-{rank}").exists():
            continue
        if code == HUNG_EXIT_CODE:
            failures.append(RunFailedError("hung", f"rank {rank} made no step"))
            continue
        is_first = rank == error.error_index
        # The others are ended once one has failed: first asked to, then, where they do not answer, killed.
        ended = not is_first and code in (-signal.SIGTERM, -signal.SIGKILL)
        failures.append(RunFailedError.died(rank, code, error.error_pid if is_first else None, ended))
    if not failures:
        return RunFailedError("node_lost", last_line(error))
    first = RunFailedError.first(failures)
    if not first.config and (trace := traces.get(first.message)):
        logger.error("%s", trace.strip())
    return first


def join_group(backend: str, init_method: str, rank: int, world_size: int, device_index: int) -> None:
    """Make this process a member of the run's process group; `device_index` is its GPU under nccl."""
    if backend == "nccl":
        torch.cuda.set_device(device_index)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=_TIMEOUT)


def _run_in_group(job: Job[R], context: LocalContext, init_method: str) -> R:
    context.listen()
    use_cuda = job.config.device in ("auto", "cuda") and torch.cuda.is_available()
    device_index = context.local_rank % torch.cuda.device_count() if use_cuda else 0
    join_group("nccl" if use_cuda else "gloo", init_method, context.rank, context.world_size, device_index)
    try:
        return job.execute(context)
    finally:
        # A DDP reducer in a reference cycle would outlive the group: the process then aborts one time in eight.
        gc.collect()
        dist.destroy_process_group()
