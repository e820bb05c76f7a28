"""The log that is kept with a run: JSON lines, and TensorBoard events where they are asked for."""

import json
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

from trainers.errors import CheckpointError
from trainers.json_data import parse_json
from trainers.storage import Storage

_POSITION = ("step", "epoch", "train_time_s")


class RunLog:
    """The run's records: parts `log/<step>.jsonl` that each end at a flush, so object stores need no append.

    With `tensorboard` the same parts go to `tensorboard/` as events.
    """

    def __init__(self, run: Storage, tensorboard: bool = False) -> None:
        self._storage = run.child("log")
        self._events = run.child("tensorboard") if tensorboard else None
        self._open: list[tuple[float, dict[str, Any]]] = []

    def add(self, record: dict[str, Any]) -> None:
        """Remember one record, with its time."""
        self._open.append((time.time(), record))

    def flush(self, step: int) -> None:
        """Write what was remembered as the part that ends at `step`."""
        self.part(step)()

    def part(self, step: int) -> Callable[[], None]:
        """Take what was remembered; the returned function, for any thread, writes it as the part until `step`."""
        taken, self._open = self._open, []

        def write() -> None:
            if taken:
                text = "".join(json.dumps(record) + "\n" for _, record in taken)
                _extend(self._storage, f"{step:012d}.jsonl", text.encode())
                if self._events is not None:
                    _extend(self._events, events_name(step), encode_events(taken))

        return write

    def cut(self, step: int) -> None:
        """Drop the parts that end after `step`: the run resumes there and will write them again."""
        for storage, last in ((self._storage, f"{step:012d}.jsonl"), (self._events, events_name(step))):
            if storage is not None:
                storage.clear_aside()  # this rank alone writes there
                for name in storage.names():
                    if name > last:  # steps have leading zeros
                        storage.delete(name)


def _extend(storage: Storage, name: str, data: bytes) -> None:
    before = storage.read(name) if storage.exists(name) else b""
    storage.write(name, before + data)


def read_log(run: Storage) -> list[dict[str, Any]]:
    """All records of a run, in order; CheckpointError names a line that is none."""
    storage = run.child("log")
    records = []
    for name in storage.names():
        if name.endswith(".jsonl"):
            for number, line in enumerate(storage.read(name).splitlines(), 1):
                try:
                    records.append(parse_json(line, dict[str, Any], finite=False))
                except CheckpointError as error:
                    raise CheckpointError(f"{storage.locate(name)}, line {number}: {error}") from None
    return records


def events_name(step: int) -> str:
    """The file of the part that ends at `step`; TensorBoard knows an event file by `tfevents`."""
    return f"events.out.tfevents.{step:012d}"


def encode_events(records: Iterable[tuple[float, dict[str, Any]]]) -> bytes:
    """Records with their time (Unix, seconds) as events: every number but the position is a scalar at `step`.

    tensorboardX gives the message types and the checksum; its own writer has a thread and a queue that `flush` does
    not wait for.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    written = b""
    for wall_time, record in records:
        if not written:
            written = _framed(Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in record.items()
            if name not in _POSITION and isinstance(value, (int, float))
        ]
        event = Event(wall_time=wall_time, step=record["step"], summary=Summary(value=values))
        written += _framed(event.SerializeToString())
    return written


def _framed(data: bytes) -> bytes:
    """One record of a TFRecord file: length, its checksum, data, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
