"""Fixtures of the whole suite: commands as a user types them, and nothing left behind."""

import contextlib
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waits import HANG_S, until

REPOSITORY = Path(__file__).parent.parent
PARTS = ("tests/unit", "tests/distributed", "tests/gpu", "benchmarks")
_NICENESS = os.getpriority(os.PRIO_PROCESS, 0)

# The suite's environment is a new user's: nothing of Ray's, Python's or ours
# is set, whoever runs it.
_USERS_OWN = ("RAY_", "TUNE_", "PYTHON", "PACELINE_")
if "PYTEST_SCRATCH" not in os.environ:
    for _name in [name for name in os.environ if name.startswith(_USERS_OWN)]:
        del os.environ[_name]

# Embedded clusters and torchrun keep their files here (short: Ray's sockets
# lie below it), not in /tmp itself. Each process of pytest's makes one; those
# that its tests start, and that import this for a task, have that of theirs.
_OWNER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_given, _, _scratch = os.environ.get("PYTEST_SCRATCH", "").partition("=")
IS_OWN = _given != _OWNER
SCRATCH = Path(
    tempfile.mkdtemp(prefix="pl-", dir="/tmp") if IS_OWN else _scratch
)
os.environ["PYTEST_SCRATCH"] = f"{_OWNER}={SCRATCH}"
os.environ["TMPDIR"] = str(SCRATCH)
os.environ["HOME"] = str(SCRATCH / "home")
Path(os.environ["HOME"]).mkdir(exist_ok=True)
tempfile.tempdir = None
multiprocessing.current_process()._config["tempdir"] = str(SCRATCH)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, the files on Ray's cluster are one: it is
    started once, and has a process for itself.
    """
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            folder = "tests/on_ray"
            is_one = nodeid.startswith(f"{folder}/")
            return folder if is_one else str(super()._split_scope(nodeid))

    return (
        Files(config, log) if config.getvalue("dist") == "loadfile" else None
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Commands go before the tests of parts that run beside them, where that
    is allowed: Ray's raylet gives its agents 15 s to start, and no setting
    changes that.
    """
    is_part = item.nodeid.startswith(PARTS)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS - 10 * (not is_part))
    return (yield)


def pytest_unconfigure():
    """In every process of the session: no temporary file is left."""
    if IS_OWN:
        shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.fixture(autouse=True)
def _logging_as_before():
    """A command that a test runs in this process sets up logging: the next
    test hears what it says, too.
    """
    packages = [
        logging.getLogger(name) for name in ("trainers", "cluster", "tune")
    ]
    before = [
        (package.handlers[:], package.level, package.propagate)
        for package in packages
    ]
    yield
    for package, (handlers, level, propagate) in zip(
        packages, before, strict=True
    ):
        package.handlers[:], package.propagate = handlers, propagate
        package.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind():
    """Every process that the suite started is gone at its end."""
    import psutil

    yield
    if (
        processes := sys.modules.get("tests.distributed.processes")
    ) is not None:
        processes.end_server()

    def left():
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if _alive(process)
        ]

    until(
        lambda: not left(),
        lambda: f"the end of {[(p.pid, p.cmdline()[:4]) for p in left()]}",
    )


def _alive(process):
    import psutil

    try:
        return (
            process.status() != psutil.STATUS_ZOMBIE
            and "resource_tracker" not in " ".join(process.cmdline())
        )
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture(scope="session")
def command():
    """Run a command of the environment's Python; `ray_address` joins a cluster.

    An argument that begins with a dash may be several, as in "-m tune
    --quiet".

    With `forked`, `-m module` runs in a process that has torch imported
    already: seconds less, all else is the same.
    """
    from tests.distributed.processes import run_module

    def run(
        *args,
        cwd=REPOSITORY,
        env=None,
        ray_address=None,
        timeout_s=HANG_S,
        program=(sys.executable,),
        forked=False,
    ):
        args = [
            part
            for argument in map(str, args)
            for part in (
                argument.split() if argument[:1] == "-" else [argument]
            )
        ]
        # What this process has from its own imports and fixtures is not what a
        # user has.
        own = (
            "RAY_ADDRESS",
            "PACELINE_STORAGE",
            "RAY_AIR_NEW_OUTPUT",
            "TUNE_",
        )
        settings = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(own)
        }
        settings["PATH"] = f"{Path(sys.executable).parent}:{settings['PATH']}"
        if ray_address:
            settings["RAY_ADDRESS"] = ray_address
        if forked:
            assert args[0] == "-m"
            directory = Path(tempfile.mkdtemp(prefix="command-", dir=SCRATCH))
            code = run_module(
                args[1],
                args[2:],
                cwd,
                settings | (env or {}),
                directory,
                timeout_s,
            )
            return Done(
                code,
                (directory / "out").read_text(),
                (directory / "err").read_text(),
            )
        done = subprocess.run(
            [*program, *args],
            cwd=cwd,
            env=settings | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster of tests/on_ray: `ray start --head` on this machine."""

    address: str
    dashboard: str
    directory: Path


def free_port():
    """A port above those that Ray gives its workers (10002 to 19999)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
