"""RunContext: all that the loop knows about its launcher.

A launcher overrides the methods that it needs.
"""

from typing import Any

from trainers.errors import RunFailedError
from trainers.output import Take
from trainers.storage import Storage


class RunContext:
    """One worker of one run.

    The process group, if there is one, is complete before the loop starts.

    `launcher` is the value of the key `launcher`, "torchrun" or "lane".
    `storage` is the run's directory; None for a run that keeps nothing (a
    trial). `local_rank` and `local_world_size` count the workers on this host;
    `device_index` is the index of this worker's GPU among those that its
    process sees (default: `local_rank`). The `elapsed_s` of the methods, the
    time since the loop began, is equal on all ranks, so a launcher may use it
    to decide when to communicate.
    """

    microbatch_ceiling: int | None = None
    """The largest microbatch that may still fit, if the launcher knows of one
    that did not fit.
    """
    microbatch_bounds: tuple[int | None, int | None] = (None, None)
    """The largest microbatch known to fit and the smallest known not to fit,
    from other runs that the launcher knows of.
    """
    source: Storage | None = None
    """The run whose newest checkpoint this run starts from while it has no
    checkpoint itself; None: this run starts from scratch.
    """
    refuge: Storage | None = None
    """Where a run without storage saves its state when its node is taken away
    and, if `checkpoint` sets an interval, also at each interval and at the
    run's end. The run resumes from there if such an interval or `source` is
    set. None: the state is lost.
    """
    take: Take | None = None
    """Receives the run's records from rank 0 as they are made, and returns
    immediately; None if nobody wants the records.
    """
    draws_line: bool = False
    """Whether a live line shows the records, in place of log lines for steps."""

    watchdog: Any = None
    """The watchdog of this process, while there is one (trainers/loop/watchdog.py)."""
    watches: tuple[str, ...] = ()
    """Metrics that the launcher decides by: if they need an evaluation, a run
    without a validation split is refused.
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
        self.device_index = (
            local_rank if device_index is None else device_index
        )

    def enter(self, phase: str) -> None:
        """Note that another phase of the loop begins, if this process is watched."""
        if self.watchdog is not None:
            self.watchdog.enter(phase)

    def report(
        self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float
    ) -> None:
        """Receive the run's newest metrics, after an evaluation or a checkpoint.

        `checkpoint` is the location of a complete checkpoint, or None. Every
        rank calls this method, equally often.
        """

    def observe(self, figures: dict[str, float]) -> None:
        """Receive this worker's newest figures; must be cheap, and is not a collective."""

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether this worker was asked to stop; the loop tells the other ranks."""
        return False

    def preempted(self, elapsed_s: float) -> bool:
        """Whether a node of the run is about to be taken away.

        Every rank calls this method, equally often.
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
