"""Keeps a run: its training state and its log on storage, at once or while training goes on, and takes them back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainers.checkpoint.checkpoints import Checkpoints
from trainers.checkpoint.manifest import Best
from trainers.checkpoint.run_state import restore, training_state
from trainers.config import TrainConfig
from trainers.devices.rng import get_rng_state
from trainers.errors import CheckpointError
from trainers.loop.build import Parts
from trainers.measure.run_log import RunLog
from trainers.storage import Storage
from trainers.task import Task

logger = logging.getLogger(__name__)

_LONG_WAIT_S = 1.0


class Keeper:
    """What one worker's loop knows of its checkpoints. Every rank must call every method but `due` equally often.

    `told` is called with the place of each checkpoint once it is complete, on every rank in the same step.
    """

    def __init__(
        self,
        storage: Storage,
        parts: Parts,
        task: Task,
        config: TrainConfig,
        log: RunLog | None,
        told: Callable[[str], None],
    ) -> None:
        self.parts, self.task, self.config, self.log, self.told = parts, task, config, log, told
        keep = config.checkpoint
        self.checkpoints = Checkpoints(storage, parts.group, keep.keep, Best.of(keep), config.tree())
        self.kept_step = -1
        self._kept_at = time.monotonic()

    def due(self) -> bool:
        """Whether `every_s` has passed on this rank since the last checkpoint was begun."""
        every_s = self.config.checkpoint.every_s
        return every_s is not None and time.monotonic() - self._kept_at > every_s

    def keep(self, position: dict[str, Any], figures: Mapping[str, float], at_once: bool) -> None:
        """Begin a checkpoint at `position`; with `at_once`, and without `checkpoint.async`, also complete it.

        `figures` are those of an evaluation at this very step. Raises StorageError.
        """
        self.settle()
        step = int(position["step"])
        state = training_state(self.parts, self.task, position)
        random_state = get_rng_state(self.parts.device)
        self.kept_step, self._kept_at = step, time.monotonic()
        # The log goes before the manifest: what is resumed must have its log.
        if self.config.checkpoint.async_ and not at_once:
            write_log = self.log.part(step) if self.log is not None else None
            self.checkpoints.start(step, state, random_state, figures, write_log)
            return
        if self.log is not None:
            self.log.flush(step)
        self.told(self.checkpoints.save(step, state, random_state, figures))
        self._kept_at = time.monotonic()

    def advance(self) -> None:
        """One phase of the checkpoint that is on its way, if there is one, when no rank is `busy` with it."""
        if self.checkpoints.pending and (where := self.checkpoints.advance()) is not None:
            self.told(where)

    def settle(self) -> None:
        """Wait for the checkpoint that is on its way."""
        began = time.monotonic()
        where = self.checkpoints.finish()
        waited_s = time.monotonic() - began
        if waited_s > _LONG_WAIT_S and self.parts.group.rank == 0:
            logger.warning("training waited %.1f s for a checkpoint that was still being written", waited_s)
        if where is not None:
            self.told(where)

    def resume(self, source: Storage | None = None) -> dict[str, Any] | None:
        """Take back the newest complete checkpoint and return its position; None when there is none.

        A run without one begins with that of the run `source`, which must have one: else CheckpointError.
        """
        loaded = self.checkpoints.load()
        if loaded is None and source is not None:
            loaded = Checkpoints(source, self.parts.group, self.checkpoints.keep).load()
            if loaded is None:
                raise CheckpointError(f"there is no complete checkpoint in {source.uri} to begin with")
            return restore(self.parts, self.task, loaded, self.config)
        if loaded is None:
            return None
        position = restore(self.parts, self.task, loaded, self.config)
        self.kept_step = int(position["step"])
        if self.log is not None:
            self.log.cut(self.kept_step)
        return position
