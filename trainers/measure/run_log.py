"""The log kept with a run: JSON lines, and TensorBoard events if asked for."""

import contextlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainers.errors import CheckpointError, PacelineError
from trainers.output import Record
from trainers.storage import Storage, parse_json

_POSITION = ("step", "epoch", "train_time_s")
SHOW_EVERY_S = 10.0
"""Least time between two copies for those who follow a run."""


class RunLog:
    """The run's records, in parts `log/<step>.jsonl` that each end at a flush.

    Parts are needed because object stores cannot append.

    With `tensorboard` the same parts are also written to `tensorboard/` as
    events. The log is flushed with each checkpoint, which may be hours apart,
    so a run that is `followed` also leaves copies in `live/` of records that
    are in no part yet.
    """

    def __init__(
        self, run: Storage, tensorboard: bool = False, followed: bool = False
    ) -> None:
        self._storage = run.child("log")
        self._live = run.child("live")
        self._events = run.child("tensorboard") if tensorboard else None
        self._open: list[tuple[float, Record]] = []
        self._is_followed = followed
        self._num_shown = 0
        self._shown_at = 0.0
        self._showing: threading.Thread | None = None
        self._is_writing = False
        """Whether records were taken for a part that is not complete."""

    def add(self, record: Record) -> None:
        """Add one record, with its time."""
        self._open.append((time.time(), record))

    def show(self, step: int) -> None:
        """Copy new records to `live/<step>.jsonl`, at most every ten seconds.

        A thread writes the copy, so training does not wait. While a part is
        being written nothing is copied, since trackers take steps in order.
        """
        now = time.monotonic()
        if not self._is_followed or now - self._shown_at < SHOW_EVERY_S:
            return
        if self._showing is not None and self._showing.is_alive():
            return  # storage is slow
        if self._is_writing:
            return
        records = self._open[self._num_shown :]
        self._num_shown = len(self._open)
        self._shown_at = now

        def copy() -> None:
            # The next part contains these records in any case.
            with contextlib.suppress(PacelineError):
                self._live.write(f"{step:012d}.jsonl", _lines(records))

        self._showing = threading.Thread(
            target=copy, name="live-log", daemon=True
        )
        self._showing.start()

    def flush(self, step: int) -> None:
        """Write all records so far as the part that ends at `step`."""
        if self._showing is not None:
            self._showing.join()
        self.part(step)()

    def part(self, step: int) -> Callable[[], None]:
        """Take all records so far; return a function that writes them as a part.

        The part ends at `step`. Any thread may call the function.
        """
        taken = self._open
        self._open = []
        self._num_shown = 0
        self._is_writing = True

        def write() -> None:
            if taken:
                _extend(self._storage, f"{step:012d}.jsonl", _lines(taken))
                if self._events is not None:
                    _extend(
                        self._events, events_name(step), encode_events(taken)
                    )
            self._is_writing = False
            if self._is_followed:
                last = f"{step:012d}.jsonl"
                # Training may be ahead of a part that is written in the
                # background.
                for name in self._live.names():
                    if name <= last:
                        self._live.delete(name)

        return write

    def cut(self, step: int) -> None:
        """Delete the parts that end after `step`, at which the run resumes.

        The run will write these parts again.
        """
        self._live.delete("")
        for storage, last in (
            (self._storage, f"{step:012d}.jsonl"),
            (self._events, events_name(step)),
        ):
            if storage is not None:
                storage.clear_aside()  # only this rank writes there
                for name in storage.names():
                    if name > last:  # steps have leading zeros
                        storage.delete(name)


def _lines(records: Iterable[tuple[float, Record]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for _, record in records).encode()


def _extend(storage: Storage, name: str, data: bytes) -> None:
    before = storage.read(name) if storage.exists(name) else b""
    storage.write(name, before + data)


def read_log(run: Storage) -> list[Record]:
    """Return all records of a run, in order; CheckpointError names a damaged line."""
    storage = run.child("log")
    records = []
    for name in storage.names():
        if name.endswith(".jsonl"):
            records += read_part(storage, name)
    return records


def read_part(storage: Storage, name: str) -> list[Record]:
    """Return the records of one part."""
    records = []
    for number, line in enumerate(storage.read(name).splitlines(), 1):
        try:
            records.append(parse_json(line, Record))
        except CheckpointError as error:
            raise CheckpointError(
                f"{storage.locate(name)}, line {number}: {error}"
            ) from None
    return records


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a record, except its position."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in _POSITION
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def events_name(step: int) -> str:
    """Return the name of the event file of the part that ends at `step`.

    TensorBoard recognises it by `tfevents`.
    """
    return f"events.out.tfevents.{step:012d}"


def encode_events(records: Iterable[tuple[float, Record]]) -> bytes:
    """Encode records with their time (Unix, seconds) as TensorBoard events.

    Every number except the position becomes a scalar at `step`.

    tensorboardX provides the message types and the checksum; its own writer
    has a thread and a queue that `flush` does not wait for.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    written = b""
    for wall_time, record in records:
        if not written:
            written = _framed(
                Event(
                    wall_time=wall_time, file_version="brain.Event:2"
                ).SerializeToString()
            )
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(record).items()
        ]
        event = Event(
            wall_time=wall_time,
            step=record["step"],
            summary=Summary(value=values),
        )
        written += _framed(event.SerializeToString())
    return written


def _framed(data: bytes) -> bytes:
    """Return one record of a TFRecord file: length, checksum, data, checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return (
        length
        + struct.pack("<I", masked_crc32c(length))
        + data
        + struct.pack("<I", masked_crc32c(data))
    )
