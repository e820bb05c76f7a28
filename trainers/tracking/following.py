"""The driver's side of the process that sends: start it with a run, and tell it how the run has ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from trainers.config.tracking import TrackerConfig
from trainers.errors import PacelineError, first_line
from trainers.storage import Storage
from trainers.tracking.delivery import read_sent
from trainers.tracking.sender import GRACE_S, SenderJob

logger = logging.getLogger(__name__)
_CODE = Path(__file__).parents[2]
_LATE_S = 5.0  # what the process itself may take besides its grace


@contextlib.contextmanager
def followed(
    storage: Storage,
    mark: str,
    token: str,
    trackers: Sequence[TrackerConfig],
    path: Sequence[str],
    *,
    module: str = "trainers.tracking.run",
    command: str = "trainers",
    ended: str | None = None,
) -> Iterator[None]:
    """Send a run or a sweep, whose lease is held, to its trackers in the block, by a process of its own.

    Nothing in the block waits for it, and its end takes seconds at most (GRACE_S), none of a tracker that hangs.
    `module` is what the process runs. `ended`: how it had ended before; where every tracker knows, there is no process.
    """
    if ended is not None:
        trackers = [one for one in trackers if not _knows(storage, one, ended)]
    if not trackers:
        yield
        return
    again = f"python -m {command} track {shlex.quote(storage.uri)}"
    job = SenderJob(storage.uri, mark, token, list(trackers), [str(Path(one).absolute()) for one in path], again)
    python_path = os.pathsep.join([str(_CODE), os.environ.get("PYTHONPATH", "")])
    try:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": python_path},
            start_new_session=True,  # Ctrl-C is for the run, whose end is still to be sent
        )
    except OSError as error:
        logger.warning("tracking: nothing can be sent (%s); `%s` sends it later", first_line(error), again)
        yield
        return
    assert process.stdin is not None
    assert process.stdout is not None
    listener = threading.Thread(target=_listen, args=(process.stdout,), name="tracking", daemon=True)
    listener.start()
    how = "error"
    try:
        _tell(process.stdin, json.dumps(vars(job) | {"trackers": [one.model_dump() for one in job.trackers]}))
        yield
        how = "done"
    except KeyboardInterrupt:
        how = "stopped"
        raise
    except BaseException as error:
        how = getattr(error, "status", how)
        raise
    finally:
        _tell(process.stdin, how)
        try:
            code = process.wait(GRACE_S + _LATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:  # else it has said itself what is left
            logger.warning("tracking: not everything could be sent; `%s` sends the rest", again)
        with contextlib.suppress(OSError):
            process.stdin.close()
        listener.join(1.0)
        process.stdout.close()


def _knows(storage: Storage, tracker: TrackerConfig, ended: str) -> bool:
    """Whether a tracker has a run that has ended before."""
    try:
        sent = read_sent(storage, tracker.tracker).get("")
    except PacelineError:  # which the process says
        return False
    return sent is not None and sent.ended == ended


def _tell(stream: IO[bytes], line: str) -> None:
    with contextlib.suppress(OSError):  # it has ended, which its log says
        stream.write(line.encode() + b"\n")
        stream.flush()


def _listen(stream: IO[bytes]) -> None:
    """Repeat the log of the process in this one's."""
    for line in stream:
        level, _, words = line.decode(errors="replace").rstrip("\n").partition(" ")
        logger.log(logging.getLevelNamesMapping().get(level, logging.WARNING), "%s", words)
