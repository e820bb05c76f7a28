"""Send a run's data from storage to its trackers, each step at least once.

A run has the same id in every resume. `tracking/<tracker>.json` in the run's
directory stores the id and what was sent, for the run and, in a sweep, for
each trial. Storage is the queue: what a tracker has not received is sent
later, by this process or the next.

`python -m trainers.tracking.delivery` is the process that sends a run while it
trains. At its end, the driver writes its status to this process's standard
input; if the input ends without one, the driver was killed. The standard
output is the log, one sentence per line; what trackers' clients print is
discarded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from trainers.config.function import flat
from trainers.config.model import Tree
from trainers.config.sections import TrackerConfig
from trainers.errors import LeaseError, StorageError, first_line, redact
from trainers.launch.spec import MARK, read_mapping
from trainers.lease import fenced
from trainers.measure.run_log import read_part, scalars
from trainers.output import PACKAGES
from trainers.storage import Storage
from trainers.tracking.sinks import (
    Params,
    Row,
    Sink,
    TrackedRun,
    make_sink,
)

logger = logging.getLogger(__name__)

KILLED = "killed"
"""The status of a run whose driver was killed, and so could not report one."""
_OF_RESULT = (
    "epochs",
    "train_time_s",
    "wall_time_s",
    "peak_memory_bytes",
    "first_step_s",
    "mfu",
    "throughput",
)
LOOK_EVERY_S = 5.0
_RETRY_S = 20.0
_SHARE = 20
"""A pause lasts this many times as long as the sending before it, so one
tracker uses no more than 5 % of a core.
"""
GRACE_S = 10.0
"""How long trackers may take for the rest, after the driver's end."""
_REST_S = 120.0
"""Replaces GRACE_S if the run is already complete: its driver has no other work."""
_LATE_S = 5.0  # what the process itself may take in addition
_NICE = 10
"""Niceness of the sending process, so that the run has priority."""
_CODE = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class History:
    """What trackers are told of one run: its description and its data so far."""

    name: str
    kind: str
    """run, sweep or trial."""
    params: Params
    tags: dict[str, str]
    rows: Sequence[Row] = ()
    """In the order of the log; some may have been returned before."""
    key: str = ""
    """The id of a trial, else empty."""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Content by file name, once the run has ended."""
    ended: str | None = None
    """How it has ended, or None."""


class Source(Protocol):
    """Where histories come from; each tracker polls its own source."""

    def poll(self, ended: str | None) -> list[History]:
        """Return what is new, a sweep before its trials; the first time, all rows.

        `ended` is how the driver has ended, or None while it runs.
        """


def as_params(tree: Mapping[str, Any]) -> Params:
    """Flatten a configuration to dotted keys, with lists as text and secrets hidden."""
    shown: Params = {}
    for key, value in flat(tree).items():
        text = (
            value if isinstance(value, str) else json.dumps(value, default=str)
        )
        hidden = redact(f"{key}: {text}").removeprefix(f"{key}: ")
        shown[key] = hidden
        if isinstance(value, int | float) and hidden == text:
            shown[key] = value
    return shown


class RunHistory:
    """A training run: the parts of its log, and copies of records not yet in a part."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._read: dict[str, tuple[str, float]] = {}
        """By directory: the last file that was read, and when it was written."""

    def poll(self, ended: str | None) -> list[History]:
        """Poll as in `Source`; empty until a worker has written its environment."""
        if ended is None and not self._run.exists("environment.json"):
            return []
        tree = read_mapping(self._run, MARK)
        tags = {"uri": redact(self._run.uri)}
        if self._run.exists("environment.json"):
            tags |= self._run.read_json("environment.json", dict[str, str])
        # Copies are read first: a record that leaves them meanwhile is in the
        # log.
        copied = self._new("live")
        rows = self._new("log") + copied
        artifacts: dict[str, bytes] = {}
        if ended in ("done", "stopped") and self._run.exists("result.json"):
            result = self._run.read_json("result.json", Tree)
            ended = str(result["status"])
            values = {}
            for name, value in flat(result).items():
                if name.partition(".")[0] in _OF_RESULT and value is not None:
                    values[f"result/{name.replace('.', '/')}"] = float(value)
            rows.append(
                Row(int(result["steps"]), self._time("result.json"), values)
            )
            artifacts["result.json"] = self._run.read("result.json")
        history = History(
            name=str(tree["name"]),
            kind="run",
            params=as_params(tree),
            tags=tags,
            rows=rows,
            artifacts=artifacts,
            ended=ended,
        )
        return [history]

    def _new(self, directory: str) -> list[Row]:
        """Return the rows of new parts, and of the last part if it has grown."""
        storage = self._run.child(directory)
        rows = []
        for name in storage.names():
            last = self._read.get(directory, ("", 0.0))
            if not name.endswith(".jsonl") or name < last[0]:
                continue
            try:
                written_at = self._time(f"{directory}/{name}")
                if (name, written_at) == last:
                    continue
                records = read_part(storage, name)
            except StorageError:
                if storage.exists(name):
                    raise
                # a copy that has become part of the log, which the next poll
                # reads
                continue
            self._read[directory] = (name, written_at)
            # Records have no time of day; the time between two is training
            # time.
            end_s = (
                float(records[-1].get("train_time_s", 0.0)) if records else 0.0
            )
            for record in records:
                time_s = written_at - max(
                    0.0, end_s - float(record.get("train_time_s", end_s))
                )
                rows.append(Row(int(record["step"]), time_s, scalars(record)))
        return rows

    def _time(self, name: str) -> float:
        """Return when a file was written, as Unix time in s."""
        info = self._run.filesystem.get_file_info(f"{self._run.path}/{name}")
        return float(info.mtime.timestamp()) if info.mtime is not None else 0.0


