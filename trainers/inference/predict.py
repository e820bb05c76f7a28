"""What a model says of every sample, as one Parquet file in the order of the data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from trainers.data.feed import Feed
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.model.precision import PrecisionSpec
from trainers.step.forward import ForwardPass
from trainers.storage import Storage
from trainers.task import Task

INDEX = "index"
_WINDOW = 16  # batches of a rank between two meetings of all ranks
_ROW_GROUP_BYTES = 32 * 2**20


def predict(
    model: nn.Module,
    task: Task,
    feed: Feed,
    microbatch_size: int,
    spec: PrecisionSpec,
    group: Group,
    target: Storage,
    about: dict[str, str],
) -> None:
    """Write `task.predictions` of every sample to the file `target`; `about` becomes the file's metadata.

    Batches are dealt whole, in windows, and rank 0 writes each window as it comes: the file is the same, byte for byte,
    for any number of ranks. Every rank must call it. Raises ConfigError for what is no column, StorageError.
    """
    length = len(feed.dataset)  # type: ignore[arg-type]
    batches = list(torch.arange(length).split(microbatch_size))
    window = _WINDOW * group.world_size
    windows = [batches[start : start + window] for start in range(0, len(batches), window)]
    mine = [part[group.rank * _WINDOW : (group.rank + 1) * _WINDOW] for part in windows]
    source = feed.batches([rows for part in mine for rows in part], training=False)
    forward = ForwardPass(model.eval(), task, spec, group.device)
    with _writer(target, about) if group.rank == 0 else contextlib.nullcontext() as writer:
        for part in mine:
            made = []
            for rows in part:
                batch = next(source)
                with torch.no_grad():
                    outputs, _ = forward(batch, with_loss=False)
                made.append(_record(rows, task.predictions(outputs, batch), task))
            for records in group.collect(made):
                for record in records:
                    assert writer is not None
                    writer.add(record)


def _record(rows: Tensor, columns: dict[str, Any], task: Task) -> pa.RecordBatch:
    arrays = {INDEX: pa.array(rows.numpy())}
    for name, value in columns.items():
        if not isinstance(value, Tensor) or value.shape[:1] != rows.shape or name == INDEX or value.is_complex():
            raise ConfigError(
                f"prediction {name}",
                list(value.shape) if isinstance(value, Tensor) else type(value).__name__,
                f"must be a real tensor of one row a sample, here [{len(rows)}, ...], under another name than {INDEX}",
                f"choose what to write in {type(task).__name__}.predictions()",
            )
        values = value.detach()
        if values.dtype in (torch.bfloat16, torch.float16):  # the first is unknown to Arrow, the second to many readers
            values = values.float()
        array = pa.array(values.cpu().contiguous().view(-1).numpy())
        for size in reversed(values.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        arrays[name] = array
    return pa.RecordBatch.from_pydict(arrays)


class _Writer:
    """Row groups of a size that depends on nothing but the batches."""

    def __init__(self, stream: BinaryIO, about: dict[str, str]) -> None:
        self._stream, self._about = stream, about
        self._open: list[pa.RecordBatch] = []
        self._file: pq.ParquetWriter | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows."""
        if self._file is None:
            self._file = pq.ParquetWriter(self._stream, batch.schema.with_metadata(self._about))
        elif batch.schema != self._file.schema.remove_metadata():
            shown, first = (", ".join(f"{one.name} {one.type}" for one in s) for s in (batch.schema, self._file.schema))
            rule = f"must be in every batch as in the first, {first}"
            raise ConfigError("predictions", shown, rule, "pad them to one shape in `predictions()`")
        self._open.append(batch)
        if sum(one.nbytes for one in self._open) >= _ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is open as a row group."""
        if self._file is not None and self._open:
            rows = pa.Table.from_batches(self._open)
            self._file.write_table(rows.replace_schema_metadata(self._about), row_group_size=len(rows))
            self._open.clear()

    def close(self) -> None:
        """Write the footer."""
        if self._file is not None:
            self._file.close()


@contextlib.contextmanager
def _writer(target: Storage, about: dict[str, str]) -> Iterator[_Writer]:
    with target.parent.writer(target.name) as stream:
        writer = _Writer(stream, about)
        try:
            yield writer
            writer.flush()
        except BaseException:
            with contextlib.suppress(OSError):  # Arrow's object must be closed while the stream is open
                writer.close()
            raise
        writer.close()
