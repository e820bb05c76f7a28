"""Which microbatch ran out of memory in mid-training: kept with the run, and read by its next start.

The probe tries the worst case that the task names, so a step may still need more: longer sequences, another process
on the device, fragmentation. The next start takes half of what failed.
"""

from __future__ import annotations

import json

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.errors import TooLargeError, first_line
from trainers.storage import Storage

_FILE = "microbatch.json"


def setting_of(config: TrainConfig, world_size: int, device_name: str) -> str:
    """What a ceiling was met under; under another device, strategy or number of workers it says nothing."""
    return f"{world_size} x {device_name}, {config.strategy}, compile {config.compile}"


def next_smaller(microbatch_size: int) -> int:
    """The size after one that did not fit."""
    return -(-microbatch_size // 2)


def read_ceiling(storage: Storage | None, setting: str) -> int | None:
    """The largest microbatch that may still fit; None when none is known not to."""
    if storage is None or not storage.exists(_FILE):
        return None
    known = json.loads(storage.read(_FILE)).get(setting)
    return None if known is None else int(known)


def write_ceiling(storage: Storage | None, setting: str, failed_size: int) -> None:
    """A microbatch of `failed_size` ran out of memory; any rank may call it."""
    if storage is None:
        return
    known = json.loads(storage.read(_FILE)) if storage.exists(_FILE) else {}
    known[setting] = next_smaller(failed_size)
    storage.write(_FILE, json.dumps(known, indent=2).encode())


def refuse_microbatch(
    error: BaseException, failed_size: int, config: TrainConfig, context: RunContext, device_name: str
) -> None:
    """Say that `failed_size` did not fit; keep it, and raise TooLargeError, where a smaller one may be chosen."""
    context.fits(failed_size, False)
    if config.microbatch_size != "auto" or failed_size == 1:
        return
    write_ceiling(context.storage, setting_of(config, context.world_size, device_name), failed_size)
    context.too_large(failed_size)
    raise TooLargeError(failed_size, first_line(error)) from None
