"""The rule by which a trial stops before its last step: when it has shown all that the search needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tune.config import Objective

Purpose = Literal["trial", "probe", "repeat"]
"""trial: a whole one; probe: a short one that only measures; repeat: a finalist again, alone, with another seed."""

PROBE_SHARE = 0.08
"""Longest probe, as a share of a whole trial: one whose throughput does not settle before."""
PROBE_STEPS = 10
"""The fewest steps of a probe."""


@dataclass(frozen=True)
class Until:
    """What ends a trial besides its last step."""

    target: tuple[str, float] | None = None
    """A metric and the value to reach."""
    probe: bool = False
    """It measures throughput only: a small share of the run, or less once it is settled."""

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
