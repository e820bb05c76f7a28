"""RunContext: all that the loop knows of who launched it."""

from __future__ import annotations

from typing import Any, Protocol

from trainers.storage import Storage


class RunContext(Protocol):
    """One worker of one run. The process group, where there is one, stands before the loop starts."""

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

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Tell the launcher of an evaluation or a checkpoint. Every rank calls it, equally often.

        `elapsed_s` is the loop's age, equal on all ranks: what may decide how often somebody is told.
        """

    def should_stop(self) -> bool:
        """Whether this worker was asked to stop; the loop agrees with the other ranks by itself."""
