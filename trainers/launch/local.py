"""Launchers without Ray: one worker in this process, spawned workers, or torchrun's.

Environment read (torchrun sets it): RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, TORCHELASTIC_ERROR_FILE. Set, unless already set:
GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if all ranks are on this machine.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

# Imported before any group is made. A later import (as by torch._dynamo) would
# keep that group alive as a default argument, and a process that ends with a
# live group sometimes aborts.
import torch.distributed.nn.functional
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessException, start_processes

from trainers.causes import death_of, failure_of
from trainers.context import RunContext
from trainers.devices.group import (
    join_group,
    keep_on_this_machine,
    leave_group,
)
from trainers.errors import PacelineError, RunFailedError, last_line, redact
from trainers.launch.process import StopSignals, follow, setup_logging
from trainers.launch.spec import Job, R
from trainers.loop.watchdog import HUNG_EXIT_CODE
from trainers.output import Sender, Take

logger = logging.getLogger(__name__)

_LOOK_S = 0.2


class LocalContext(RunContext):
    """RunContext of the launchers in this file."""

    _signals: StopSignals | None = None
    failed: Path | None = None
    """Where this rank leaves its failure for the process that spawned it."""

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether a signal has asked to stop."""
        return self._signals is not None and self._signals.asked

    def listen(self) -> StopSignals:
        """Return a context in which signals ask the loop to stop."""
        log = logger.info if self.rank == 0 else logger.debug
        self._signals = StopSignals(
            lambda name: log(
                "asked to stop (%s): writing a checkpoint first", name
            )
        )
        return self._signals

    def telling(self, job: Job[Any], take: Take | None) -> Self:
        """Pass the run's records to `take`; return this context."""
        self.take = take
        self.draws_line = job.told == "line"
        return self

    @property
    def is_heard(self) -> bool:
        """Whether the process that spawned this one prints its failures."""
        return self.failed is not None

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """Save the failure for the process that started this one."""
        _leave(failure, stack, self.failed)


@contextlib.contextmanager
def failing_as_run(rank: int, is_command: bool = True) -> Iterator[None]:
    """Within the block, turn any exception but a PacelineError into a RunFailedError.

    With `is_command`, print their traceback, unless another rank failed first.
    """
    try:
        yield
    except PacelineError as error:
        _leave(failure_of(error, rank), "", None)
        raise
    except Exception as error:
        failure = failure_of(error, rank)
        _leave(failure, traceback.format_exc(), None)
        if is_command and not failure.follows:
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
        raise failure from error


def _leave(failure: RunFailedError, trace: str, file: Path | None) -> None:
    """Write a worker's failure where its launcher looks for it.

    That is `file`, which the spawning process reads, or torchrun's error file.
    torchrun takes the earliest failure for the root cause.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE") if file is None else file
    if not place:
        return
    target = Path(place)
    left: object = [failure.args, trace]
    if file is None:
        when = {"timestamp": str(int(failure.when))}
        left = {"message": {"message": str(failure), "extraInfo": when}}
    # The launcher may end this process at any moment.
    aside = target.with_name(f".{target.name}")
    with contextlib.suppress(OSError):  # the failure itself matters more
        # It exists if it was written before the group was left.
        if not target.exists():
            aside.write_text(json.dumps(left))
            aside.replace(target)


def run_local(job: Job[R], take: Take | None = None) -> R:
    """Run one worker in this process; `take` gets the run's records as they occur."""
    context = LocalContext(job.storage, "local").telling(job, take)
    with context.listen():
        return job.execute(context)


