"""Write a model's prediction for every sample as one Parquet file, in the order of the data."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from trainers.causes import classify
from trainers.data.feed import Feed
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.model.precision import PrecisionSpec
from trainers.step.ceiling import OUT_OF_MEMORY, next_smaller
from trainers.step.evaluation import too_large
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

    def records() -> Iterator[pa.RecordBatch]:
        for part in mine:
            made = []
            for rows in part:
                batch = next(source)
                try:
                    with torch.no_grad():
                        outputs, _ = forward(batch, with_loss=False)
                except (RuntimeError, MemoryError) as error:
                    if classify(error) in OUT_OF_MEMORY:
                        raise too_large(error, len(rows), group, next_smaller(len(rows))) from error
                    raise
                made.append(_record(rows, task.predictions(outputs, batch), task))
            for received in group.collect(made):
                yield from received

    if group.rank == 0:
        _write(records(), target, about)
    else:
        collections.deque(records(), maxlen=0)


def _record(rows: Tensor, columns: dict[str, Any], task: Task) -> pa.RecordBatch:
    arrays = {INDEX: pa.array(rows.numpy())}
    for name, value in columns.items():
        if not isinstance(value, Tensor) or value.shape[:1] != rows.shape or name == INDEX or value.is_complex():
            given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            wanted = f"a real tensor of one row a sample, here [{len(rows)}, ...]"
            fix = f"choose what to write in {type(task).__name__}.predictions()"
            raise ConfigError(f"prediction {name}", given, f"must be {wanted}, under another name than {INDEX}", fix)
        values = value.detach()
        if values.dtype in (torch.bfloat16, torch.float16):  # the first is unknown to Arrow, the second to many readers
            values = values.float()
        array = pa.array(values.cpu().contiguous().view(-1).numpy())
        for size in reversed(values.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        arrays[name] = array
    return pa.RecordBatch.from_pydict(arrays)


def _write(records: Iterator[pa.RecordBatch], target: Storage, about: dict[str, str]) -> None:
    """Write all records, in row groups whose size depends on nothing but the batches."""
    first = next(records)
    schema = first.schema.with_metadata(about)
    waiting: list[pa.RecordBatch] = []

    with target.parent.writer(target.name) as stream, pq.ParquetWriter(stream, schema) as file:

        def flush() -> None:
            rows = pa.Table.from_batches(waiting).replace_schema_metadata(about)
            file.write_table(rows, row_group_size=len(rows))
            waiting.clear()

        for record in itertools.chain([first], records):
            if record.schema != first.schema:
                shown, known = (", ".join(f"{one.name} {one.type}" for one in s) for s in (record.schema, first.schema))
                rule = f"must be in every batch as in the first, {known}"
                raise ConfigError("predictions", shown, rule, "pad them to one shape in `predictions()`")
            waiting.append(record)
            if sum(one.nbytes for one in waiting) >= _ROW_GROUP_BYTES:
                flush()
        if waiting:
            flush()
