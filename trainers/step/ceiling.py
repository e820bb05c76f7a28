"""Remember which microbatch ran out of memory in mid-training.

It is kept with the run, and read by its next start.

The probe tries the worst case that the task names, so a step may still need more:
longer sequences, another process on the device, fragmentation. The next start takes
half of what failed. Does not import torch: a sweep's actor reads it.
"""

import json
import logging
from typing import Annotated

from pydantic import Field

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.errors import CheckpointError, Status, TooLargeError, first_line
from trainers.storage import Storage

logger = logging.getLogger(__name__)

OUT_OF_MEMORY: tuple[Status, ...] = ("out_of_memory", "out_of_host_memory")
_FILE = "microbatch.json"
_Ceilings = dict[str, Annotated[int, Field(ge=1)]]


def _setting(config: TrainConfig, context: RunContext, device_name: str) -> str:
    """Return what a ceiling holds for: device, strategy, number of workers, compile."""
    words = [
        f"{context.world_size} x {device_name}",
        config.strategy,
        f"compile {config.compile}",
    ]
    if config.activation_checkpointing != "none":
        words.append(f"activation_checkpointing {config.activation_checkpointing}")
    return ", ".join(words)


def next_smaller(microbatch_size: int) -> int:
    """Return the size to try after one that did not fit."""
    return -(-microbatch_size // 2)


def read_ceiling(
    config: TrainConfig, context: RunContext, device_name: str
) -> int | None:
    """Return the largest microbatch that may still fit; None when none is known not to."""
    kept = _kept(context.storage).get(_setting(config, context, device_name))
    return min(
        (size for size in (kept, context.microbatch_ceiling) if size is not None),
        default=None,
    )


def _kept(storage: Storage | None) -> dict[str, int]:
    try:
        return (
            storage.read_json(_FILE, _Ceilings)
            if storage is not None and storage.exists(_FILE)
            else {}
        )
    except CheckpointError as error:
        logger.warning("%s: which microbatches fit is learned anew", error)
        return {}


def refuse_microbatch(
    error: BaseException,
    failed_size: int,
    config: TrainConfig,
    context: RunContext,
    device_name: str,
) -> None:
    """Report that `failed_size` did not fit, and store it.

    Raises TooLargeError where a smaller one may be chosen.

    Any rank may call it.
    """
    context.fits(failed_size, False)
    if config.microbatch_size != "auto" or failed_size == 1:
        return
    if context.storage is not None:
        known = _kept(context.storage) | {
            _setting(config, context, device_name): next_smaller(failed_size)
        }
        context.storage.write(_FILE, json.dumps(known, indent=2).encode())
    context.too_large(failed_size)
    raise TooLargeError(failed_size, first_line(error)) from None
