"""SweepConfig: everything that `sweep.yaml` may say, strict, without torch and Ray."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainers.config import TrainConfig
from trainers.config.model import Settings
from trainers.config.sections import (
    NAME,
    NAME_RULE,
    PATH,
    PATH_RULE,
    Count,
    Mode,
    Positive,
    Seconds,
    check_direction,
    check_metric,
    direction_of,
)
from trainers.config.train import by_name
from trainers.errors import ConfigError

TO_TARGET = ("time_to_target", "usd_to_target")
MEASURED = (*TO_TARGET, "samples_per_s", "step_time_s", "peak_memory_bytes")
"""Measured of every trial, whatever its task reports."""
MOST_TRIALS = 10_000
_NAMES = {
    "budget.trials": "n_trials num_trials num_samples max_trials run_cap",
    "budget.time_s": "timeout time_budget time_budget_s",
    "lanes": "max_concurrent max_concurrent_trials n_jobs parallelism",
    "space": "parameters params param_space search_space config distributions",
    "search": "search_alg algorithm sampler searcher method",
    "scheduler": "pruner early_terminate early_stopping",
    "objective.mode": "direction goal",
    "train.tracking": "tracking",
}
"""What other libraries call a key, by what it is called here."""


@dataclass(frozen=True)
class Target:
    """A value that a metric has to reach."""

    metric: str
    value: float
    mode: Mode

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation's metrics meet it; an infinite value does not."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return False
        if self.mode == "min":
            return value <= self.value
        return value >= self.value


class Objective(Settings):
    """What the best trial is best at."""

    metric: str = Field(
        default="time_to_target", min_length=1, examples=["val_accuracy"]
    )
    """time_to_target, usd_to_target, samples_per_s, peak_memory_bytes, or any metric
    that the task reports (val_loss, ...).
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
        known = direction_of(self.metric)
        is_turned = self.metric in MEASURED and self.mode not in (None, known)
        rule = f"is not what is better of {self.metric}, which is known"
        fix = "remove it, or write it into the target if it is its own"
        self.refuse_if(is_turned, "mode", rule, fix)
        if self.target is not None:
            self._check_target(*self._target_parts())
        return self

    def _check_target(self, values: dict[str, float], modes: dict[str, Mode]) -> None:
        """Raise ConfigError where the target is not one metric and its value."""
        fix = "write `target: {val_accuracy: 0.97}`"
        malformed = len(values) != 1 or bool(modes.keys() - {"mode"})
        self.refuse_if(malformed, "target", "is not one metric and its value", fix)
        [name] = values
        mode = modes.get("mode") or self.mode_of(name)
        check_direction("target.mode", name, mode)

    def _target_parts(self) -> tuple[dict[str, float], dict[str, Mode]]:
        """Split the target into its numbers and its words."""
        numbers = {}
        words = {}
        for name, value in (self.target or {}).items():
            if isinstance(value, float):
                numbers[name] = value
            else:
                words[name] = value
        return numbers, words

    def mode_of(self, name: str) -> Mode | None:
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
            mode = modes.get("mode") or self.mode_of(name)
            assert mode is not None
            return Target(name, value, mode)
        return None

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation's metrics meet the target."""
        return self.goal is not None and self.goal.is_met(metrics)


def check_reported(watches: Sequence[str], reported: Iterable[str]) -> None:
    """Raise ConfigError where a trial has not reported a metric of the objective."""
    names = {*reported, *MEASURED}
    keys = ("objective.metric", "objective.target")
    for key, name in zip(keys, watches, strict=False):
        check_metric(key, name, names)


class Range(Settings):
    """An interval to draw from; exactly one key."""

    uniform: list[float] | None = Field(
        default=None, min_length=2, max_length=2, examples=[[0.0, 0.5]]
    )
    """Any number between two, evenly."""
    loguniform: list[float] | None = Field(
        default=None, min_length=2, max_length=2, examples=[[1e-4, 1e-2]]
    )
    """Any number between two, evenly in the logarithm."""
    choice: list[Any] | None = Field(default=None, min_length=1)
    """One of a list, at random."""
    min: Positive | None = Field(default=None)
    """Whole numbers from here, evenly in the logarithm: for batch sizes."""
    max: Positive | None = Field(default=None)
    """Whole numbers up to here, included."""
    around: Annotated[float, Field(gt=0)] | Literal["run"] | None = Field(
        default=None,
        examples=[0.001],
        json_schema_extra={"rule": "must be a number above 0"},
    )
    """A number, its neighbours by 2, and further ones until the best has a worse one on
    either side, for each combination of the other values; the word `around` alone
    begins with the run's own number.
    """

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        return {"around": "run"} if given == "around" else given

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = self.model_dump(exclude_none=True)
        is_pair = given.keys() == {"min", "max"}
        is_alone = len(given) == 1 and not given.keys() & {"min", "max"}
        if not is_alone and not is_pair:
            rule = "must be exactly one of uniform, loguniform, choice, around, or min with max"
            fix = "write for example {loguniform: [1e-4, 1e-2]}"
            raise ConfigError("", given, rule, fix)
        fix = "write the smaller number first"
        low, high = self.uniform or (1.0, 2.0)
        self.refuse_if(not 0 < high - low < math.inf, "uniform", "must rise", fix)
        low, high = self.loguniform or (1.0, 2.0)
        self.refuse_if(not 0 < low < high, "loguniform", "must rise from above 0", fix)
        falls = (self.min or 1) >= (self.max or 2)
        rule = f"must be greater than min ({self.min})"
        self.refuse_if(falls, "max", rule, "raise it")
        return self

    @property
    def start(self) -> float:
        """The number that `around` begins with."""
        assert isinstance(self.around, float)
        return self.around


