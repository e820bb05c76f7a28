"""When a trial has shown all that the search wants of it, and stops before its end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tune.config import Objective

Purpose = Literal["trial", "probe", "repeat"]
"""trial: a whole one; probe: a short one that only measures; repeat: a finalist once more, alone, with another seed."""

PROBE_SHARE = 0.08
"""Of a whole trial: the length of a probe whose throughput does not settle before."""
PROBE_STEPS = 10
"""The fewest steps of a probe."""


@dataclass(frozen=True)
class Until:
    """What ends a trial besides its last step."""

    target: tuple[str, float] | None = None
    """A metric and the value to reach."""
    probe: bool = False
    """Only the throughput is asked for: a small share of the run, or less once it is settled."""

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation ends it."""
        if self.target is None:
            return False
        return Objective(metric="time_to_target", target=dict([self.target])).reached(dict(metrics))

    def measured(self, figures: Mapping[str, float]) -> bool:
        """Whether a measurement ends it: `steps` after warm-up, `settled`, and `progress` as a share of the run."""
        if not self.probe:
            return False
        long = figures["progress"] >= PROBE_SHARE and figures["steps"] >= PROBE_STEPS
        return bool(figures["settled"]) or long
