"""Map exceptions and exit codes to a run's status and its cause in words.

Imports neither torch nor Ray: their errors are recognised by class name and
message.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sysconfig
import time
import traceback
from pathlib import Path

from trainers.errors import (
    FIX,
    ConfigError,
    PacelineError,
    RunFailedError,
    Status,
    StorageError,
    TooLargeError,
    chain,
    disk_is_full,
    first_line,
)

# How libraries other than torch's allocator say that a device is out of
# memory: the CUDA runtime (quoted by NCCL), the driver and Triton; cuBLAS,
# cuSOLVER, cuSPARSE and cuFFT; cuDNN, which then finds no engine.
_DEVICE_ALLOCATION = re.compile(
    r"\b(?:CUDA|HIP|MPS)\b[^\n]*\bout of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|\b(?:CU|HIP|ROC)[A-Z]+_(?:STATUS_)?(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED"
    r"|unable to find an engine to execute this computation",
    re.IGNORECASE,
)
# How torch 2.15 reports a failed host allocation
# (c10/core/impl/alloc_cpu.cpp).
_HOST_ALLOCATION = (
    "DefaultCPUAllocator",
    "can't allocate memory",
    "Cannot allocate memory",
)
# Shared memory, through which a DataLoader's workers send batches, is a file
# system with names such as </torch_1_2_3>.
_SHARED_MEMORY = re.compile(
    r"</torch_\w*>.*(No space left|Cannot allocate)|shared memory\(shm\)|out of shared memory"
)
_LOADER_DIED = re.compile(
    r"DataLoader worker \(pid\S* ([\d, ]+)\) (?:is killed by signal: ([^.]+)|(exited unexpectedly.*))"
)
_CARRIED = re.compile(
    r"^Original Traceback .*\n(?: .*\n)*(\S.*)", re.MULTILINE
)
"""A DataLoader worker's exception, as torch's exception quotes it."""
# What marks a plain RuntimeError as raised by gloo, NCCL or
# torch.distributed's store.
_COLLECTIVE = re.compile(
    r"\bgloo\b|\bNCCL\b|\bc10d\b|ProcessGroup|Connection closed by peer|Socket Timeout",
    re.IGNORECASE,
)
_OURS = Path(__file__).parents[1]
_LIBRARIES = (
    f"{sysconfig.get_path('stdlib')}/",
    f"{sysconfig.get_path('platstdlib')}/",
    "site-packages",
    "dist-packages",
    "<frozen",
    f"{_OURS}/trainers/",
    f"{_OURS}/cluster/",
    f"{_OURS}/tune/",
)
"""A file whose path contains one of these is not the user's."""


def failure_of(error: BaseException, rank: int) -> RunFailedError:
    """Convert a worker's exception to plain data, which processes can exchange."""
    if isinstance(error, RunFailedError):
        return error
    if isinstance(error, ConfigError):
        return RunFailedError("error", str(error), time.time(), config=True)
    if isinstance(error, KeyboardInterrupt):
        words = f"rank {rank} was interrupted by a second SIGINT"
        return RunFailedError("stopped", words, time.time())
    status, words = _explain(error)
    follows = broke_with_others(error)
    if follows:
        words = (
            f"a collective failed, as it does if another rank ends: {words}"
        )
    words = f"rank {rank}: {words}"
    smaller = isinstance(error, TooLargeError)
    return RunFailedError(
        status, words, time.time(), smaller=smaller, follows=follows
    )


def death_of(
    rank: int, code: int, pid: int | None = None, ended: bool = False
) -> RunFailedError:
    """Describe the death of a rank that left no exception, from its exit code.

    A negative code is a signal. `ended` means that the launcher may have ended
    this rank after another rank had failed.
    """
    how = ended_by(code)
    if ended:
        words = f"rank {rank} did not answer and was ended {how}"
        return RunFailedError("node_lost", words, follows=True)
    words = f"rank {rank} died {how}"
    if pid is not None:
        words += f" (pid {pid})"
    if code == -signal.SIGKILL and _kernel_killed():
        words += ", as the kernel kills processes when memory runs out"
        return RunFailedError("out_of_host_memory", words, time.time())
    # NCCL aborts a process whose peers are gone, so this failure only counts
    # as the cause if there is no other.
    follows = code == -signal.SIGABRT
    return RunFailedError("node_lost", words, time.time(), follows=follows)


