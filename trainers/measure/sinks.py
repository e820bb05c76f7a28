"""TensorBoard events of a run, in parts like its log: one file for each flush, so that object stores need no append.

tensorboardX gives the message types and the checksum; its own writer has a thread and a queue that `flush` does not
wait for. TensorBoard reads the files of a directory in the order of their names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

_POSITION = ("step", "epoch", "train_time_s")


def events_name(step: int) -> str:
    """The file of the part that ends at `step`; TensorBoard knows an event file by `tfevents`."""
    return f"events.out.tfevents.{step:012d}"


def encode_events(records: Iterable[tuple[float, dict[str, Any]]]) -> bytes:
    """Records with their time (Unix, seconds) as events: every number but the position is a scalar at `step`."""
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