def run_torchrun(job: Job[R], take: Take | None = None) -> R:
    """Run this process as one of torchrun's workers; each worker calls this."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [int(os.environ[name]) for name in names]
    context = LocalContext(job.storage, "torchrun", *numbers).telling(
        job, take
    )
    with _beside(job.told == "line" and context.rank > 0):
        return _run_in_group(job, context, "env://")


def run_spawn(job: Job[R], take: Take | None = None) -> R:
    """Run `scaling.num_workers` processes on this machine; return rank 0's result.

    A group that ran out of memory during training is restarted with a smaller
    microbatch. Raises RunFailedError for the failure that is most likely the
    root cause.
    """
    while True:
        try:
            return _spawn_group(job, take)
        except RunFailedError as failure:
            if not failure.smaller:
                raise
            logger.warning(
                "%s; the workers start again with a smaller microbatch",
                failure.message,
            )


def _spawn_group(job: Job[R], take: Take | None) -> R:
    workers = job.config.scaling.max_workers
    records, told = multiprocessing.Pipe(duplex=False)
    place = tempfile.TemporaryDirectory(prefix="paceline-spawn-")
    with place as directory, StopSignals() as signals, records:
        method = multiprocessing.get_start_method(allow_none=True)
        arguments = (job, workers, directory, told, method)
        # Workers inherit this until they handle signals: during their imports,
        # Ctrl-C would print a traceback of each.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        processes = start_processes(
            _spawned,
            arguments,
            nprocs=workers,
            join=False,
            start_method="spawn",
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        told.close()
        assert processes is not None
        asked = False
        try:
            while not processes.join(timeout=_LOOK_S):
                _receive(records, take)
                if signals.asked and not asked:
                    asked = True
                    for process in processes.processes:
                        process.terminate()
        except ProcessException as error:
            exits = [process.exitcode for process in processes.processes]
            stopped = {-signal.SIGTERM, 128 + signal.SIGINT} & set(exits)
            if not (asked and stopped):
                raise _failure(Path(directory), error, exits) from None
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for file in processes.error_files:  # torch leaves them
                Path(file).unlink(missing_ok=True)
        _receive(records, take)
        result = Path(directory, "result.json")
        # Asked to stop before the group was complete, or in a job that saves
        # nothing.
        if not result.exists():
            raise KeyboardInterrupt
        return job.read_result(result.read_bytes())


def _receive(records: Connection, take: Take | None) -> None:
    """Receive the records that rank 0 has sent."""
    with contextlib.suppress(EOFError, OSError):  # rank 0 has ended
        while records.poll():
            for record in records.recv():
                if take is not None:
                    take(record)


@contextlib.contextmanager
def _beside(wanted: bool) -> Iterator[None]:
    """Print without disturbing a live line that another process draws."""
    if not wanted:
        yield
        return
    from trainers.terminal import beside, printing

    with printing(beside):
        yield


def _spawned(
    rank: int,
    job: Job[Any],
    world_size: int,
    directory: str,
    records: Connection,
    start_method: str | None,
) -> None:
    # Python gives a spawned process its own start method, too. Loaders are
    # started as under the other launchers: a stream, or a dataset that cannot
    # be pickled, needs a fork.
    multiprocessing.set_start_method(start_method, force=True)
    if (driver := multiprocessing.parent_process()) is not None:
        follow(driver.join, lambda: _delete(directory))
    # torch requests SIGINT for the driver's death, and the kernel sends one
    # for each of its threads: the second would interrupt this rank, which
    # would write its failure into a directory that another rank is deleting.
    _prctl_pr_set_pdeathsig(0)
    setup_logging(rank, job.quiet)
    context = LocalContext(
        job.storage, "spawn", rank, world_size, rank, world_size
    )
    context.failed = Path(directory, f"failed-{rank}")
    with _beside(job.told == "line"), contextlib.ExitStack() as stack:
        if job.told and rank == 0:
            context.telling(
                job,
                stack.enter_context(contextlib.closing(Sender(records.send))),
            )
        else:
            records.close()
        _execute(rank, job, context, directory)


def _delete(directory: str) -> None:
    """Rename a group's directory, so that ranks stop writing there, and delete it."""
    with contextlib.suppress(OSError):  # another rank was first
        shutil.rmtree(
            Path(directory).rename(f"{directory}-over"), ignore_errors=True
        )


def _execute(
    rank: int, job: Job[Any], context: LocalContext, directory: str
) -> None:
    try:
        result = _run_in_group(job, context, f"file://{directory}/rendezvous")
        if rank == 0:
            Path(directory, "result.json").write_text(result.to_json())
    except BaseException as error:
        _leave(failure_of(error, rank), _trace(error), context.failed)
        raise


def _trace(error: BaseException) -> str:
    """Return the current traceback; empty if the message alone explains the error."""
    if isinstance(error, PacelineError | KeyboardInterrupt):
        return ""
    return traceback.format_exc()


def _failure(
    directory: Path, error: ProcessException, exits: list[int | None]
) -> RunFailedError:
    """Return the root cause, from the ranks' failure files and exit codes."""
    failures = []
    traces = {}
    for path in directory.glob("failed-*"):
        args, trace = json.loads(path.read_text())
        failure = RunFailedError(*args)
        failures.append(failure)
        traces[failure.message] = trace
    for rank, code in enumerate(exits):
        if code in (None, 0) or (directory / f"failed-{rank}").exists():
            continue
        if code == HUNG_EXIT_CODE:
            failures.append(
                RunFailedError("hung", f"rank {rank} made no step")
            )
            continue
        is_first = rank == error.error_index
        # Once one rank has failed, the others are asked to end, and killed if
        # they do not.
        ended = not is_first and code in (-signal.SIGTERM, -signal.SIGKILL)
        failures.append(
            death_of(rank, code, error.error_pid if is_first else None, ended)
        )
    if not failures:
        return RunFailedError("node_lost", last_line(error))
    first = RunFailedError.first(failures)
    trace = traces.get(first.message)
    if trace and not first.config:
        logger.error("%s", trace.strip())
    return first


def _run_in_group(job: Job[R], context: LocalContext, init_method: str) -> R:
    use_cuda = (
        job.config.device in ("auto", "cuda") and torch.cuda.is_available()
    )
    device_index = (
        context.local_rank % torch.cuda.device_count() if use_cuda else 0
    )
    if context.local_world_size == context.world_size:
        keep_on_this_machine()
    # While a rank waits for the others, Python runs no signal handler, and
    # there is nothing to save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    join_group(
        "nccl" if use_cuda else "gloo",
        init_method,
        context.rank,
        context.world_size,
        device_index,
    )
    # never exited: signals must not interrupt the very end of this process
    context.listen().__enter__()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        # All ranks write under rank 0's lease.
        if context.launcher == "torchrun":
            box = [job.token]
            dist.broadcast_object_list(box, src=0)
            job = replace(job, token=box[0])
            context.storage = job.storage
        result = job.execute(context)
    except BaseException as error:
        # Before the group is left, which may take long.
        _leave(failure_of(error, context.rank), _trace(error), context.failed)
        leave_group(failed=True)
        raise
    leave_group(failed=False)
    return result
