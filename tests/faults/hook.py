"""Runs inside every process of a case: counts events there, and lets the planned faults
happen at their moment.

The product knows nothing of it: tests/faults/site/sitecustomize.py calls `install`
where Python starts, and modules are patched as they are imported. PACELINE_FAULTS names
the plan; beside it, in the case's directory, is what is written:

    root            the process that the command line started rank-R          the
    process that trains as rank R missed-I        whom a signal was to be sent to was
    not there beside-ended    the second start has ended landed-I        fault I has
    happened: when (monotonic, s), to whom; claimed by one process, once samples/PID
    a JSON line a step: trial, step, rank, indices of the samples, when armed
    faults happen only while it is there: the runner takes it away before the recovery
"""

import contextlib
import errno
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = "PACELINE_FAULTS"
SECOND = "PACELINE_FAULTS_SECOND"
"""In the environment of a second start."""
STALL_S = 25.0
"""How long a stalled operation takes: longer than `failure.hang_timeout_s` of
every scenario.
"""
SLOW_S = 0.05
BESIDE_S = 5.0
"""How long each further step waits for a second start's end: well below
`failure.hang_timeout_s`.
"""
_TITLES = {
    "TrainController": "controller",
    "RayTrainWorker": "worker",
    "Mailbox": "mailbox",
    "Trial": "trial actor",
    "Trainable": "trial actor",
    "ImplicitFunc": "trial actor",
}
_directory = None
_plan = {}
_counts = Counter()
trial = 0
"""Which trial of a sweep this process trains."""


@dataclass(frozen=True)
class Found:
    """A live process of a case."""

    pid: int
    role: str
    began: int
    """Clock ticks after boot: with the number it names the process."""
    command: str

    def is_alive(self) -> bool:
        """Whether it is still there, and no zombie."""
        with contextlib.suppress(OSError):
            return _stat(Path("/proc", str(self.pid))) == self.began
        return False


def install():
    """Read the plan, if there is one, and see to it that modules are patched
    as they are imported.
    """
    global _directory
    if _VARIABLE not in os.environ:
        return
    plan = Path(os.environ[_VARIABLE])
    if not plan.exists():  # the case is over
        return
    _directory = plan.parent
    _plan.update(json.loads(plan.read_text()))
    with contextlib.suppress(FileExistsError):
        _write_new(_directory / "root", str(os.getpid()))
    patches = {
        "trainers.storage": _watch_storage,
        "trainers.step.train_step": _count_steps,
    }
    sys.meta_path.insert(0, _Finder(patches))


def event(name: str, number: int | None = None) -> str:
    """Count an event of this process, and let what is planned for it happen;
    returns "nan" where that is planned.
    """
    if _directory is None:
        return ""
    if name == "step":
        _wait_for_second_start()
    for index, fault in enumerate(_plan["faults"]):
        if fault["event"] != name or not _is_here(fault):
            continue
        _counts[index] += 1
        count = _counts[index] if number is None else number
        if (
            count >= fault["number"]
            and (_directory / "armed").exists()
            and _fire(index, fault) == "nan"
        ):
            return "nan"
    return ""


def record(step: int, rank: int, indices: list[int]):
    """Write down which samples a rank trains in a step."""
    if _directory is not None:
        line = {
            "trial": trial,
            "step": step,
            "rank": rank,
            "indices": indices,
            "when": time.monotonic(),
        }
        with (_directory / "samples" / str(os.getpid())).open("a") as file:
            file.write(json.dumps(line) + "\n")


def note_rank(rank: int):
    """Note that this process trains as that rank."""
    if _directory is not None:
        (_directory / f"rank-{rank}").write_text(str(os.getpid()))


def processes(directory: Path, root_role: str = "driver") -> list[Found]:
    """All live processes of a case, by their environment, output or command
    line; zombies are none.
    """
    token = str(directory)
    root = _root(directory)
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (
                (entry / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
            began = _stat(entry)
            if not began or not _belongs(entry, token, command):
                continue
        except (OSError, IndexError):
            continue
        found.append(
            Found(
                int(entry.name),
                _role(int(entry.name), command, root, root_role),
                began,
                command,
            )
        )
    return sorted(found, key=lambda one: one.pid)


def _stat(entry: Path) -> int:
    """When a process began; 0 for a zombie."""
    state, *fields = (entry / "stat").read_text().rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])


