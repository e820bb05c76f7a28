"""What the best trial of a sweep is best at, and in which direction."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from trainers.config.metrics import Mode, check_direction, check_metric, direction_of
from trainers.config.model import Settings

TO_TARGET = ("time_to_target", "usd_to_target")
MEASURED = (*TO_TARGET, "samples_per_s", "step_time_s", "peak_memory_bytes", "energy_j")
"""Measured of every trial, whatever its task reports."""


@dataclass(frozen=True)
class Target:
    """A value that a metric has to reach."""

    metric: str
    value: float
    mode: Mode

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation's metrics meet it."""
        value = metrics.get(self.metric)
        if value is None:
            return False
        return value <= self.value if self.mode == "min" else value >= self.value


class Objective(Settings):
    """What the best trial is best at."""

    metric: str = Field(
        default="time_to_target", min_length=1, examples=["val_accuracy"]
    )
    """time_to_target, usd_to_target, samples_per_s, peak_memory_bytes, energy_j (of the
    trial's GPUs), or any metric that the task reports (val_loss, ...).
    """
    mode: Mode | None = Field(default=None)
    """min or max; known by itself for *_to_target, samples_per_s and what is measured
    besides, and as `early_stopping.mode` is.
    """
    target: dict[str, float | Mode] | None = Field(
        default=None, examples=[{"val_accuracy": 0.97}]
    )
    """The metric and value that time_to_target and usd_to_target count to.

    There a trial ends, or when it has trained 2.5 times as long as another took. A name
    without a known direction needs it: `{val_topk: 0.9, mode: max}`.
    """

    @model_validator(mode="after")
    def _known(self) -> Self:
        fix = "add `target: {val_accuracy: 0.97}`"
        needed = self.metric in TO_TARGET and self.target is None
        self.refuse_if(needed, "target", f"is what {self.metric} counts to", fix)
        check_direction("mode", self.metric, self.mode)
        if self.metric in MEASURED and self.mode is not None:
            self._check_known_mode(self.mode)
        if self.target is not None:
            self._check_target(*self._target_parts())
        return self

    def _check_target(self, values: dict[str, float], modes: dict[str, Mode]) -> None:
        """Raise ConfigError where the target is not one metric and its value."""
        fix = "write `target: {val_accuracy: 0.97}`"
        malformed = len(values) != 1 or bool(modes.keys() - {"mode"})
        self.refuse_if(malformed, "target", "is not one metric and its value", fix)
        [name] = values
        mode = self._mode_of(name)
        given = modes.get("mode", mode)
        check_direction("target.mode", name, given)
        contrary = name == self.metric and given != mode
        rule = f"contradicts the mode of objective.metric, which is the same metric and has {mode}"
        fix = "leave out its mode, or set `objective.mode`"
        self.refuse_if(contrary, "target", rule, fix)

    def _check_known_mode(self, mode: Mode) -> None:
        """Raise ConfigError where the mode of what is measured is turned round."""
        rule = f"is not what is better of {self.metric}, which is known"
        fix = "remove it"
        if self.metric in TO_TARGET:
            fix = f"write `mode: {mode}` into the target if it is its own"
        self.refuse_if(mode != direction_of(self.metric), "mode", rule, fix)

    def _target_parts(self) -> tuple[dict[str, float], dict[str, Mode]]:
        """Split the target into its numbers and its words."""
        numbers: dict[str, float] = {}
        words: dict[str, Mode] = {}
        for name, value in (self.target or {}).items():
            if isinstance(value, float):
                numbers[name] = value
            else:
                words[name] = value
        return numbers, words

    def _mode_of(self, name: str) -> Mode | None:
        """Whether less or more of a metric is better, where `mode` or its name says it."""
        own = self.mode if name == self.metric else None
        return own or direction_of(name)

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
        return (self.metric, *self._target_parts()[0])

    @property
    def goal(self) -> Target | None:
        """The target, with its direction."""
        values, modes = self._target_parts()
        for name, value in values.items():
            mode = modes.get("mode") or self._mode_of(name)
            assert mode is not None
            return Target(name, value, mode)
        return None

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation's metrics meet the target."""
        return self.goal is not None and self.goal.is_met(metrics)


def check_reported(watches: Sequence[str], reported: Iterable[str]) -> None:
    """Raise ConfigError where a trial has not reported a metric of the objective."""
    names = {*reported, *MEASURED}
    for key, name in zip(
        ("objective.metric", "objective.target"), watches, strict=False
    ):
        check_metric(key, name, names)
