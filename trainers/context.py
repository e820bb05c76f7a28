"""RunContext: all that the loop knows of its launcher.

Launchers override the methods for what they want to say or hear.
"""

from typing import Any

from trainers.errors import RunFailedError
from trainers.output import Take
from trainers.storage import Storage


class RunContext:
    """One worker of one run.

    The process group, if there is one, is complete before the loop starts.

    `launcher` is for the log: local, spawn, torchrun, ray or lane. `storage` is the
    run's directory; None for a run that keeps nothing (a trial). `local_rank` and
    `local_world_size` are those on this host; `device_index` is the index of this
    worker's GPU among those that its process sees (default: `local_rank`). `elapsed_s`
    is the age of the loop, equal on all ranks, so that it may decide how often a
    launcher is asked or told.
    """

    microbatch_ceiling: int | None = None
    """The largest microbatch that may still fit, if the launcher knows of one that did
    not.
    """
    microbatch_bounds: tuple[int | None, int | None] = (None, None)
    """The largest microbatch known to fit and the smallest known not to, if the
    launcher knows of other runs.
    """
    source: Storage | None = None
    """The run whose newest checkpoint this one starts from as long as it has none of
    its own; None: it starts from scratch.
    """
    refuge: Storage | None = None
    """Where a run without storage keeps its state when its node is taken away and, if
    its `checkpoint` says when, also then and at its end. If `source` is the same place,
    the run starts from there. None: the state is lost.
    """
    take: Take | None = None
    """Receives the run's records from rank 0 as they are made, and returns at once;
    None if nobody wants them.
    """
    draws_line: bool = False
    """Whether a live line shows them instead of the log's lines of steps."""

    watchdog: Any = None
    """The watchdog of this process, while there is one (trainers/loop/watchdog.py)."""
    watches: tuple[str, ...] = ()
    """Metrics by which the launcher decides: if they need an evaluation, a run without
    a validation split is refused.
    """

    def __init__(
        self,
        storage: Storage | None,
        launcher: str,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        local_world_size: int = 1,
        device_index: int | None = None,
    ) -> None:
        self.storage = storage
        self.launcher = launcher
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.device_index = local_rank if device_index is None else device_index

    def enter(self, phase: str) -> None:
        """Note that another phase of the loop begins, if this process is watched."""
        if self.watchdog is not None:
            self.watchdog.enter(phase)

    def report(
        self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float
    ) -> None:
        """Receive an evaluation or a checkpoint.

        Every rank calls it, equally often.
        """

    def observe(self, figures: dict[str, float]) -> None:
        """Receive this worker's newest figures; must be cheap, and is no collective."""

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether this worker was asked to stop; the loop agrees with other ranks."""
        return False

    def preempted(self, elapsed_s: float) -> bool:
        """Whether a node of the run is about to be taken away.

        Every rank calls it, equally often.
        """
        return False

    def fits(self, microbatch_size: int, fits: bool) -> None:
        """Receive whether a microbatch size fits, as seen in a probe or a step."""

    def too_large(self, microbatch_size: int) -> None:
        """Learn that this rank ran out of memory during training.

        A group of several ranks is restarted with a smaller microbatch.
        """

    @property
    def is_heard(self) -> bool:
        """Whether another process prints the failures of this one, hangs included."""
        return False

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """Learn that this rank hangs; its process ends after this call."""
