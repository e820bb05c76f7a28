"""SweepConfig: everything that `sweep.yaml` may say, strict, without torch and Ray."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainers.config.model import Settings
from trainers.errors import MISSING, ConfigError

BATCH_KEYS = ("global_batch_size", "batch_size_per_worker")
TO_TARGET = ("time_to_target", "usd_to_target")
SCORES = ("accuracy", "f1", "auc")
"""Ends of the names of metrics of which more is better."""


def may_change(key: str) -> bool:
    """Whether a run may go on from its checkpoint with another value of a dotted TrainConfig key: where neither the
    model, nor the data's order, nor the optimizer's state depends on it.
    """
    return key == "clip_grad_norm" or (key.startswith("optimizer.") and key != "optimizer.name")


def _require(holds: bool, field: str, value: Any, rule: str, fix: str) -> None:
    if not holds:
        raise ConfigError(field, value, rule, fix)


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
        given = self.model_dump(exclude_none=True)
        rule = "must be exactly one of uniform, loguniform, choice, or min with max"
        one = set(given) in ({"uniform"}, {"loguniform"}, {"choice"}, {"min", "max"})
        _require(one, "", given, rule, "write for example {loguniform: [1e-4, 1e-2]}")
        for name, above in (("uniform", -math.inf), ("loguniform", 0.0)):
            low, high = given.get(name, (1.0, 2.0))
            rule = "must rise" + (" from above 0" if name == "loguniform" else "")
            _require(above < low < high, name, given.get(name), rule, "write the smaller number first")
        low, high = given.get("min", 1), given.get("max", 2)
        _require(low < high, "max", high, f"must be greater than min ({low})", "raise it")
        return self


def sample_values(values: list[Any] | Range) -> list[Any]:
    """Return a list's values, or of a range its choices or its two ends."""
    if isinstance(values, list):
        return values
    return values.uniform or values.loguniform or values.choice or [values.min, values.max]


class Objective(Settings):
    """What the best trial is best at."""

    metric: str = Field(default="time_to_target", min_length=1, examples=["val_accuracy"])
    """time_to_target, usd_to_target, samples_per_s, or any metric that the task reports (val_loss, ...)."""
    mode: Literal["min", "max"] | None = Field(default=None)
    """min or max; known by itself for *_to_target, samples_per_s, *_loss and *_accuracy."""
    target: dict[str, float] | None = Field(default=None, min_length=1, max_length=1, examples=[{"val_accuracy": 0.97}])
    """The metric and the value to reach: time_to_target and usd_to_target count until then."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        needed = self.metric in TO_TARGET and self.target is None
        rule = f"is what {self.metric} counts to"
        _require(not needed, "target", MISSING, rule, "add `target: {val_accuracy: 0.97}`")
        known = self.mode is not None or _mode_of(self.metric) is not None
        rule = f"is needed for the metric {self.metric}"
        _require(known, "mode", MISSING, rule, "add `mode: min` or `mode: max`")
        rule = "must name a metric that ends in loss, error or accuracy"
        known = all(map(_mode_of, self.target or {}))
        _require(known, "target", self.target, rule, "rename the metric, so that its direction is known")
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
    if metric.endswith(("loss", "error", "perplexity")) or metric in (*TO_TARGET, "step_time_s"):
        return "min"
    return "max" if metric.endswith(SCORES) or metric == "samples_per_s" else None


class Population(Settings):
    """How `scheduler: pbt` trains its population (Jaderberg et al. 2017, arXiv 1711.09846)."""

    perturbation_interval: float = Field(default=1.0, gt=0)
    """Epochs between two looks at a trial: a checkpoint, and the worst go on with the weights of the best."""
    quantile_fraction: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the population that counts as worst, and as best."""
    resample_probability: float = Field(default=0.25, ge=0, le=1)
    """How often a value is drawn anew, in place of 0.8 or 1.2 times the old (in a list, its neighbour)."""


class Finalists(Settings):
    """Trials that are repeated alone, with other seeds, once the search has ended (objectives *_to_target)."""

    count: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        default="auto", examples=[3], json_schema_extra={"rule": "must be auto or a whole number of at least 0"}
    )
    """How many, the fastest first, where one run each cannot tell them apart; auto: 3 with search frontier, else 0."""
    repeats: int = Field(default=2, ge=1)
    """Repeats of each, in turn."""


