"""What lay in a GPU's memory when a run ran out of it."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from trainers.causes import classify
from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.devices.device import resolve_device
from trainers.errors import StorageError
from trainers.storage import Storage

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def memory_watched(config: TrainConfig, context: RunContext) -> Iterator[None]:
    """Save a memory report when the block, one attempt at the run, ends out of device memory."""
    device = resolve_device(config.device, context.device_index)
    try:
        yield
    except Exception as error:
        save_memory_report(error, device, context.storage, context.rank)
        raise


def save_memory_report(error: BaseException, device: torch.device, storage: Storage | None, rank: int) -> None:
    """Keep what lay in the GPU's memory when `error` ended the run: nothing for other errors and other devices.

    Writes `memory/rank-N-summary.txt` and, for https://pytorch.org/memory_viz, `memory/rank-N-snapshot.pickle`.
    Without storage (a trial of a sweep) the summary is a debug line. Never raises: the error itself matters more.
    """
    if device.type != "cuda" or classify(error) != "out_of_memory":
        return
    try:
        summary = torch.cuda.memory_summary(device)
        if storage is None:
            logger.debug("memory of rank %d when it ran out\n%s", rank, summary)
            return
        directory = storage.child("memory")
        names = f"rank-{rank}-summary.txt", f"rank-{rank}-snapshot.pickle"
        directory.write(names[0], summary.encode())
        with tempfile.TemporaryDirectory() as aside:
            snapshot = Path(aside, names[1])
            torch.cuda.memory._dump_snapshot(str(snapshot))
            directory.copy(snapshot, names[1])
    except (StorageError, OSError, RuntimeError) as failure:
        logger.warning("no memory report of rank %d: %s", rank, failure)
        return
    words = "rank %d ran out of memory; what lay in it: %s, and %s for https://pytorch.org/memory_viz"
    logger.warning(words, rank, *map(directory.locate, names))