def _belongs(entry: Path, token: str, command: str) -> bool:
    if (
        token in command
        or f"{token}/".encode() in (entry / "environ").read_bytes()
    ):
        return True
    # Ray's workers and agents overwrite their environment with their title;
    # all have the raylet's log open.
    with contextlib.suppress(OSError):
        return any(
            str(link.readlink()).startswith(f"{token}/")
            for link in (entry / "fd").iterdir()
        )
    return False


def _role(pid: int, command: str, root: int, root_role: str) -> str:
    if pid == root:
        return root_role
    if "--multiprocessing-fork" in command or "-m trainers" in command:
        return "worker"
    program = command.partition(" ")[0]
    if program.endswith("gcs_server"):
        return "gcs"
    if program.endswith("raylet"):
        return "raylet"
    if program.startswith("ray::"):
        return next(
            (role for word, role in _TITLES.items() if word in command),
            "ray worker",
        )
    return "other"


def _root(directory: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((directory / "root").read_text())
    return -1


def own_role() -> str:
    """What this process is."""
    assert _directory is not None
    data = sys.modules.get("torch.utils.data")
    if (
        data is not None
        and getattr(data, "get_worker_info", lambda: None)() is not None
    ):
        return "loader"
    command = (
        Path("/proc/self/cmdline")
        .read_bytes()
        .replace(b"\0", b" ")
        .decode(errors="replace")
        .strip()
    )
    return _role(os.getpid(), command, _root(_directory), _plan["root"])


def own_rank() -> int:
    """The rank of this process, 0 where there is no group."""
    torch = sys.modules.get("torch")
    group = getattr(torch, "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return int(group.get_rank())
    return int(os.environ.get("RANK", 0))


def _wait_for_second_start():
    """A run that is started a second time is under way as long as that takes;
    the second one does not wait.
    """
    assert _directory is not None
    starts = [
        index
        for index, fault in enumerate(_plan["faults"])
        if fault["act"] in ("start", "fresh")
    ]
    until = time.monotonic() + BESIDE_S
    while (
        any((_directory / f"landed-{index}").exists() for index in starts)
        and not (_directory / "beside-ended").exists()
        and SECOND not in os.environ
        and time.monotonic() < until
    ):
        time.sleep(0.1)


def _is_here(fault: dict[str, Any]) -> bool:
    role = own_role()
    if fault["trial"] is not None and fault["trial"] != trial:
        return False
    return role == fault["role"] and (
        role != "worker"
        or fault["rank"] is None
        or own_rank() == fault["rank"]
    )


def _fire(index: int, fault: dict[str, Any]) -> str | None:
    """Let a fault happen, once; it has landed when its marker is there."""
    assert _directory is not None
    act = fault["act"]
    if (_directory / f"landed-{index}").exists():
        return None
    if act == "signal":
        _send(index, fault)
        return None
    if not _claim(index, os.getpid(), own_role()):
        return None
    if act == "raise":
        raise ValueError(f"injected: {fault['event']} fails here")
    if act == "oom":
        import torch

        raise torch.OutOfMemoryError("injected: CUDA out of memory")
    if act == "hang":
        while True:
            time.sleep(1)
    if act == "clock":
        now = time.time
        offset = float(fault["detail"])
        time.time = lambda: now() + offset
    if act == "fill":
        _fill(_directory / "runs" / "ballast")
    if act == "delete":
        shutil.rmtree(_directory / "runs" / "run", ignore_errors=True)
    return str(act)


def _send(index: int, fault: dict[str, Any]):
    """Send a signal to a live process of the role; without one nothing has landed."""
    assert _directory is not None
    target, (name, *rest) = _find(fault), fault["detail"].split()
    if target is None:
        seen = sorted(
            {
                f"{one.role}: {one.command[:60]}"
                for one in processes(_directory, _plan["root"])
            }
        )
        (_directory / f"missed-{index}").write_text(
            f"nobody is a {fault['target']}, only {seen}"
        )
        return
    if not _claim(index, target.pid, target.role, target.command):
        return
    if (
        rest
    ):  # continued after so many seconds, whatever becomes of this process
        script = f"sleep {rest[0]}; kill -CONT {target.pid}"
        subprocess.Popen(
            ["/bin/sh", "-c", script],
            env={},
            start_new_session=True,
            **_NO_OUTPUT,
        )
    number = signal.Signals[name]
    if number == signal.SIGINT and target.pid == _root(_directory):
        os.killpg(os.getpgid(target.pid), number)  # as a terminal does
    else:
        os.kill(target.pid, number)


_NO_OUTPUT = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}


def _find(fault: dict[str, Any]) -> Found | None:
    assert _directory is not None
    of_role = [
        one
        for one in processes(_directory, _plan["root"])
        if one.role == fault["target"]
    ]
    if fault["target"] == "worker" and fault["victim"] is not None:
        with contextlib.suppress(OSError, ValueError):
            wanted = int((_directory / f"rank-{fault['victim']}").read_text())
            return next((one for one in of_role if one.pid == wanted), None)
        return None
    if fault["target"] == "loader":
        return (
            Found(os.getpid(), "loader", 1, "")
            if own_role() == "loader"
            else None
        )
    return of_role[0] if of_role else None


def _claim(index: int, pid: int, role: str, command: str = "") -> bool:
    assert _directory is not None
    words = {
        "when": time.monotonic(),
        "pid": pid,
        "role": role,
        "trial": trial,
        "command": command[:200],
    }
    try:
        _write_new(_directory / f"landed-{index}", json.dumps(words))
    except FileExistsError:
        return False
    return True


def _write_new(path: Path, text: str):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def _fill(ballast: Path):
    """Write until the small filesystem has no byte left."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)


def _count_steps(module: Any):
    """Every training step tells its task that it begins; passes that are
    thrown away do not.
    """
    original = module.TrainStep.__call__

    def counted(self: Any, *args: Any, **kwargs: Any):
        task = self.forward.task
        if not hasattr(task, "begin_step"):
            return original(self, *args, **kwargs)
        task.begin_step()
        try:
            return original(self, *args, **kwargs)
        finally:
            task.in_step = False

    module.TrainStep.__call__ = counted


def _watch_storage(module: Any):
    """Count the operations of storage: "storage" before each, and before what
    was written is renamed.
    """
    for name in ("exists", "names", "delete", "writer", "reader"):
        setattr(
            module.Storage,
            name,
            _watched(module, name, getattr(module.Storage, name)),
        )
    fsync = os.fsync

    def watched(descriptor: int):
        if sys._getframe(1).f_globals.get(
            "__name__"
        ) == "trainers.storage" and (error := _storage_fault("fsync")):
            raise error
        fsync(descriptor)

    os.fsync = watched


def _watched(module: Any, name: str, original: Any) -> Any:
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if error := _storage_fault(name):
            where = self.locate(args[0]) if args else self.uri
            raise module.StorageError(
                f"could not {name} {where}: {error}"
            ) from error
        return original(self, *args, **kwargs)

    return operation


_MEETS = {
    "ENOSPC": ("writer", "fsync"),
    "EROFS": ("writer", "delete"),
    "EIO": ("writer", "fsync", "delete", "reader", "exists", "names"),
}
_busy = threading.local()


def _storage_fault(name: str) -> OSError | None:
    """Count an operation; returns the error that it meets."""
    assert _directory is not None
    if getattr(_busy, "inside", False):
        return None
    _busy.inside = True
    try:
        event("storage")
        for index, fault in enumerate(_plan["faults"]):
            marker = _directory / f"landed-{index}"
            if (
                fault["act"] not in ("errno", "slow", "stall")
                or not marker.exists()
            ):
                continue
            if not (_directory / "armed").exists():
                continue
            if fault["act"] == "slow":
                time.sleep(SLOW_S)
            elif fault["act"] == "stall":
                with contextlib.suppress(FileExistsError):
                    _write_new(_directory / f"stalled-{index}", "")
                    time.sleep(STALL_S)
            elif name in _MEETS[fault["detail"]]:
                code = getattr(errno, fault["detail"])
                return OSError(code, os.strerror(code))
    finally:
        _busy.inside = False
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules once they have been executed."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]):
        self._patches = patches

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(name)
        found = (
            importlib.machinery.PathFinder.find_spec(name, path)
            if patch is not None
            else None
        )
        if patch is None or found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def patched(module: Any):
            execute(module)
            patch(module)

        found.loader.exec_module = patched  # type: ignore[method-assign]
        return found
