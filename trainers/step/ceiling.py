"""Which microbatch ran out of memory in mid-training: kept with the run, and read by its next start.

The probe tries the worst case that the task names, so a step may still need more: longer sequences, another process
on the device, fragmentation. The next start takes half of what failed. Does not import torch: a sweep's actor reads it.
"""

from __future__ import annotations

import json

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.errors import Status, TooLargeError
from trainers.storage import Storage

OUT_OF_MEMORY: tuple[Status, ...] = ("out_of_memory", "out_of_host_memory")
_FILE = "microbatch.json"


def setting_of(config: TrainConfig, world_size: int, device_name: str) -> str:
    """Return what a ceiling holds for: another device, strategy or number of workers has its own."""
    return f"{world_size} x {device_name}, {config.strategy}, compile {config.compile}"


def next_smaller(microbatch_size: int) -> int:
    """Return the size to try after one that did not fit."""
    return -(-microbatch_size // 2)


def read_ceiling(storage: Storage | None, setting: str) -> int | None:
    """Return the largest microbatch that may still fit; None when none is known not to."""
    if storage is None or not storage.exists(_FILE):
        return None
    known = json.loads(storage.read(_FILE)).get(setting)
    return None if known is None else int(known)


def write_ceiling(storage: Storage | None, setting: str, failed_size: int) -> None:
    """Record that a microbatch of `failed_size` ran out of memory; any rank may call it."""
    if storage is None:
        return
    known = json.loads(storage.read(_FILE)) if storage.exists(_FILE) else {}
    known[setting] = next_smaller(failed_size)
    storage.write(_FILE, json.dumps(known, indent=2).encode())


def refuse_microbatch(
    error: BaseException, failed_size: int, config: TrainConfig, context: RunContext, device_name: str
) -> None:
    """Report that `failed_size` did not fit; store it and raise TooLargeError where a smaller one may be chosen."""
    context.fits(failed_size, False)
    if config.microbatch_size != "auto" or failed_size == 1:
        return
    write_ceiling(context.storage, setting_of(config, context.world_size, device_name), failed_size)
    context.too_large(failed_size)
    raise TooLargeError(failed_size, str(error).splitlines()[0]) from None
