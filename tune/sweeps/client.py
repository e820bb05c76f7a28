"""A command that has its sweep run by the driver that keeps lanes on its cluster, and starts that; without Ray."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers import residents
from trainers.errors import PacelineError

RESIDENT = "--resident"
"""What `python -m tune` is started with to become the resident driver, before the path of its socket."""
_START_S, _LOOK_S = 30.0, 0.05


def run_by_resident(arguments: Sequence[str], output: int = 1) -> int | None:
    """Have `python -m tune ARGUMENTS` run by the resident driver, which is started where there is none; returns its
    exit code, None where it is busy, or none may be. `output` is the descriptor of the command's standard output.

    Raises PacelineError where it dies.
    """
    place = residents.place()
    if place is None:
        return None
    found = residents.hand_over(place, {"run": list(arguments)}, output, _start)
    if found is None:
        words = "the resident driver of this cluster has died, and the sweep with it; the same command goes on"
        raise PacelineError(words)
    return found.get("exit")


def _start(place: Path) -> None:
    """Start the resident driver, in a session of its own, and wait until it listens."""
    command = [sys.executable, "-m", "tune", RESIDENT, str(place)]
    path = os.pathsep.join([str(residents.CODE), os.environ.get("PYTHONPATH", "")])
    quiet: Any = subprocess.DEVNULL
    process = subprocess.Popen(  # noqa: S603 (ourselves)
        command,
        env=os.environ | {"PYTHONPATH": path},
        cwd="/",
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    deadline = time.monotonic() + _START_S
    while not place.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
