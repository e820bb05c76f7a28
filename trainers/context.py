"""RunContext: all that the loop knows of who launched it."""

from __future__ import annotations

from typing import Any, Protocol

from trainers.storage import Storage


class RunContext(Protocol):
    """One worker of one run. The process group, where there is one, stands before the loop starts.

    `elapsed_s` is the loop's age, equal on all ranks: what may decide how often somebody is asked or told.
    """

    rank: int
    """Global rank."""
    world_size: int
    local_rank: int
    """Rank among the workers of this host."""
    local_world_size: int
    """Workers of this host."""
    device_index: int
    """Which of the GPUs that this process sees is its own."""
    launcher: str
    """Who started the worker, for the log: local, spawn, torchrun, ray or lane."""
    storage: Storage | None
    """The run's directory; None for a run that keeps nothing (a trial)."""
    microbatch_ceiling: int | None
    """The largest microbatch that may still fit, where the launcher knows of one that did not."""
    microbatch_bounds: tuple[int | None, int | None]
    """The largest microbatch known to fit and the smallest known not to, where the launcher knows of other runs."""
    source: Storage | None
    """The run whose newest checkpoint this one begins with, while it has none of its own; None: from the start."""
    until_epoch: float | None
    """Where the launcher ends its part of the run, with an evaluation and a checkpoint; None: at the last step."""

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Tell the launcher of an evaluation or a checkpoint. Every rank calls it, equally often."""

    def observe(self, figures: dict[str, float]) -> None:
        """This worker's newest figures, for whoever watches; cheap, and each rank for itself."""

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether this worker was asked to stop; the loop agrees with the other ranks by itself."""

    def preempted(self, elapsed_s: float) -> bool:
        """Whether a node of the run is about to be taken away. Every rank calls it, equally often."""

    def fits(self, microbatch_size: int, fits: bool) -> None:
        """What this rank has found out about a microbatch: by a probe, which all ranks agree on, or by a step."""

    def too_large(self, microbatch_size: int) -> None:
        """This rank ran out of memory in mid-training; the group will start again with a smaller microbatch."""

    def hung(self, words: str) -> None:
        """This rank makes no step any more; its process ends after this call."""
