"""The zygote: the process from which a node's trials are forked.

It never joins Ray's cluster, does not use CUDA, and has only one thread.

Run as: python -m tune.forks.zygote SOCKET PRELOAD CLIENT, where PRELOAD is
JSON (`Preload`) and CLIENT is the file descriptor of a socket to the zygote's
first client. The class Zygote of client.py runs this command. The zygote does not
stay a child of the client, because Ray kills a worker's children.

The zygote imports torch, the training loop and the user's module, and then
listens. A client that wants a trial connects and passes open files: the
trial's end of a channel, its standard output and its standard error. The
forked process reads its work from the channel (child.py), which the zygote
does not read. If a fork of the zygote could not work (threads, CUDA), the
zygote starts a new interpreter instead.

A connection stays open while its trial lives. When the trial ends, the zygote
sends the trial's exit code; if the client closes the connection earlier, the
zygote ends the trial. Processes that a trial leaves running are killed when it
ends. The zygote ends soon after its last connection was closed.
"""

import fcntl
import gc
import importlib
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune.forks.child import PR_SET_CHILD_SUBREAPER, become, prctl

NUMBER = struct.Struct("i")
"""Format of the replies: the PID of a trial's process and, later, its exit code."""
FORK = b"fork"
"""The message that comes with a trial's files. Any other message lists modules
to import, one a line.
"""
END_ALL = "."
"""The line that ends the zygote, and all trials with it."""
LONGEST_MESSAGE = 2**18
_MOST_FILES = 8
_IDLE_S = 10.0
"""How long the zygote lives on after its last connection is closed."""
_CANARY_S = 10


@dataclass(frozen=True)
class Preload:
    """What a zygote imports."""

    path: tuple[str, ...] = ()
    """Directories that come first on sys.path."""
    modules: tuple[str, ...] = ()
    """Modules to import. Failures are ignored here: a trial that needs the
    module reports the error.
    """
    forks: bool = True
    """Whether trials are forks; if not, each trial is a new interpreter."""


class Zygote:
    """The zygote's server: accepts clients on a socket, and starts their trials."""

    def __init__(
        self,
        path: Path,
        first: socket.socket,
        why_not: str | None,
        reseed: Iterable[Any],
    ) -> None:
        """`first` is the first client; `why_not` says why this process cannot fork.

        `reseed` has what each forked trial calls to draw numbers of its own.
        """
        self._why_not = why_not
        self._reseed = reseed
        self._clients = {first}
        self._trials: dict[int, socket.socket] = {}
        """The connection of each trial, by the PID of its process."""
        self._is_ended = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX)
        aside = path.with_suffix(".new")
        self._listener.bind(str(aside))
        self._listener.listen(64)
        aside.rename(path)  # once the path exists, clients can connect

    def serve(self) -> None:
        """Fork trials until no client is connected any more, or one sends `END_ALL`."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._selector.register(
            self._listener, selectors.EVENT_READ, self._accept
        )
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        for client in self._clients:
            self._selector.register(client, selectors.EVENT_READ)
        while not self._is_ended:
            ready = self._selector.select(_IDLE_S)
            if not ready and not self._clients:
                return
            for key, _ in ready:
                key.data() if key.data is not None else self._hear(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _hear(self, client: socket.socket) -> None:
        try:
            message, files, _, _ = socket.recv_fds(
                client, LONGEST_MESSAGE, _MOST_FILES
            )
        except OSError:
            message = b""
        if message == FORK:
            pid = self._start(files)
            self._trials[pid] = client
            for file in files:
                os.close(file)
            self._say(client, pid)
        elif message:
            lines = message.decode().splitlines()
            self._is_ended = END_ALL in lines
            if self._why_not is None and not self._is_ended:
                self._why_not = load(lines)
        else:
            self._forget(client)

    def _say(self, client: socket.socket, number: int) -> None:
        with suppress(OSError):  # the client may be gone
            client.sendall(NUMBER.pack(number))

    def _start(self, files: Sequence[int]) -> int:
        """Start a trial's process, and return its PID."""
        if self._why_not is not None:
            for file in files:
                os.set_inheritable(file, True)
            command = [
                sys.executable,
                "-m",
                "tune.forks.child",
                *map(str, files),
            ]
            return os.posix_spawn(sys.executable, command, os.environ)
        state = random.getstate()  # Python seeds this generator in a fork
        pid = os.fork()
        if pid == 0:
            self._leave()
            random.setstate(state)
            for seed in self._reseed:
                seed()
            become(files)
        return pid

    def _leave(self) -> None:
        """In a forked trial, close the zygote's files and restore signal handling."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for opened in (self._listener, *self._clients):
            opened.close()
        os.close(self._woken)
        os.close(self._wakes)

    def _forget(self, client: socket.socket) -> None:
        """Drop a connection that was closed, and end its trials that still run."""
        self._selector.unregister(client)
        self._clients.discard(client)
        client.close()
        for pid, owner in list(self._trials.items()):
            if owner is client:
                del self._trials[pid]
                end_group(pid)

    def _reap(self) -> None:
        """Report ended trials to their clients, and end what they left running."""
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            end_group(pid)
            client = self._trials.pop(pid, None)
            if client is not None:
                self._say(client, os.waitstatus_to_exitcode(status))
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill children that are not trials: processes left behind by ended trials."""
        text = ""
        with suppress(OSError):  # not all kernels have it
            text = Path("/proc/thread-self/children").read_text()
        for child in map(int, text.split()):
            if child not in self._trials:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def end_group(pid: int) -> None:
    """Kill a trial's process group, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def import_all(modules: Sequence[str]) -> None:
    """Import modules; ignore failures, which recur in the trial that needs them."""
    for module in modules:
        with suppress(BaseException), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)


def import_users(modules: Sequence[str]) -> list[str]:
    """Import the user's modules, and return what forks would wrongly share of that.

    Forks share the position in a file that is open, and what was made of a
    rank's environment variables, which new interpreters have from their start.
    Variables that a library reads when it is imported do not count.
    """
    found: list[str] = []
    encode = os.environ.encodekey

    def noted(name: str) -> str:
        if name.endswith(("RANK", "WORLD_SIZE")):
            importing = ""
            for at in traceback.extract_stack():
                if at.name == "<module>":
                    importing = at.filename
            if "-packages" not in importing:  # Debian: dist-packages
                found.append(name)
        return encode(name)

    before = _open_files()
    os.environ.encodekey = noted
    import_all(modules)
    os.environ.encodekey = encode
    found.extend(_open_files() - before)
    return found


def seeds() -> dict[Any, Any]:
    """Return what a seed changes in each generator, but no draw, by what seeds it."""
    import numpy as np
    import torch

    return {
        # A spare number, which only `gauss` uses.
        random.seed: random.getstate()[2],
        np.random.seed: np.random.get_bit_generator().seed_seq,  # type: ignore[attr-defined]
        torch.default_generator.seed: torch.initial_seed(),
    }


def _open_files() -> set[str]:
    """Return the open files and sockets, but for files that are mapped into memory."""
    mapped = Path("/proc/self/maps").read_text()
    return {
        str(place.resolve())
        for place in Path("/proc/self/fd").iterdir()
        if (place.is_file() or place.is_socket())
        and f"{place.resolve()}\n" not in mapped
    }


def load(modules: Sequence[str]) -> str | None:
    """Import the user's modules; return, and print, why forks would go wrong then."""
    found = import_users(modules)
    gc.freeze()
    why_not = (
        f"importing the task or function opened or read {', '.join(found)}"
        if found
        else why_not_fork()
    )
    if why_not is not None:
        print(
            f"trials run in new interpreters instead of forks, which is slower: {why_not}",
            flush=True,
        )
    return why_not