@dataclass
class Sent:
    """What one tracker has received of one run."""

    id: str
    """Our own id; a tracker that lets users choose ids uses it, too."""
    run: str | None = None
    """The tracker's own name of the run."""
    last: dict[str, int] = field(default_factory=dict)
    """The last step sent of each metric."""
    ended: str | None = None

    def new_rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the values not sent yet, one row per step."""
        last = dict(self.last)
        found: dict[int, Row] = {}
        for row in rows:
            new = {
                name: value
                for name, value in row.values.items()
                if row.step > last.get(name, -1)
            }
            last |= dict.fromkeys(new, row.step)
            if new:
                known = found.get(row.step, row._replace(values={}))
                found[row.step] = row._replace(values=known.values | new)
        return list(found.values())


def _file(tracker: str) -> str:
    return f"tracking/{re.sub(r'[^A-Za-z0-9_]', '_', tracker)}.json"


def read_sent(storage: Storage, tracker: str) -> dict[str, Sent]:
    """Return what a tracker has received, by trial id (empty for the run or sweep)."""
    name = _file(tracker)
    return (
        storage.read_json(name, dict[str, Sent])
        if storage.exists(name)
        else {}
    )


class Delivery:
    """Sends a run or a sweep to one tracker."""

    def __init__(
        self,
        tracker: TrackerConfig,
        path: Sequence[str],
        storage: Storage,
        make_source: Callable[[Storage], Source],
    ) -> None:
        """`path` lists the directories of the user's modules."""
        self.name = tracker.tracker
        self.is_over = False
        """Whether the tracker has received everything, or another process
        sends the rest.
        """
        self._tracker = tracker
        self._path = path
        self._storage = storage
        self._make_source = make_source
        self._has_ended = threading.Event()
        self._how: str | None = None

    def end(self, how: str) -> None:
        """Note that the driver has ended; `follow` sends the rest and returns."""
        self._how = how
        self._has_ended.set()

    def follow(self) -> None:
        """Send until the driver has ended and all is sent; the body of a thread."""
        has_warned = False
        while not self.is_over:
            try:
                sink = make_sink(self._tracker, self._path, self._storage)
                try:
                    self._send_to(sink)
                finally:
                    sink.close()
                self.is_over = True
            except LeaseError:
                self.is_over = True
            # It is unknown what arrived: make a new sink and read everything
            # again. SystemExit would end this thread without a word.
            except (Exception, SystemExit) as error:
                if not has_warned:
                    has_warned = True
                    words = redact(
                        f"{type(error).__name__}: {first_line(error)}"
                    )
                    logger.warning(
                        "tracking: sending to %s failed (%s); it is tried again",
                        self.name,
                        words,
                    )
                if self._has_ended.is_set():
                    return
                self._has_ended.wait(_RETRY_S)

    def _send_to(self, sink: Sink) -> None:
        """Send what is new, repeatedly, until the driver has ended."""
        self._sent = read_sent(self._storage, self.name)
        self._kept: dict[str, dict[str, int]] = {}
        """For each started run, the last steps that its tracker has certainly
        stored.
        """
        source = self._make_source(self._storage)
        while True:
            is_last = self._has_ended.is_set()
            began = time.monotonic()
            for history in source.poll(self._how):
                self._send_history(sink, history)
            if is_last:
                return
            took_s = time.monotonic() - began
            self._has_ended.wait(max(LOOK_EVERY_S, _SHARE * took_s))

    def _send_history(self, sink: Sink, history: History) -> None:
        sent = self._sent.setdefault(history.key, Sent(secrets.token_hex(8)))
        has_ended = history.ended is not None and sent.ended != history.ended
        if (
            not sent.new_rows(history.rows)
            and not has_ended
            and sent.run is not None
        ):
            return
        if history.key not in self._kept:
            self._start(sink, history, sent)
        assert sent.run is not None
        rows = sent.new_rows(history.rows)
        if rows:
            sink.log(sent.run, rows)
            for row in rows:
                sent.last |= dict.fromkeys(row.values, row.step)
            if not sink.keeps_at_end:
                self._kept[history.key] = sent.last
                self._note()
        if history.ended is not None:
            with tempfile.TemporaryDirectory(
                prefix="paceline-tracking-"
            ) as directory:
                for name, content in history.artifacts.items():
                    file = Path(directory, name)
                    file.write_bytes(content)
                    sink.artifact(sent.run, file)
            sink.end(sent.run, history.ended, history.tags)
            sent.ended = history.ended
            del self._kept[history.key]
            self._note()

    def _start(self, sink: Sink, history: History, sent: Sent) -> None:
        # store the id before the tracker creates a run for it; raises
        # LeaseError if another start has the run
        self._note()
        parent = self._sent[""].run if history.key else None
        tracked = TrackedRun(
            sent.id,
            history.key,
            history.name,
            history.kind,
            history.params,
            history.tags,
            parent,
        )
        run = sink.start(tracked)
        if not isinstance(run, str):
            raise TypeError(f"start() returned {run!r}, which is no name")
        if run != sent.run:
            sent.run = run
            sent.last = {}
        sent.ended = None
        self._kept[history.key] = dict(sent.last)
        self._note()

    def _note(self) -> None:
        everything = {}
        for key, sent in self._sent.items():
            kept = self._kept.get(key, sent.last)
            everything[key] = asdict(replace(sent, last=kept))
        self._storage.write(_file(self.name), json.dumps(everything).encode())