def ended_by(code: int) -> str:
    """Describe how a process ended; a negative exit code is a signal."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def line_of_task(frames: list[tuple[str, int]]) -> tuple[str, int]:
    """Return the innermost frame (file, line) outside libraries.

    If all frames are in libraries, return the innermost of them.
    """
    own = [
        frame
        for frame in frames
        if not any(part in frame[0] for part in _LIBRARIES)
    ]
    return (own or frames)[-1]


def classify(error: BaseException) -> Status:
    """Return the status that an exception ends a run with."""
    return _explain(error)[0]


def broke_with_others(error: BaseException) -> bool:
    """Whether a collective failed, as happens if another rank fails or dies."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if _status(error) == "out_of_memory":  # NCCL's own buffers did not fit
        return False
    if names & {"DistError", "CollectiveTimeoutError"}:  # torch's; Ray Train's
        return True
    return (
        type(error) is RuntimeError
        and _COLLECTIVE.search(str(error)) is not None
    )


def _explain(error: BaseException) -> tuple[Status, str]:
    """Return the status that an exception ends a run with, and its cause in words."""
    message = first_line(error) if str(error) else ""
    words = f"{type(error).__name__}: {message}"
    if at := raised_at(error):
        words += f" ({at})"
    is_full = disk_is_full(error)
    if isinstance(error, PacelineError):
        if is_full:
            words = f"the disk is full: {words}"
        elif type(error) is StorageError:
            words = (
                f"{message}{FIX}the storage, then run the same command again"
            )
        return error.status, words
    texts = [str(link) for link in chain(error)]
    died = [match for text in texts if (match := _LOADER_DIED.search(text))]
    if died:
        by_signal = [match for match in died if match[2] is not None]
        return _loader_died(*(by_signal or died)[0].groups())
    if any(_SHARED_MEMORY.search(text) for text in texts):
        return "out_of_host_memory", f"{_SHM_FULL}: {words}"
    if (carried := _CARRIED.search(texts[0])) is not None:
        words = f"{carried[1]} (in a DataLoader worker)"
    if is_full:
        return "error", f"the disk is full: {words}"
    return _status(error), words


def _status(error: BaseException) -> Status:
    names = {cls.__name__ for cls in type(error).__mro__}
    if "OutOfMemoryError" in names and type(error).__module__.startswith(
        "torch"
    ):
        return "out_of_memory"
    if isinstance(error, RuntimeError):
        words = str(error)
        if _DEVICE_ALLOCATION.search(words):
            return "out_of_memory"
        if any(host in words for host in _HOST_ALLOCATION):
            return "out_of_host_memory"
    if names & {"MemoryError", "OutOfMemoryError"}:
        return "out_of_host_memory"
    if getattr(error, "preempted", False):
        return "preempted"
    if names & _RAYS_DEATHS:
        return "node_lost"
    # The worker's process is stopped, or does not release the GIL.
    if "WorkerHealthCheckTimeoutError" in names:
        return "hung"
    return "error"


_RAYS_DEATHS = {
    "ActorDiedError",
    "NodeDiedError",
    "ActorUnavailableError",
    "WorkerCrashedError",
}
_SHM_FULL = "shared memory is full (enlarge /dev/shm, in Docker with --shm-size, or lower data.num_workers)"


def _loader_died(
    pids: str, by_signal: str | None, otherwise: str | None
) -> tuple[Status, str]:
    """Return the status and the cause of a DataLoader worker's death.

    `by_signal` is the C library's name of the signal.
    """
    worker = f"DataLoader worker (pid {pids})"
    if by_signal is None:
        return "error", f"its {worker} {otherwise}"
    if by_signal == "Bus error":
        return (
            "out_of_host_memory",
            f"its {worker} died by SIGBUS: {_SHM_FULL}",
        )
    if by_signal == "Killed":
        words = f"its {worker} was killed, as happens when the host's memory runs out"
        return "out_of_host_memory", words
    status: Status = "node_lost" if by_signal == "Terminated" else "error"
    return status, f"its {worker} died: {by_signal}"


def raised_at(error: BaseException, below: int = 0) -> str:
    """Return the file and line that raised an exception, in user code if possible.

    Ignores the `below` outermost frames; returns "" if no frame is left.
    """
    frames = traceback.extract_tb(error.__traceback__)[below:]
    if not frames:
        return ""
    file, line = line_of_task(
        [(frame.filename, frame.lineno or 0) for frame in frames]
    )
    return f"{Path(file).name}:{line}"


def count_kernel_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot.

    Returns 0 if the kernel does not report it.
    """
    counts = ""
    with contextlib.suppress(OSError):  # some sandboxes lack the file
        counts = Path("/proc/vmstat").read_text()
    found = re.search(r"^oom_kill (\d+)$", counts, re.MULTILINE)
    return int(found[1]) if found else 0


_kills_before = count_kernel_kills()


def forget_kernel_kills() -> None:
    """Ignore the kernel's kills so far when looking for the cause of a death."""
    global _kills_before
    _kills_before = count_kernel_kills()


def _kernel_killed() -> bool:
    return count_kernel_kills() > _kills_before
