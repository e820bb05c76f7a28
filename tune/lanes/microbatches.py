"""What the trials of a sweep have found to fit, and why another is not tried."""

import asyncio

from trainers.config.function import build_run
from trainers.errors import StorageError
from trainers.storage import Storage
from tune.lanes.messages import Submission
from tune.trials.journal import read_boundary, write_boundary
from tune.trials.microbatch_bounds import Boundary

Bounds = tuple[int | None, int | None]
"""The largest microbatch that fitted, and the smallest that did not."""


class Microbatches:
    """One for each sweep, kept in its directory.

    `device` is the model of the lane's devices, empty where that is not known yet.
    """

    def __init__(self, sweep: Storage | None) -> None:
        """`sweep` None: nothing is kept."""
        self._sweep = sweep
        self._boundary = Boundary() if sweep is None else read_boundary(sweep)
        self._writing = asyncio.Lock()

    def bounds(self, trial: Submission, device: str) -> Bounds:
        """What is known of trials like one."""
        return self._of(trial.key(device))

    def why_not(self, trial: Submission, device: str) -> str | None:
        """Why a trial cannot fit on a device; None when it may."""
        if not device:
            return None
        size = trial.smallest
        key = trial.key(device)
        if self._boundary.fits(key, size) is not False:
            return None
        failed = self._boundary.smallest_misfit(key)
        what = "microbatch" if trial.function is None else "batch"
        return f"a {what} of {size} is not tried: one of {failed} ran out of memory ({_label(trial, device)})"

    def observe(
        self, trial: Submission, device: str, size: int, fits: bool
    ) -> tuple[bool, str | None]:
        """Note whether a microbatch fits.

        Returns whether that is news, and what it contradicts, in words.
        """
        key = trial.key(device)
        is_news = self._boundary.fits(key, size) is not fits
        contradiction = self._boundary.observe(key, size, fits)
        return is_news, contradiction and f"{_label(trial, device)}: {contradiction}"

    async def keep(self) -> str | None:
        """Write what is known; returns, in words, why it could not be."""
        if self._sweep is not None:
            async with self._writing:
                try:
                    await asyncio.to_thread(write_boundary, self._sweep, self._boundary)
                except StorageError as error:
                    return f"what is known of microbatches could not be kept: {error}"
        return None

    def _of(self, key: str) -> Bounds:
        return self._boundary.largest_fit(key), self._boundary.smallest_misfit(key)


def _label(trial: Submission, device: str) -> str:
    """A key of the boundary in words."""
    config = build_run(trial.assignment.tree, "trial")
    return f"{config.precision or trial.function} on {device}"
