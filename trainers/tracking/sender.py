"""The process that sends: it follows a run on storage, and tells each tracker in a thread of its own.

Storage is the queue: a tracker that is slow or down is sent later what it has not got, by this process or the next, and
training hears nothing of it. Started by trainers/tracking/following.py, which writes a job to standard input, then how
the driver has ended; the end of that input says that it was killed. Standard output is the log, a level and a sentence
in each line; what clients print there is nobody's.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainers.config.tracking import TrackerConfig
from trainers.errors import LeaseError, PacelineError, first_line
from trainers.redaction import redact
from trainers.storage import Storage
from trainers.tracking.delivery import Delivery
from trainers.tracking.history import KILLED, Source
from trainers.tracking.trackers import make_sink

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long, after the driver's end, a tracker that has answered so far may take for the rest."""
LOOK_EVERY_S = 5.0
_RETRY_S = 2.0
_HUNG_S = 5.0
"""Without an answer for so long, a tracker is not waited for at the driver's end."""
_SAY_S = 30.0
"""And after so long it is said."""
_LONGEST_PAUSE_S = 60.0
_SHARE = 20
"""A pause is so many times as long as the sending before it: no more than 5 % of a core goes to one tracker."""
_NICE = 10


@dataclass(frozen=True)
class SenderJob:
    """What the process is started with, as plain data."""

    uri: str
    """The directory of the run or the sweep."""
    mark: str
    token: str
    """Of the directory's lease."""
    trackers: list[TrackerConfig]
    path: list[str]
    """Directories of the user's modules."""
    again: str
    """The command that sends what is left."""


@dataclass
class Tracking:
    """One tracker, and the thread that sends to it."""

    tracker: TrackerConfig
    path: Sequence[str]
    storage: Storage
    make_source: Callable[[Storage], Source]
    ended: threading.Event = field(default_factory=threading.Event)
    how: str | None = None
    """How the driver has ended, once it has."""
    is_over: bool = False
    """Whether it has all, or nothing may be noted any more."""
    failed: bool = False
    """Whether its last answer was an error."""
    has_been_said: bool = False
    asked_at: float | None = None
    """Since when it owes an answer; None while it is not asked."""

    def send_all(self, ended: str | None) -> None:
        """Send once what there is, and close; raises what the tracker does."""
        sink = make_sink(self.tracker, self.path, self.storage)
        Delivery(self.tracker.tracker, self.storage, sink).send(self.make_source(self.storage).poll(ended))
        sink.close()

    def follow(self) -> None:
        """Send until the driver has ended and everything is sent; the body of the thread."""
        pause_s = LOOK_EVERY_S
        parts: tuple[Any, Delivery, Source] | None = None
        while not self.is_over:
            is_last = self.ended.is_set()
            try:
                if parts is None:
                    sink = make_sink(self.tracker, self.path, self.storage)
                    delivery = Delivery(self.tracker.tracker, self.storage, sink)
                    parts = sink, delivery, self.make_source(self.storage)
                sink, delivery, source = parts
                histories = source.poll(self.how)
                began = self.asked_at = time.monotonic()
                delivery.send(histories, self._answered)
                if is_last:
                    sink.close()
                    self.is_over = True
                self.asked_at, self.failed = None, False
                pause_s = min(_LONGEST_PAUSE_S, max(LOOK_EVERY_S, _SHARE * (time.monotonic() - began)))
            except LeaseError:
                self.is_over = True
            except Exception as error:
                # A new sink and a new look at everything: nobody knows what the tracker took. It takes that first.
                self.say(f"cannot be told now ({type(error).__name__}: {first_line(error)})")
                if parts is not None:
                    with contextlib.suppress(Exception):
                        parts[0].close()
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s if self.failed else LOOK_EVERY_S)
                self.asked_at, self.failed, parts = None, True, None
                if is_last:
                    return
            if not is_last:
                self.ended.wait(pause_s)

    def _answered(self) -> None:
        self.asked_at = time.monotonic()

    @property
    def waits_s(self) -> float:
        """How long it has owed an answer."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    @property
    def patience_s(self) -> float:
        """How long it may take for the rest: none while it hangs, and little where its last answer was an error."""
        if self.waits_s > _HUNG_S:
            return 0.0
        return _RETRY_S if self.failed else GRACE_S

    def say(self, words: str) -> None:
        """Warn of it, once."""
        if not self.has_been_said:
            self.has_been_said = True
            rest = "training goes on, and what it has not got is sent later"
            logger.warning("tracking: %s %s; %s", self.tracker.tracker, redact(words), rest)


def serve(make_source: Callable[[Storage], Source], fence: Callable[[Storage, str, str], Storage]) -> None:
    """Do the job that comes by standard input; ends this process."""
    os.nice(_NICE)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the end of its input is what ends it
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    for package in ("trainers", "tune"):
        logging.getLogger(package).handlers[:] = [handler]
        logging.getLogger(package).propagate = False
    with open(0, "rb", buffering=0, closefd=False) as given:  # what follows may stay in no buffer
        data = json.loads(given.readline())
    job = SenderJob(**data | {"trackers": [TrackerConfig(**one) for one in data["trackers"]]})
    storage = fence(Storage(job.uri), job.mark, job.token)
    trackings = [Tracking(one, job.path, storage, make_source) for one in job.trackers]
    threads = [threading.Thread(target=one.follow, name=one.tracker.tracker, daemon=True) for one in trackings]
    for thread in threads:
        thread.start()
    how = _wait(trackings)
    until = [time.monotonic() + one.patience_s for one in trackings]
    for one in trackings:
        one.how = how
        one.ended.set()
    for thread, deadline in zip(threads, until, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
    for one in trackings:
        if not one.is_over:
            logger.warning("tracking: %s has not got everything; `%s` sends the rest", one.tracker.tracker, job.again)
    out.flush()
    os._exit(0)


def _wait(trackings: Sequence[Tracking]) -> str:
    """Return how the driver has ended, once it has; say meanwhile which tracker hangs."""
    while not select.select([0], [], [], 1.0)[0]:
        for one in trackings:
            if one.waits_s > _SAY_S:
                one.say(f"has not answered for {_SAY_S:.0f} s")
    return os.read(0, 100).decode().strip() or KILLED


def send_rest(
    trackers: Sequence[TrackerConfig],
    path: Sequence[str],
    storage: Storage,
    make_source: Callable[[Storage], Source],
    ended: str | None,
) -> bool:
    """Send in this process what trackers have not got; return whether all have everything now."""
    has_all = True
    if not trackers:
        logger.info("tracking: the configuration names no tracker")
    for one in trackers:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # trackio says much
                Tracking(one, path, storage, make_source).send_all(ended)
            logger.info("tracking: %s has everything", one.tracker)
        except PacelineError:
            raise
        except Exception as error:
            has_all = False
            logger.error("tracking: %s: %s", one.tracker, redact(f"{type(error).__name__}: {first_line(error)}"))
    return has_all
