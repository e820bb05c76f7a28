"""Batch sizes that change within a run: those of a schedule, and between which one grows."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from trainers.config.model import Settings
from trainers.config.sections import LARGEST, Positive
from trainers.errors import MISSING, ConfigError

_UNTIMED = 32


class ScheduledSize(Settings):
    """One size of a batch schedule."""

    until_samples: Annotated[int, Field(ge=1, le=10**12)] | None = Field(default=None, examples=[64000])
    """Samples until which it holds, counted from the start of the run over all epochs and workers; every entry has it
    but the last one, whose size holds to the end."""
    size: Positive = Field(examples=[64])
    """Samples of one optimizer step over all workers."""


def check_schedule(schedule: list[ScheduledSize]) -> list[ScheduledSize]:
    """Raise ConfigError for a batch schedule that could be misread."""
    *first, last = schedule
    if last.until_samples is not None:
        fix = "remove it, or add `{size: B}` for what follows"
        rule = "is in the last entry, whose size holds to the end of the run"
        raise ConfigError(f"[{len(first)}].until_samples", last.until_samples, rule, fix)
    before = 0
    for number, one in enumerate(first):
        key, until = f"[{number}].until_samples", one.until_samples
        if until is None:
            raise ConfigError(key, MISSING, "is required in every entry but the last one", "add `until_samples: 64000`")
        if until <= before:
            rule = f"must be above the {before} of the entry before: it counts from the start of the run"
            raise ConfigError(key, until, rule, "add the samples of the entries before to it")
        before = until
    return schedule


BatchSizes = Annotated[list[ScheduledSize], Field(min_length=1, max_length=1000), AfterValidator(check_schedule)]


class AutoBatchConfig(Settings):
    """The sizes of a batch that grows by measurement."""

    start: Positive | None = Field(default=None, examples=[32])
    """The size that the run begins with; it grows from there. Not set: the first one from 8 on of which twice as many
    samples in a step train less than 1.3 times as fast, as timed before the first step (32 with `compile` or
    `cuda_graphs`)."""
    largest: Positive | None = Field(default=None, examples=[1024])
    """The size beyond which it does not grow, 32 times `start` or 1024 when not set; memory is probed for it."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        self.refuse_if(self.most < self.first, "largest", f"must be at least `start`, {self.first}", "raise it")
        return self

    @property
    def first(self) -> int:
        """The size that the run begins with, where it is not timed."""
        return self.start or min(_UNTIMED, self.largest or _UNTIMED)

    @property
    def most(self) -> int:
        """The size beyond which it does not grow."""
        return self.largest or min(LARGEST, 32 * self.first)