class Budget(Settings):
    """What the sweep may spend; the first that is used up ends it, with the best so far."""

    trials: Annotated[int, Field(ge=1)] | None = Field(default=None, examples=[20])
    """Trials."""
    time_s: float | None = Field(default=None, gt=0, examples=[3600])
    """Seconds."""
    usd: float | None = Field(default=None, gt=0, examples=[50.0])
    """Dollars, at `usd_per_hour`."""


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
    search: Literal["grid", "random", "optuna", "frontier"] = Field(default="grid")
    """How trials are chosen; grid tries every combination of the lists, optuna (TPE) draws where trials went well,
    frontier measures a few batch sizes shortly and trains to the target only where the answer can still change."""
    seed: int = Field(default=0, ge=0)
    """Seed of the search."""
    scheduler: Literal["none", "asha", "pbt"] = Field(default="none")
    """What acts on trials while they run: nothing; ASHA, which stops bad ones early by their evaluations; or PBT, which
    trains all side by side and lets bad ones go on from good ones, with other values of the optimizer's keys."""
    pbt: Population = Field(default_factory=Population)
    """How `scheduler: pbt` trains its population."""
    lanes: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", examples=[2], json_schema_extra={"rule": "must be auto or a whole number of at least 1"}
    )
    """Worker groups that run trials side by side; auto: as many as the cluster holds, or may grow to by its file."""
    isolation: Literal["warm", "fresh"] = Field(default="warm")
    """warm: trial after trial in the same processes; fresh: a worker group of its own for each trial."""
    finalists: Finalists = Field(default_factory=Finalists)
    """The best trials once more, for an answer with an interval."""
    budget: Budget = Field(default_factory=Budget)
    """What the sweep may spend."""
    usd_per_hour: float | None = Field(default=None, gt=0, examples=[9.69])
    """Price of all that the sweep holds, dollars an hour; `python -m tune plan` says it of a cluster file."""

    @model_validator(mode="after")
    def _search_fits_space(self) -> Self:
        for key, values in self.space.items():
            _require(values != [], f"space.{key}", values, "has no values", "list at least one")
            listed = self.search != "grid" or isinstance(values, list)
            _require(listed, "search", "grid", f"needs a list of values for space.{key}", "set `search: random`")
        if self.search == "frontier":
            self._frontier_fits()
        elif self.search != "grid":
            rule = f"says how many trials search {self.search} makes"
            _require(self.budget.trials is not None, "budget.trials", MISSING, rule, "add `trials: 20`")
        return self

    def _frontier_fits(self) -> None:
        rule = f"looks for {' or '.join(TO_TARGET)}"
        known = self.objective.metric in TO_TARGET
        _require(known, "search", "frontier", rule, "set `objective.metric: time_to_target`")
        keys = [key for key in BATCH_KEYS if key in self.space]
        rule, fix = f"needs one of {' and '.join(BATCH_KEYS)} in the space", "`global_batch_size: {min: 16, max: 1024}`"
        _require(len(keys) == 1, "search", "frontier", rule, f"add for example {fix}")
        for key, values in self.space.items():
            listed = isinstance(values, list) or (key == keys[0] and values.min is not None)
            _require(listed, "search", "frontier", f"needs a list of values for space.{key}", "list them")
        rule = "has no effect with search frontier"
        _require(self.scheduler == "none", "scheduler", self.scheduler, rule, "remove it")

    @model_validator(mode="after")
    def _population_fits(self) -> Self:
        if self.scheduler != "pbt":
            default, rule = self.pbt == Population(), "has no effect without PBT"
            _require(default, "pbt", self.pbt.model_dump(), rule, "set `scheduler: pbt`")
            return self
        drawn = self.search in ("grid", "random")
        _require(drawn, "search", self.search, "cannot draw a population", "set `search: random`")
        metric = self.objective.metric
        reported = metric not in (*TO_TARGET, "samples_per_s", "step_time_s")
        rule = "is not known at every evaluation, which PBT needs"
        _require(reported, "objective.metric", metric, rule, "name a metric that the task reports, as `val_loss`")
        count, rule = self.finalists.count, "has no effect with scheduler pbt, whose best is a course of values"
        _require(count in ("auto", 0), "finalists.count", count, rule, "remove it")
        rule = (
            "needs a key in the space that may change in mid-run: one of the optimizer's, or clip_grad_norm (any "
            "other key is part of what a checkpoint was trained with)"
        )
        fix = "add for example `optimizer.lr: {loguniform: [1e-4, 1e-1]}`"
        _require(any(map(may_change, self.space)), "scheduler", "pbt", rule, fix)
        return self

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Self:
        needs = "budget.usd" if self.budget.usd is not None else "objective.metric usd_to_target"
        needed = self.budget.usd is not None or self.objective.metric == "usd_to_target"
        fix = "add for example `usd_per_hour: 9.69`; `python -m cluster plan` says what a cluster costs"
        _require(not needed or self.usd_per_hour is not None, "usd_per_hour", MISSING, f"is needed for {needs}", fix)
        return self

    @property
    def num_finalists(self) -> int:
        """The most trials that are repeated."""
        count = self.finalists.count
        return (3 if self.search == "frontier" else 0) if count == "auto" else count

    @property
    def time_budget_s(self) -> float | None:
        """Seconds until the budget of time or of dollars is used up, whichever is first; None without either."""
        limits = [] if self.budget.time_s is None else [self.budget.time_s]
        if self.budget.usd is not None and self.usd_per_hour is not None:
            limits.append(self.budget.usd / self.usd_per_hour * 3600)
        return min(limits, default=None)
