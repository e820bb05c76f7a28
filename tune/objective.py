"""Objective: what the best trial of a sweep is best at, and the metrics whose direction is known."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from trainers.config.model import Settings
from trainers.config.sections import Mode, check_direction, direction_of

TO_TARGET = ("time_to_target", "usd_to_target")


class Objective(Settings):
    """What the best trial is best at."""

    metric: str = Field(default="time_to_target", min_length=1, examples=["val_accuracy"])
    """time_to_target, usd_to_target, samples_per_s, peak_memory_bytes, energy_j (of the trial's GPUs), or any
    metric that the task reports (val_loss, ...)."""
    mode: Mode | None = Field(default=None)
    """min or max; known by itself for *_to_target, samples_per_s and what is measured besides, and as
    `early_stopping.mode` is."""
    target: dict[str, float] | None = Field(default=None, min_length=1, max_length=1, examples=[{"val_accuracy": 0.97}])
    """The metric and the value to reach: time_to_target and usd_to_target count until then. With these two a trial
    ends at the evaluation that meets it, or once it has trained 2.5 times as long as another took."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        fix = "add `target: {val_accuracy: 0.97}`"
        needed = self.metric in TO_TARGET and self.target is None
        self.refuse_if(needed, "target", f"is what {self.metric} counts to", fix)
        check_direction("mode", self.metric, self.mode)
        unknown_target = not all(direction_of(name) for name in self.target or {})
        rule = "must name a metric whose name says whether less or more is better, as val_loss or val_accuracy"
        self.refuse_if(unknown_target, "target", rule, "rename the metric")
        return self

    @property
    def ends_at_target(self) -> bool:
        """Whether a trial ends at the evaluation that meets the target."""
        return self.metric in TO_TARGET

    @property
    def direction(self) -> Mode:
        """Whether less or more of `metric` is better."""
        mode = self.mode or direction_of(self.metric)
        assert mode is not None
        return mode

    @property
    def watched(self) -> tuple[str, ...]:
        """The metrics that decide: its own and the target's."""
        return (self.metric, *(self.target or {}))

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation's metrics meet the target."""
        return meets(self.target or {}, metrics)


def meets(target: Mapping[str, float], metrics: Mapping[str, float]) -> bool:
    """Return whether an evaluation's metrics meet a target; an empty one is never met."""
    for name, value in target.items():
        if name in metrics:
            return metrics[name] <= value if direction_of(name) == "min" else metrics[name] >= value
    return False
