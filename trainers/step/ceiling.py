"""Remember which microbatch ran out of memory during training.

The run's next start uses half of the size that failed.

The probe tries the task's worst-case batch, yet a step may need more memory,
because of longer sequences, another process on the device, or fragmentation.
This module does not import torch: a sweep's actor imports it.
"""

import json
import logging
from typing import Annotated

from pydantic import Field

from trainers.causes import classify
from trainers.context import RunContext
from trainers.errors import CheckpointError, Status, TooLargeError, first_line

logger = logging.getLogger(__name__)

OUT_OF_MEMORY: tuple[Status, ...] = ("out_of_memory", "out_of_host_memory")
_FILE = "microbatch.json"
_Ceilings = dict[str, Annotated[int, Field(ge=1)]]


def next_smaller(microbatch_size: int) -> int:
    """Return the size to try after one that did not fit."""
    return -(-microbatch_size // 2)


class Ceiling:
    """The largest microbatch that may still fit in one setting of a run."""

    def __init__(
        self, context: RunContext, setting: str, may_shrink: bool
    ) -> None:
        """`setting` names the devices and settings that the ceiling is valid for."""
        self._context = context
        self._setting = setting
        self._may_shrink = may_shrink

    def read(self) -> int | None:
        """Return the ceiling, or None if no size has been found too large."""
        kept = self._kept().get(self._setting)
        known = (kept, self._context.microbatch_ceiling)
        return min((size for size in known if size is not None), default=None)

    def refuse(self, error: BaseException, failed_size: int) -> None:
        """Record that `failed_size` ran out of memory, and raise TooLargeError.

        Raises nothing if `error` is not about memory, or if no smaller
        microbatch may be chosen. Any rank may call it.
        """
        if classify(error) not in OUT_OF_MEMORY:
            return
        context = self._context
        context.fits(failed_size, False)
        if not self._may_shrink or failed_size == 1:
            return
        if context.storage is not None:
            known = self._kept() | {self._setting: next_smaller(failed_size)}
            context.storage.write(_FILE, json.dumps(known, indent=2).encode())
        context.too_large(failed_size)
        raise TooLargeError(failed_size, first_line(error)) from None

    def _kept(self) -> dict[str, int]:
        storage = self._context.storage
        try:
            if storage is not None and storage.exists(_FILE):
                return storage.read_json(_FILE, _Ceilings)
        except CheckpointError as error:
            logger.warning("%s: the microbatch is searched for again", error)
        return {}
