"""What a short profile has measured, as plain data."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainers.measure.step_times import student_t95

SEGMENTS = (
    "loader",
    "transform",
    "forward",
    "host reads",
    "backward",
    "communication",
    "waiting for ranks",
    "optimizer",
    "other",
)
"""What a step consists of; `loader` has the copy to the device in it."""


@dataclass(frozen=True)
class Span:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Span:
        """The mean of independent values."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return Span(mean, mean, mean)
        half = student_t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return Span(mean, mean - half, mean + half)

    def scaled(self, factor: float) -> Span:
        """This times a positive factor."""
        return Span(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class RankReadings:
    """One rank's steps."""

    rank: int
    wall_s: dict[str, float]
    """Mean of a step, by segment."""
    blocked_s: dict[str, float]
    """Of that: the thread waited, and not for a processor."""
    spread: dict[str, float]
    """Half width of the 95 % interval of each segment's mean, in seconds."""
    stolen: float
    """Share of the time that a busy thread of this rank does not get a core."""
    reads: dict[str, int] = field(default_factory=dict)
    """Host reads of the task in a step, by place."""


@dataclass(frozen=True)
class Readings:
    """A profile of all ranks."""

    ranks: list[RankReadings]
    step_s: float
    """Mean time of a step, with what it takes to watch it."""
    plain_step_s: float
    """The same without."""
    steps: int
    samples: int
    """Of one rank's share of a step."""
    microbatch_size: int
    accumulation: int
    train_samples: int
    device: str
    cores: int
    """That this machine has for all ranks."""
    fixed_share: float | None = None
    """Share of a step that does not grow with its samples; None where that was not measured."""
    recompiled_share: float = 0.0
    """Share of the whole run's time that steps have taken here which compiled again; the other figures leave them out.
    """
    hand_over_s: float = 0.0
    """Time in which a batch of a loader's process is taken over."""
    all_reduce_s: float | None = None
    """Of all gradients at once, ranks in step; None with one rank."""
    sent_share: float | None = None
    """Share of a step that is gone where gradients are not added up; None with one rank."""
    reads_gain: list[float] | None = None
    """Of an asynchronous device: share of a step that its task's host reads cost, with low and high; None without any.
    """
    host_bound: bool = False
    """Whether an asynchronous device waits for the host."""
    loader_busy: float = 0.0
    """Share of the loader's time in this process that computes (and does not wait for storage)."""
    device_peaks: dict[str, float] = field(default_factory=dict)
    """FLOP/s of the device by precision, where they are known."""

    def segment(self, name: str) -> float:
        """Mean seconds of a step that the fastest rank spends on a segment: more than that is that of one rank."""
        return min(rank.wall_s.get(name, 0.0) for rank in self.ranks)

    @property
    def sending_s(self) -> float:
        """Mean seconds of a step that adding up gradients costs."""
        return max(self.segment("communication"), (self.sent_share or 0.0) * self.step_s)

    def shares(self) -> dict[str, float]:
        """Share of a step by segment, of all ranks together: they add up to 1."""
        summed = {name: sum(rank.wall_s.get(name, 0.0) for rank in self.ranks) for name in SEGMENTS}
        total = sum(summed.values())
        return {name: value / total for name, value in summed.items() if value > 0}


@dataclass(frozen=True)
class Suspicion:
    """A cause that the readings show, and the change of the configuration that is to be tried."""

    kind: str
    words: str
    """What was measured."""
    gain: Span
    """Share of a step's time that would go; of a run's time where `of_run`."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of the configuration."""
    fix: str = ""
    """What else helps, where no key does."""
    probe: bool = False
    """Whether steps of the changed configuration say more than the readings."""
    of_run: bool = False
    in_evaluation: bool = False
    """Whether an evaluation gains as much as a step."""
    most: float = 1.0
    """What of the gain may be this cause's: a larger batch saves whatever does not grow with it."""

    @property
    def own(self) -> float:
        """The gain that is this cause's: its place among the others."""
        return min(self.gain.value, self.most)

    def scaled(self, factor: float) -> Suspicion:
        """The same as a share of a time that is longer by 1 / factor."""
        return replace(self, gain=self.gain.scaled(factor), most=self.most * factor)


@dataclass(frozen=True)
class Profile:
    """Readings, and the suspicions with what their probes gave."""

    readings: Readings
    suspicions: list[Suspicion]

    def to_json(self) -> str:
        """As it crosses between processes."""
        return json.dumps(asdict(self))
