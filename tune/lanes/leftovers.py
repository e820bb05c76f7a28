"""What a trial may leave in its process that is neither a setting nor in a module: children, files, threads, memory."""

import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable
from concurrent.futures import thread as futures
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # (it is documented)

from trainers.devices.device import total_memory_bytes

_HARMLESS = {
    "tqdm": "redraws progress bars, one for the process (so does `datasets`, through it)",
    "wandb": "sends what was logged, and the state of its run",
    "mlflow": "sends what was logged, and the machine's figures",
    "comet_ml": "sends what was logged",
    "neptune": "sends what was logged",
    "clearml": "sends what was logged",
    "trackio": "sends what was logged",
    "sentry_sdk": "sends the crashes of the libraries above",
    "tensorboard": "writes events to their file",
    "tensorboardX": "writes events to their file",
    "matplotlib": "says, after five seconds, that fonts are being looked for",
    "huggingface_hub": "shows and commits uploads",
    "torch._inductor": "collects compilations from their processes, which serve the next trial too",
}
"""Packages whose threads may outlive a trial, and what these do: nothing that a trial computes with."""
_WITHOUT_FILES = ("tqdm", "matplotlib")
_HARMLESS_COMMANDS = {
    b"multiprocessing.resource_tracker": "removes the semaphores and shared memory of those that died",
    b"loky.backend.resource_tracker": "the same, of joblib",
    b"torch/_inductor/compile_worker": "compiles, for the next trial too",
    b"wandb": "sends what was logged",
}
"""What is in the command line of processes that may outlive a trial, and what these do."""
_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "anon_inode:", "socket:")
_THREAD_GRACE_S = 0.5
_CHILD_GRACE_S = 5.0
_TENSORS_TOLERANCE_BYTES = 2**20
_CONSTANTS_TOLERANCE_BYTES = 16 * 2**20
_HOST_TOLERANCE_BYTES, _HOST_TOLERANCE_SHARE = 2**28, 0.01
"""Of what native code may keep: oneDNN has 3 MiB for each shape in bf16, a GPU's driver some for each library."""
_SMALL_BYTES = 2**16
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a process whose parent ended becomes a child of this one, if it is below it (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Children:
    """Processes that were started since: they are killed."""

    def __init__(self) -> None:
        self._known = _child_pids()

    def restore(self) -> list[str]:
        """Kill and reap what is new; returns what lives on, in words."""
        for child in multiprocessing.active_children():
            with contextlib.suppress(AttributeError):  # joblib's have no `kill`: below
                child.kill()
                child.join()
        deadline = time.monotonic() + _CHILD_GRACE_S
        while new := [pid for pid in _child_pids() - self._known if not _is_harmless_process(pid)]:
            for pid in new:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                return [f"child process {pid} cannot be killed" for pid in sorted(new)]
            time.sleep(0.001)  # their own children become ours, where orphans are adopted
        return []

    def has_harmless(self) -> bool:
        """Whether a child that may stay was started since."""
        return bool(_child_pids() - self._known)


def _child_pids() -> set[int]:
    found: set[int] = set()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none: one call where the kernel's list takes many
        return found
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 (names only, after each trial)
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", "rb") as file:  # noqa: PTH123
                found.update(map(int, file.read().split()))
    return found


def _is_harmless_process(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(part in command for part in _HARMLESS_COMMANDS)


class Files:
    """File descriptors that were opened since."""

    def __init__(self, device: torch.device) -> None:
        # libuv, under torch's store, opens a pipe at its first use, which stays.
        TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        self._known = _descriptors()
        # A GPU's driver opens pipes of its own, at its first use and later.
        self._ignored = _NO_FILES if device.type == "cpu" else (*_NO_FILES, "pipe:")

    def restore(self, objects: list[Any], keep: Callable[[], bool]) -> list[str]:
        """Close what an object of Python's owns among `objects`, unless others may still write to it (`keep`); returns
        what else is open, in words. Sockets of native code (Ray's, gloo's) come and go, and are not looked at.
        """
        if not self._new() or keep():
            return []
        kinds = set(map(type, objects))
        for base in (io.TextIOBase, io.BufferedIOBase, io.RawIOBase, Connection, socket.socket):  # the outer first
            of_base = {kind for kind in kinds if issubclass(kind, base)}
            for one in [one for one in objects if type(one) in of_base] if of_base else []:
                with contextlib.suppress(Exception):
                    if one.fileno() in self._new():
                        one.close()
        first = self._open()
        if first:
            time.sleep(0.02)  # a thread of Ray's may be reading a file
        still = {what for number, what in self._open().items() if first.get(number) == what}
        return [f"still open: {what}" for what in sorted(still)]

    def _open(self) -> dict[int, str]:
        found = {}
        for number in self._new():
            with contextlib.suppress(OSError):
                what = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 (no path of a file system)
                if not what.startswith(self._ignored):
                    found[number] = "a pipe" if what.startswith("pipe:") else what
        return found

    def _new(self) -> set[int]:
        return {number for number, file in _descriptors().items() if self._known.get(number) != file}


def _descriptors() -> dict[int, tuple[int, int]]:
    """What is open: device and inode of each."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names only, after each trial)
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                of = os.fstat(int(name))
                found[int(name)] = of.st_dev, of.st_ino
    return found


class Threads:
    """Threads that were started since."""

    def __init__(self) -> None:
        self.known = set(threading.enumerate())
        self._frames = set(sys._current_frames())

    def leaked(self) -> list[str]:
        """Names of those that do not end within moments, and are not known to be harmless."""
        deadline = time.monotonic() + _THREAD_GRACE_S
        while True:
            leaked = [one.name for one in self._new() if not is_harmless(one)]
            leaked += self._nameless()
            if not leaked or time.monotonic() > deadline:
                return sorted(leaked)
            time.sleep(0.005)

    def write_files(self) -> bool:
        """Whether one that may stay may have files open."""
        return any(not _in_packages(_module_of(one)[0], _WITHOUT_FILES) for one in self._new() if not _is_waiting(one))

    def _new(self) -> list[threading.Thread]:
        # Threads that Python did not start (autograd's, once they ran a hook) show up as dummies.
        new = set(threading.enumerate()) - self.known
        return [one for one in new if not isinstance(one, threading._DummyThread)]

    def _nameless(self) -> list[str]:
        """What runs in threads of `_thread`; those of native code are in no function of Python's by now."""
        registered = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
        frames = sys._current_frames()
        return [_outermost(frames[ident]) for ident in frames.keys() - registered - self._frames]


def _outermost(frame: types.FrameType) -> str:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_qualname


def is_harmless(thread: threading.Thread) -> bool:
    """Whether a thread is a library's that does nothing that a trial computes with; never one of the task's own."""
    if _is_waiting(thread):
        return True
    module, name = _module_of(thread)
    if thread.name == "fsspecIO" and (module, name) == ("asyncio.base_events", "BaseEventLoop.run_forever"):
        return True  # one for the process (s3fs, gcsfs and aiobotocore run in it); waits for files to be asked for
    return _in_packages(module, _HARMLESS)


def _code_of(thread: threading.Thread) -> Any:
    is_plain = type(thread).__module__ == "threading"
    return getattr(thread, "_target", None) or getattr(thread, "function", None) if is_plain else type(thread)


def _module_of(thread: threading.Thread) -> tuple[str, str]:
    code = _code_of(thread)
    return getattr(code, "__module__", None) or "", getattr(code, "__qualname__", "")


def _is_waiting(thread: threading.Thread) -> bool:
    """Whether it is of a pool: harmless while it only waits for work, whoever's pool it is."""
    if _code_of(thread) is not futures._worker:
        return False
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is futures._worker.__code__


def _in_packages(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class Memory:
    """What is held on the host and on the device, above what was held at first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = _allocated()
        host_bytes = total_memory_bytes(torch.device("cpu"))
        self._host_tolerance_bytes = max(_HOST_TOLERANCE_BYTES, int(_HOST_TOLERANCE_SHARE * host_bytes))
        self._device_floor_bytes = device_bytes(device)
        self._host_floor_bytes = self._allocated()

    def read(self) -> int:
        """What the process has allocated on the host and not freed; 0 where that is not known."""
        return self._allocated()

    def absorb(self, before_bytes: int) -> None:
        """What an import has allocated since `before_bytes` (as `read` gave it) stays."""
        self._host_floor_bytes += max(0, self._allocated() - before_bytes)

    def held(self, objects: list[Any], has_imported: bool) -> list[str]:
        """What is held too much, in words; `objects`: all that were made since, and are still there.

        Packages that the trial has imported may have constants (`has_imported`).
        """
        left = []
        device = device_bytes(self._device) - self._device_floor_bytes
        if device > _TENSORS_TOLERANCE_BYTES:
            left.append(f"{device / 2**20:.1f} MiB of the device's memory are still held")
        count, tensors = held_by_tensors(objects)
        if tensors > (_CONSTANTS_TOLERANCE_BYTES if has_imported else _TENSORS_TOLERANCE_BYTES):
            left.append(f"{tensors / 2**20:.1f} MiB are still held, by {count} tensors or arrays")
        elif (host := self._allocated() - self._host_floor_bytes) > self._host_tolerance_bytes:
            left.append(f"{host / 2**20:.1f} MiB of the host's memory are still held")
        return left


def device_bytes(device: torch.device) -> int:
    """What is allocated on the device once caches are empty; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    clear: Any = torch._C
    clear._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def held_by_tensors(objects: list[Any]) -> tuple[int, int]:
    """How many tensors of the host, arrays and strings of bytes are among objects or held by them, and their size."""
    sizes: dict[int, int] = {}
    for one in _large(objects):
        with contextlib.suppress(Exception):  # a tensor without storage: fake, sparse
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage.device.type == "cpu":
                    sizes[storage.data_ptr()] = storage.nbytes()
            elif isinstance(one, np.ndarray):
                base = one if one.base is None else one.base
                sizes[id(base)] = base.nbytes if isinstance(base, np.ndarray) else 0  # a view of what is counted itself
            else:
                sizes[id(one)] = len(one)
    return len(sizes), sum(sizes.values())


def _large(objects: list[Any]) -> list[Any]:
    """Python tracks no arrays and no strings: those that a tracked object refers to."""
    found: list[Any] = []
    for group in (objects, gc.get_referents(*objects)):
        kinds = {
            kind for kind in set(map(type, group)) if issubclass(kind, (torch.Tensor, np.ndarray, bytearray, bytes))
        }
        found += [one for one in group if type(one) in kinds] if kinds else []
    return [one for one in found if not isinstance(one, (bytes, bytearray)) or len(one) > _SMALL_BYTES]


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def _allocated() -> Callable[[], int]:
    """What reads how much the process has allocated and not freed; without glibc nothing is known."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return lambda: 0
    read.restype = _Mallinfo

    def allocated() -> int:
        info = read()
        return int(info.hblkhd + info.uordblks)

    return allocated
