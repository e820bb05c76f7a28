"""SweepConfig: everything that `sweep.yaml` may say, strict, without torch and Ray."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainers.errors import MISSING, ConfigError
from trainers.settings import Settings


class Range(Settings):
    """An interval to draw from; exactly one key."""

    uniform: list[float] | None = Field(default=None, min_length=2, max_length=2, examples=[[0.0, 0.5]])
    """Any number between two, evenly."""
    loguniform: list[float] | None = Field(default=None, min_length=2, max_length=2, examples=[[1e-4, 1e-2]])
    """Any number between two, evenly in the logarithm."""
    choice: list[Any] | None = Field(default=None, min_length=1)
    """One of a list, at random."""
    min: int | None = Field(default=None, ge=1)
    """Whole numbers from here, evenly in the logarithm: for batch sizes."""
    max: int | None = Field(default=None, ge=1)
    """Whole numbers up to here, included."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        chosen = [name for name in ("uniform", "loguniform", "choice") if getattr(self, name) is not None]
        bounds = self.min is not None and self.max is not None
        if len(chosen) + (self.min is not None or self.max is not None) != 1 or (not chosen and not bounds):
            raise ConfigError(
                "",
                self.model_dump(exclude_none=True),
                "must be exactly one of uniform, loguniform, choice, or min with max",
                "write for example {loguniform: [1e-4, 1e-2]}",
            )
        for name in ("uniform", "loguniform"):
            pair = getattr(self, name)
            if pair and not (pair[0] < pair[1] and (name == "uniform" or pair[0] > 0)):
                raise ConfigError(
                    name,
                    pair,
                    "must rise" + (" from above 0" if name == "loguniform" else ""),
                    "write the smaller number first",
                )
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ConfigError("max", self.max, f"must be greater than min ({self.min})", "raise it")
        return self


class Objective(Settings):
    """What the best trial is best at."""

    metric: str = Field(default="time_to_target", min_length=1, examples=["val_accuracy"])
    """time_to_target, samples_per_s, or any metric that the task reports (val_loss, val_accuracy, ...)."""
    mode: Literal["min", "max"] | None = Field(default=None)
    """min or max; known by itself for time_to_target, samples_per_s, *_loss and *_accuracy."""
    target: dict[str, float] | None = Field(default=None, min_length=1, max_length=1, examples=[{"val_accuracy": 0.97}])
    """The metric and the value to reach: time_to_target counts until then."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.metric == "time_to_target" and self.target is None:
            raise ConfigError(
                "target", MISSING, "is what time_to_target counts to", "add `target: {val_accuracy: 0.97}`"
            )
        if self.mode is None and _mode_of(self.metric) is None:
            raise ConfigError(
                "mode", MISSING, f"is needed for the metric {self.metric}", "add `mode: min` or `mode: max`"
            )
        name = next(iter(self.target)) if self.target else "loss"
        if _mode_of(name) is None:
            raise ConfigError(
                "target",
                self.target,
                "must name a metric that ends in loss, error or accuracy",
                "rename the metric, so that its direction is known",
            )
        return self

    @property
    def direction(self) -> Literal["min", "max"]:
        """Whether less or more of `metric` is better."""
        mode = self.mode or _mode_of(self.metric)
        assert mode is not None
        return mode

    def reached(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation's metrics meet the target."""
        if not self.target:
            return False
        ((name, value),) = self.target.items()
        if name not in metrics:
            return False
        return metrics[name] <= value if _mode_of(name) == "min" else metrics[name] >= value


def _mode_of(metric: str) -> Literal["min", "max"] | None:
    if metric.endswith(("loss", "error", "perplexity")) or metric in ("time_to_target", "step_time_s"):
        return "min"
    if metric.endswith(("accuracy", "f1", "auc")) or metric == "samples_per_s":
        return "max"
    return None


class Budget(Settings):
    """What the sweep may spend; the first that is used up ends it, with the best so far."""

    trials: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[20])
    """Trials."""
    time_s: float | None = Field(default=None, gt=0, examples=[3600])
    """Seconds."""


class SweepConfig(Settings):
    """One sweep."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()

    name: str = Field(
        default="sweep",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        examples=["digits-sweep"],
        json_schema_extra={"rule": "must be letters, digits, `.`, `_` and `-`"},
    )
    """Name of the sweep: its directory below `storage_path`."""
    storage_path: str | None = Field(default=None, min_length=1, examples=["s3://bucket/sweeps"])
    """Where sweeps are kept: a directory or any pyarrow.fs URI (default $PACELINE_STORAGE, else ./results)."""
    train: str | dict[str, Any] = Field(
        examples=["train.yaml"], json_schema_extra={"rule": "must be the name of a file, or a mapping"}
    )
    """The training run to vary: a file beside this one, or a mapping."""
    space: dict[str, list[Any] | Range] = Field(
        min_length=1,
        examples=[{"global_batch_size": [32, 64, 128]}],
        json_schema_extra={"rule": "must be a list of values, or a range such as {loguniform: [1e-4, 1e-2]}"},
    )
    """Dotted TrainConfig keys and their values: a list, {uniform|loguniform|choice: ...} or {min, max}."""
    objective: Objective = Field(default_factory=lambda: Objective(metric="val_loss"))
    """What the best trial is best at."""
    search: Literal["grid", "random"] = Field(default="grid")
    """How trials are chosen; grid tries every combination of the lists."""
    seed: int = Field(default=0, ge=0)
    """Seed of the search."""
    scheduler: Literal["none", "asha"] = Field(default="none")
    """Who stops trials early: nobody, or ASHA by the objective's evaluations."""
    lanes: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", examples=[2], json_schema_extra={"rule": "must be auto or a whole number of at least 1"}
    )
    """Worker groups that run trials side by side; auto: as many as the cluster holds."""
    isolation: Literal["warm", "fresh"] = Field(default="warm")
    """warm: trial after trial in the same processes; fresh: a worker group of its own for each trial."""
    budget: Budget = Field(default_factory=Budget)
    """What the sweep may spend."""

    @model_validator(mode="after")
    def _search_fits_space(self) -> Self:
        for key, values in self.space.items():
            if isinstance(values, list) and not values:
                raise ConfigError(f"space.{key}", values, "has no values", "list at least one")
            if self.search == "grid" and isinstance(values, Range):
                raise ConfigError("search", "grid", f"needs a list of values for space.{key}", "set `search: random`")
        if self.search == "random" and self.budget.trials is None:
            raise ConfigError("budget.trials", MISSING, "says how many random trials there are", "add `trials: 20`")
        return self