def why_not_fork() -> str | None:
    """Return why this process cannot be forked, or None if it can."""
    # The first is the main thread.
    threads = [thread.name for thread in threading.enumerate()[1:]]
    if threads:
        return f"importing the task or function started a thread ({', '.join(threads)})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the task or function initialised CUDA"
    if _canary_sings():
        return None
    return "importing the task or function left torch's threads in a state in which forks hang"


def _canary_sings() -> bool:
    """Return whether a fork can run torch's parallel code, by trying it in a fork.

    If this process has run parallel code before, the fork hangs (libgomp).
    """
    pid = os.fork()
    if pid == 0:
        import torch

        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CANARY_S)
        torch.set_num_threads(2)
        torch.ones(2**17).exp()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return status == 0


def main() -> None:
    """Detach, import the modules, and serve until the zygote ends."""
    if os.fork():
        os._exit(0)
    path = Path(sys.argv[1])
    preload = Preload(**json.loads(sys.argv[2]))
    first = socket.socket(fileno=int(sys.argv[3]))
    first.set_inheritable(False)
    # Until the zygote listens, SIGIO ends it if its first client dies or sends
    # `END_ALL`, even while an import blocks.
    fcntl.fcntl(first, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(first, fcntl.F_SETFL, os.O_RDWR | os.O_ASYNC)
    for signum in (signal.SIGIO, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    sys.path[:0] = [place for place in preload.path if place not in sys.path]
    reseed: Iterable[Any] = ()
    why_not: str | None = "each trial is to have a new interpreter"
    if preload.forks:
        gc.disable()
        import_all(
            [
                "torch._dynamo",
                "torch.distributed.nn.functional",
                "trainers.loop.fit",
                "tune.forks.task",
            ]
        )
        random.gauss()
        before = seeds()
        why_not = load(preload.modules)
        reseed = dict(before.items() & seeds().items())
        gc.enable()
    fcntl.fcntl(first, fcntl.F_SETFL, os.O_RDWR)
    try:
        Zygote(path, first, why_not, reseed).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)
        os._exit(0)  # libraries' cleanup would take a second, and log lines


if __name__ == "__main__":
    main()
