"""A script that ends an embedded cluster's processes when its driver ends.

Ray's agents outlive a killed raylet by a minute, and report to a GCS that is
dead too (ray/_private/process_watcher.py); a stopped worker notices nothing at
all. Needs Linux.

Run as: _reaper.py SESSION [DIRECTORY], with Ray's session directory and a
directory to delete. The script acts when its standard input ends.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

GRACE_S = 3.0
"""Time within which Ray's other processes end without being killed."""


def start(session: str, directory: Path | None = None) -> Callable[[], None]:
    """Start a reaper for this process; it also deletes `directory`.

    Returns:
        A function that lets the reaper end before this process; call it once
        the cluster has ended.
    """
    command = [sys.executable, "-I", "-S", __file__, session]
    if directory is not None:
        command.append(str(directory))
    # Its standard input ends when this process does, if not before.
    reaper = subprocess.Popen(  # noqa: S603 (a script of ours)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert reaper.stdin is not None
    held = reaper.stdin

    def let_go() -> None:
        held.close()
        # The reaper may wait for Ray's last processes; this process need not.
        threading.Thread(target=reaper.wait, daemon=True).start()

    return let_go


def processes(session: str) -> list[int]:
    """Return the raylet and all processes below it.

    They are recognised by having the raylet's log open for writing, since Ray
    replaces their command lines by titles.
    """
    log = Path(session, "logs", "raylet.out")
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is another user's
            links = (process / "fd").iterdir()
            if any(
                link.readlink() == log and link.lstat().st_mode & stat.S_IWUSR
                for link in links
            ):
                found.append(int(process.name))
    return found


def main(session: str, directory: str | None = None) -> None:
    """Wait for the driver's end; kill remaining processes, and delete the directory."""
    os.chdir("/")
    sys.stdin.read()
    deadline = time.monotonic() + GRACE_S
    while processes(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in processes(session):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