def sample_values(values: list[Any] | Range) -> list[Any]:
    """Return a list's values, or a range's choices, two ends or first rates."""
    if isinstance(values, list):
        return values
    if values.around:
        return [values.start, 2 * values.start, values.start / 2]
    listed = values.uniform or values.loguniform or values.choice
    return listed or [values.min, values.max]


class Budget(Settings):
    """Limits of the sweep; the first that is reached ends it, with the best so far."""

    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = Field(
        default=None, examples=[20]
    )
    """Trials."""
    time_s: Seconds | None = Field(default=None, examples=[3600])
    """Seconds."""
    usd: float | None = Field(default=None, gt=0, le=1e12, examples=[50.0])
    """Dollars, at `usd_per_hour`."""


def _below_train(keys: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Return where a sweep has keys of a run; words stay."""
    if isinstance(keys, str):
        return keys
    return tuple(f"train.{key}" for key in keys)


class SweepConfig(Settings):
    """One sweep."""

    call: ClassVar[str] = "python -m tune"
    holds: ClassVar[Mapping[str, type[Settings]]] = {"train": TrainConfig}
    foreign: ClassVar[Mapping[str, tuple[str, ...] | str]] = {
        name: _below_train(meant) for name, meant in TrainConfig.foreign.items()
    } | by_name(_NAMES)

    name: str = Field(
        default="sweep",
        pattern=NAME,
        examples=["digits-sweep"],
        json_schema_extra={"rule": NAME_RULE},
    )
    """Name of the sweep: its directory below `storage_path`."""
    storage_path: str | None = Field(
        default=None,
        pattern=PATH,
        examples=["s3://bucket/sweeps"],
        json_schema_extra={"rule": PATH_RULE},
    )
    """Where sweeps are kept: a directory or any pyarrow.fs URI (default
    $PACELINE_STORAGE, else ./results).
    """
    train: str | dict[str, Any] = Field(
        examples=["train.yaml"],
        json_schema_extra={"rule": "must be the name of a file, or a mapping"},
    )
    """The training run to vary: a file beside this one, or a mapping."""
    space: dict[str, Annotated[list[Any], Field(min_length=1)] | Range] = Field(
        min_length=1,
        examples=[{"global_batch_size": [32, 64, 128]}],
        json_schema_extra={
            "rule": "must be a list of values, around, or a range such as {loguniform: [1e-4, 1e-2]}"
        },
    )
    """Dotted keys of the run and their values: a list, {uniform|loguniform|choice: ...}
    or {min, max}; `optimizer.lr: around` for each batch size the rate of `lr_scaling`
    and its neighbours by 2, until the best is inside.
    """
    objective: Objective = Field(default_factory=lambda: Objective(metric="val_loss"))
    """What the best trial is best at."""
    search: Literal["grid", "random", "optuna"] = Field(default="grid")
    """How trials are chosen; grid tries every combination of the lists, optuna (TPE)
    draws where trials went well.

    What is drawn follows from the run's `seed` (0 with a `train_func`).
    """
    scheduler: Literal["none", "asha"] = Field(default="none")
    """Nothing, or ASHA, which stops bad trials early by their evaluations."""
    lanes: Literal["auto"] | Positive = Field(
        default="auto",
        examples=[2],
        json_schema_extra={"rule": "must be auto or a whole number of at least 1"},
    )
    """Worker groups that run trials side by side; auto: as many as the cluster holds,
    or may grow to by its file.
    """
    isolation: Literal["warm", "fresh"] = Field(default="warm")
    """warm: each trial is a fork of a process that has imported torch and the task;
    fresh: a new interpreter.
    """
    finalists: Literal["auto"] | Count = Field(
        default="auto",
        examples=[3],
        json_schema_extra={"rule": "must be auto or a whole number of at least 0"},
    )
    """With *_to_target: how many trials that one run cannot tell apart are repeated
    with other seeds; auto: up to 8.

    Repeats take at most half of the search's time, or 15 s, and end once one is clearly
    first, or with the budget.
    """
    budget: Budget = Field(default_factory=Budget)
    """Limits of the sweep."""
    usd_per_hour: float | None = Field(default=None, gt=0, le=1e12, examples=[9.69])
    """Price of all that the sweep holds, dollars an hour; `python -m tune plan` knows a
    cluster file's.
    """

    @model_validator(mode="after")
    def _fits_function(self) -> Self:
        if isinstance(self.train, dict) and "train_func" in self.train:
            self.check_function()
        return self

    def check_function(self) -> None:
        """Raise ConfigError for a key that needs a task, not a training function."""
        rule = "repeats trials with other seeds, which a train_func is not given"
        repeats = self.finalists not in ("auto", 0)
        self.refuse_if(repeats, "finalists", rule, "remove it")

    @model_validator(mode="after")
    def _search_fits_space(self) -> Self:
        for key, values in self.space.items():
            self._check_values(key, values)
        if self.around is not None:
            self._check_around(self.around)
        rule = f"says how many trials search {self.search} makes"
        unlimited = self.search != "grid" and self.budget.trials is None
        self.refuse_if(unlimited, "budget.trials", rule, "add `trials: 20`")
        lists = [values for values in self.space.values() if isinstance(values, list)]
        lengths = map(len, lists)
        trials = math.prod(lengths) if self.search == "grid" else sum(lengths)
        rule = f"makes {trials} trials, more than {MOST_TRIALS}"
        fix = "list fewer values, or set `search: random`"
        self.refuse_if(trials > MOST_TRIALS, "space", rule, fix)
        return self

    def _check_values(self, key: str, values: list[Any] | Range) -> None:
        """Raise ConfigError where the search cannot take a key's values."""
        is_grid = self.search == "grid"
        if isinstance(values, list):
            return
        wanted = "grid" if values.around else "random"
        rule = f"needs a list of values for space.{key}"
        if values.around:
            rule = f"draws, and space.{key} is around"
        is_wrong = is_grid is not bool(values.around)
        self.refuse_if(is_wrong, "search", rule, f"set `search: {wanted}`")

    def _check_around(self, key: str) -> None:
        """Raise ConfigError where the best value of a key cannot be searched for."""
        several = len(self._all_around) > 1
        rule = f"is around in {' and '.join(self._all_around)}"
        self.refuse_if(several, "space", rule, "list the values of all but one")
        rule = f"would search {key} around anew for each seed"
        fix = "remove it, or list the values of both"
        self.refuse_if("seed" in self.space, "space", rule, fix)
        metric = self.objective.metric
        is_cost = metric in MEASURED and metric not in TO_TARGET
        rule = f"does not tell which {key} is best"
        fix = "name a metric of learning"
        self.refuse_if(is_cost, "objective.metric", rule, fix)

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Self:
        metric = self.objective.metric
        is_limited = self.budget.usd is not None
        is_needed = is_limited or metric == "usd_to_target"
        has_none = is_needed and self.usd_per_hour is None
        rule = f"is needed for {'budget.usd' if is_limited else metric}"
        fix = "add for example `usd_per_hour: 9.69`; `python -m tune plan` says what a cluster costs"
        self.refuse_if(has_none, "usd_per_hour", rule, fix)
        return self

    @property
    def _all_around(self) -> list[str]:
        found = []
        for key, values in self.space.items():
            if isinstance(values, Range) and values.around:
                found.append(key)
        return found

    @property
    def around(self) -> str | None:
        """The key whose best value is searched for each combination of the others."""
        return next(iter(self._all_around), None)

    @property
    def learns(self) -> bool:
        """Whether the search chooses by how trials have ended, and goes on from them."""
        return self.search == "optuna"

    @property
    def redraws(self) -> bool:
        """Whether each start draws the same trials again, from the seed alone."""
        return self.search != "grid" and not self.learns

    @property
    def ends_beaten(self) -> bool:
        """Whether a trial ends once another is certain to beat it."""
        is_race = self.objective.metric in TO_TARGET
        return is_race and self.scheduler == "none" and "seed" not in self.space

    @property
    def time_budget_s(self) -> float | None:
        """Seconds until the first budget, of time or of dollars, is used up; or None."""
        time_s = self.budget.time_s
        if self.budget.usd is None or self.usd_per_hour is None:
            return time_s
        paid_s = min(1e9, self.budget.usd / self.usd_per_hour * 3600)
        return paid_s if time_s is None else min(paid_s, time_s)
