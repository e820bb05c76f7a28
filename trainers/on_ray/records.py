"""A run's records, from rank 0 to the driver through the key-value store (Ray)."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from functools import partial

from trainers.context import RunContext
from trainers.launch.spec import RunSpec
from trainers.on_ray.internals import kv_delete, kv_get, kv_list, kv_put
from trainers.output import Record, Take, sending
from trainers.storage import Storage

_LOOK_S = 0.25


def send(run: Storage, records: list[Record]) -> None:
    """Leave records of a run for its driver.

    For a thread: it waits for the cluster's head.
    """
    key = _prefix(run) + f"{time.time_ns():020d}".encode()
    kv_put(key, json.dumps(records, default=str).encode(), overwrite=True)


@contextlib.contextmanager
def telling(spec: RunSpec, context: RunContext) -> Iterator[None]:
    """Leave the records of a run in a block, as its spec has it.

    Every rank calls it.
    """
    context.draws_line = spec.told == "line"
    told = spec.told and context.rank == 0
    with (
        sending(partial(send, spec.storage))
        if told
        else contextlib.nullcontext() as context.take
    ):
        yield


@contextlib.contextmanager
def receiving(run: Storage, take: Take | None) -> Iterator[None]:
    """Give the records that workers send in a block to `take`."""
    if take is None:
        yield
        return
    _take(run, lambda record: None)  # of a driver that was killed
    over = threading.Event()

    def receive() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_LOOK_S)
            with contextlib.suppress(
                Exception
            ):  # the cluster is gone, or does not answer: the run itself says so
                _take(run, take)

    thread = threading.Thread(target=receive, name="records", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LOOK_S * 8)


def _take(run: Storage, take: Take) -> None:
    for key in sorted(kv_list(_prefix(run))):
        data = kv_get(key)
        kv_delete(key)
        for record in json.loads(data or b"[]"):
            take(record)


def _prefix(run: Storage) -> bytes:
    return f"paceline-records {run.uri} ".encode()