@contextlib.contextmanager
def followed(
    module: str,
    storage: Storage,
    token: str,
    trackers: Sequence[TrackerConfig],
    path: Sequence[str],
    again: str,
    has_ended: bool,
) -> Iterator[None]:
    """During the block, a separate process sends a run or a sweep to its trackers.

    The block does not wait for the process; after the block, trackers have
    a few seconds (GRACE_S) to receive the rest. `module` is what the process
    runs; `again` names the command that would send what is left. `has_ended`
    says that the run is already complete, so there is more time to send the
    rest.
    """
    if not trackers:
        yield
        return
    grace_s = _REST_S if has_ended else GRACE_S
    given = (
        [tracker.model_dump() for tracker in trackers],
        [os.path.abspath(place) for place in path],  # noqa: PTH100
    )
    process = subprocess.Popen(  # noqa: S603
        [
            sys.executable,
            "-m",
            module,
            storage.uri,
            token,
            json.dumps(given),
            str(grace_s),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [_CODE, os.environ.get("PYTHONPATH", "")]
            ),
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
        # Suppressed: if the process has died, its exit code shows that.
        with contextlib.suppress(OSError):
            process.stdin.write(f"{how}\n".encode())
            process.stdin.close()
        try:
            code = process.wait(grace_s + _LATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        listener.join(1.0)
        if code != 0:
            logger.warning(
                "tracking: not everything could be sent; %s sends the rest",
                again,
            )


def _listen(stream: IO[bytes]) -> None:
    """Repeat the process's log in the log of this process."""
    with stream:
        for line in stream:
            logger.warning("%s", line.decode(errors="replace").rstrip("\n"))


def serve(mark: str, make_source: Callable[[Storage], Source]) -> None:
    """Send until the driver has ended and all is sent, or its grace time is over.

    Ends this process, with exit code 1 if something is left to send.
    """
    os.nice(_NICE)
    # Only the end of its input ends this process.
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGINT,
    ):
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for package in PACKAGES:
        logging.getLogger(package).handlers[:] = [logging.StreamHandler(out)]
        logging.getLogger(package).propagate = False
    uri, token, given, grace_s = sys.argv[1:]
    trackers, path = json.loads(given)
    storage = fenced(Storage(uri), mark, token)
    deliveries = [
        Delivery(TrackerConfig(**tracker), path, storage, make_source)
        for tracker in trackers
    ]
    # The threads may be in the midst of something when this process ends.
    tempfile.tempdir = tempfile.mkdtemp(prefix="paceline-tracking-")
    threads = [
        threading.Thread(target=delivery.follow, daemon=True)
        for delivery in deliveries
    ]
    for thread in threads:
        thread.start()
    how = sys.stdin.readline().strip() or KILLED
    for delivery in deliveries:
        delivery.end(how)
    deadline = time.monotonic() + float(grace_s)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [delivery.name for delivery in deliveries if not delivery.is_over]
    if late:
        logger.warning(
            "tracking: %s: not everything was sent", ", ".join(late)
        )
    out.flush()
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    os._exit(1 if late else 0)


if __name__ == "__main__":
    # Imported by its name, so that its logger belongs to PACKAGES.
    from trainers.tracking import delivery

    delivery.serve(MARK, delivery.RunHistory)
