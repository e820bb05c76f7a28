"""The process that sends to trackers: what starts it, and what it does.

Its arguments are what to send; standard input says how the driver has ended: an end
without a word, that it was killed. Its standard output is the log, a sentence in each
line; what clients print there is nobody's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from trainers.config.tracking import TrackerConfig
from trainers.lease import fenced
from trainers.storage import Storage
from trainers.tracking.delivery import Delivery
from trainers.tracking.history import KILLED, Source

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long trackers may take for the rest, after the driver's end."""
_LATE_S = 5.0  # what the process itself may take besides
_NICE = 10
_CODE = str(Path(__file__).parents[2])


@contextlib.contextmanager
def followed(
    module: str,
    storage: Storage,
    token: str,
    trackers: Sequence[TrackerConfig],
    path: Sequence[str],
    again: str,
) -> Iterator[None]:
    """Send a run or a sweep to its trackers in the block, by a process of its own.

    Nothing in the block waits for it, and its end takes seconds at most (GRACE_S).
    `module` is what the process runs, `again` the command that sends what is left.
    """
    if not trackers:
        yield
        return
    given = (
        [tracker.model_dump() for tracker in trackers],
        [os.path.abspath(place) for place in path],  # noqa: PTH100
    )
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", module, storage.uri, token, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([_CODE, os.environ.get("PYTHONPATH", "")]),
        },
        start_new_session=True,  # Ctrl-C is for the run, whose end is still to be sent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    listener = threading.Thread(
        target=_listen, args=(process.stdout,), name="tracking", daemon=True
    )
    listener.start()
    how = "error"
    try:
        yield
        how = "done"
    except KeyboardInterrupt:
        how = "stopped"
        raise
    except BaseException as error:
        how = getattr(error, "status", how)
        raise
    finally:
        with contextlib.suppress(OSError):  # it has died, which its exit code says
            process.stdin.write(f"{how}\n".encode())
            process.stdin.close()
        try:
            code = process.wait(GRACE_S + _LATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        listener.join(1.0)
        if code != 0:
            logger.warning(
                "tracking: not everything could be sent; `%s` sends the rest", again
            )


def _listen(stream: IO[bytes]) -> None:
    """Repeat the log of the process in this one's."""
    with stream:
        for line in stream:
            logger.warning("%s", line.decode(errors="replace").rstrip("\n"))


def serve(mark: str, make_source: Callable[[Storage], Source]) -> None:
    """Send until the driver has ended and trackers have everything, or GRACE_S more.

    Ends this process, with exit code 1 where something is left.
    """
    os.nice(_NICE)
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGINT,
    ):  # the end of its input is what ends it
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for package in ("trainers", "tune"):
        logging.getLogger(package).handlers[:] = [logging.StreamHandler(out)]
        logging.getLogger(package).propagate = False
    uri, token, given = sys.argv[1:]
    trackers, path = json.loads(given)
    storage = fenced(Storage(uri), mark, token)
    deliveries = [
        Delivery(TrackerConfig(**tracker), path, storage, make_source)
        for tracker in trackers
    ]
    threads = [
        threading.Thread(target=delivery.follow, daemon=True) for delivery in deliveries
    ]
    for thread in threads:
        thread.start()
    how = sys.stdin.readline().strip() or KILLED
    for delivery in deliveries:
        delivery.end(how)
    deadline = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [delivery.name for delivery in deliveries if not delivery.is_over]
    if late:
        logger.warning("tracking: %s: something is left to send", ", ".join(late))
    out.flush()
    os._exit(1 if late else 0)
