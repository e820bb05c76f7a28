"""SweepConfig: all keys of `sweep.yaml`, checked strictly, without torch and Ray."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainers.config import TrainConfig
from trainers.config.model import Settings
from trainers.config.sections import (
    Count,
    Mode,
    Place,
    Positive,
    RunName,
    Seconds,
    check_direction,
    check_metric,
    direction_of,
)
from trainers.config.train import by_name
from trainers.errors import ConfigError

TO_TARGET = ("time_to_target", "usd_to_target")
MEASURED = (*TO_TARGET, "samples_per_s", "step_time_s", "peak_memory_bytes")
"""Metrics measured for every trial, whatever its task reports."""
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
"""What other libraries call a key, by Paceline's name for it."""


@dataclass(frozen=True)
class Target:
    """A value that a metric has to reach."""

    metric: str
    value: float
    mode: Mode

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Return whether metrics meet the target; an infinite value or NaN never does."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return False
        if self.mode == "min":
            return value <= self.value
        return value >= self.value


class Objective(Settings):
    """The metric that decides which trial is best, and its target."""

    metric: str = Field(
        default="time_to_target", min_length=1, examples=["val_accuracy"]
    )
    """time_to_target, usd_to_target, samples_per_s, peak_memory_bytes, or any
    metric that the task reports (val_loss, ...).
    """
    mode: Mode | None = None
    """min or max; not needed for *_to_target, samples_per_s and other measured
    metrics, nor for metrics of known direction (see `early_stopping.mode`).
    """
    target: dict[str, float | Mode] | None = Field(
        default=None, examples=[{"val_accuracy": 0.97}]
    )
    """The metric, and the value that it must reach for time_to_target and
    usd_to_target.

    A trial ends when it reaches the value, or once it has trained 2.5 times as
    long as another trial needed. A metric without a known direction needs
    `mode` too: `{val_topk: 0.9, mode: max}`.
    """

    @model_validator(mode="after")
    def _known(self) -> Self:
        fix = "add `target: {val_accuracy: 0.97}`"
        needed = self.metric in TO_TARGET and self.target is None
        self.refuse_if(
            needed,
            "target",
            f"is required for {self.metric}",
            fix,
        )
        check_direction("mode", self.metric, self.mode)
        known = direction_of(self.metric)
        is_turned = self.metric in MEASURED and self.mode not in (None, known)
        rule = f"contradicts the known direction of {self.metric}"
        fix = "remove it, or write it inside `target` if it is for the target's metric"
        self.refuse_if(is_turned, "mode", rule, fix)
        if self.target is not None:
            self._check_target(*self._target_parts())
        return self

    def _check_target(
        self, values: dict[str, float], modes: dict[str, Mode]
    ) -> None:
        """Raise ConfigError unless the target is one metric and its value."""
        fix = "write `target: {val_accuracy: 0.97}`"
        malformed = len(values) != 1 or bool(modes.keys() - {"mode"})
        self.refuse_if(
            malformed, "target", "must name one metric and its value", fix
        )
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
        """Return min or max for a metric, from `mode` or its name; None if unknown."""
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
        """The metrics that decide: the objective's metric and the target's."""
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
        """Return whether an evaluation's metrics meet the target."""
        return self.goal is not None and self.goal.is_met(metrics)


def check_reported(watches: Sequence[str], reported: Iterable[str]) -> None:
    """Raise ConfigError if a trial has not reported a metric of the objective."""
    names = {*reported, *MEASURED}
    keys = ("objective.metric", "objective.target")
    for key, name in zip(keys, watches, strict=False):
        check_metric(key, name, names)


def _rising(ends: list[float]) -> list[float]:
    """Return the two numbers; raise ConfigError unless the second is larger."""
    low, high = ends
    if not 0 < high - low < math.inf:
        raise ConfigError(
            "",
            ends,
            "must rise from the first number to the second",
            "write two different numbers, the smaller one first",
        )
    return ends


_TWO_ENDS = (Field(min_length=2, max_length=2), AfterValidator(_rising))


class Range(Settings):
    """The values of a key as a range: exactly one of these keys, or min with max."""

    exclusive = (("uniform", "loguniform", "choice", "around", "min"),)
    one_is_required = True
    needs: ClassVar[Mapping[str, str]] = {"min": "max", "max": "min"}

    uniform: Annotated[list[float], *_TWO_ENDS] | None = Field(
        default=None, examples=[[0.0, 0.5]]
    )
    """Any number between the two in the list, drawn evenly."""
    loguniform: (
        Annotated[list[Annotated[float, Field(gt=0)]], *_TWO_ENDS] | None
    ) = Field(default=None, examples=[[1e-4, 1e-2]])
    """Any number between the two in the list, drawn evenly in the logarithm."""
    choice: list[Any] | None = Field(default=None, min_length=1)
    """One element of a list, drawn at random."""
    min: Positive | None = Field(default=None, examples=[16])
    """Whole numbers from this one on, drawn evenly in the logarithm: for batch sizes."""
    max: Positive | None = Field(default=None, examples=[256])
    """Whole numbers up to and including this one."""
    around: Annotated[float, Field(gt=0)] | Literal["run"] | None = Field(
        default=None,
        examples=[0.001],
        json_schema_extra={"rule": "must be a number above 0"},
    )
    """The number from which a search starts. For each combination of the other
    keys, the search tries this number, its half and its double, and goes
    further until the best value has a worse value on either side. The plain
    word `around` starts from the run's own value.
    """

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        return {"around": "run"} if given == "around" else given

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.min is not None and self.max is not None:
            _rising([self.min, self.max])
        return self

    @property
    def start(self) -> float:
        """The number from which an `around` search starts."""
        assert isinstance(self.around, float)
        return self.around


def sample_values(values: list[Any] | Range) -> list[Any]:
    """Return a list's values; of a range, its choices, ends or first `around` values."""
    if isinstance(values, list):
        return values
    if values.around:
        return [values.start, 2 * values.start, values.start / 2]
    listed = values.uniform or values.loguniform or values.choice
    return listed or [values.min, values.max]


class Budget(Settings):
    """Limits of a sweep. When one is reached, the sweep ends and names its best trial."""

    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = Field(
        default=None, examples=[20]
    )
    """Number of trials in the search."""
    time_s: Seconds | None = Field(default=None, examples=[3600])
    """Seconds of wall time per start."""
    usd: float | None = Field(default=None, gt=0, le=1e12, examples=[50.0])
    """Dollars per start, priced by `usd_per_hour`."""


def _below_train(keys: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Prefix a run's keys with `train.`, as in a sweep; return words unchanged."""
    if isinstance(keys, str):
        return keys
    return tuple(f"train.{key}" for key in keys)


class SweepConfig(Settings):
    """One sweep."""

    call: ClassVar[str] = "python -m tune"
    holds: ClassVar[Mapping[str, type[Settings]]] = {"train": TrainConfig}
    foreign: ClassVar[Mapping[str, tuple[str, ...] | str]] = {
        name: _below_train(meant)
        for name, meant in TrainConfig.foreign.items()
    } | by_name(_NAMES)

    name: RunName = Field(default="sweep", examples=["digits-sweep"])
    """Name of the sweep: its directory below `storage_path`."""
    storage_path: Place = Field(default=None, examples=["s3://bucket/sweeps"])
    """Where sweeps are kept: a directory or any pyarrow.fs URI (default
    $PACELINE_STORAGE, else ./results).
    """
    train: str | dict[str, Any] = Field(
        examples=["train.yaml"],
        json_schema_extra={"rule": "must be the name of a file, or a mapping"},
    )
    """The training run to vary: a file in the same directory, or a mapping."""
    space: dict[str, Annotated[list[Any], Field(min_length=1)] | Range] = (
        Field(
            min_length=1,
            examples=[{"global_batch_size": [32, 64, 128]}],
            json_schema_extra={
                "rule": "must be a list of values, around, or a range such as {loguniform: [1e-4, 1e-2]}"
            },
        )
    )
    """Dotted keys of the run and their values: a list,
    {uniform|loguniform|choice: ...} or {min, max}.

    `optimizer.lr: around` searches the best rate for each batch size. It tries
    the rate that `lr_scaling` gives, its half and its double, and goes further
    until the best rate is neither the smallest nor the largest.
    """
    objective: Objective = Field(
        default_factory=lambda: Objective(metric="val_loss")
    )
    """The metric that decides which trial is best, and its target."""
    search: Literal["grid", "random", "optuna"] = "grid"
    """How trials are chosen: grid tries every combination of the lists, random
    draws values, and optuna (TPE) draws near the values of good trials.

    Draws depend on the run's `seed` (0 with a `train_func`).
    """
    scheduler: Literal["none", "asha"] = "none"
    """none, or asha, which stops bad trials early, judged by their evaluations."""
    lanes: Literal["auto"] | Positive = Field(
        default="auto",
        examples=[2],
        json_schema_extra={
            "rule": "must be auto or a whole number of at least 1"
        },
    )
    """Number of worker groups that run trials in parallel; auto: as many as
    fit on the cluster once it has fully grown.
    """
    isolation: Literal["warm", "fresh"] = "warm"
    """warm: each trial is a fork of a process that has imported torch and the
    task; fresh: each trial is a new interpreter.
    """
    finalists: Literal["auto"] | Count = Field(
        default="auto",
        examples=[3],
        json_schema_extra={
            "rule": "must be auto or a whole number of at least 0"
        },
    )
    """With *_to_target: how many trials, too close to rank by one run each, are
    repeated with other seeds; auto: up to 8.

    Repeats take at most half of the search's time, or 15 s if that is more.
    They end once one trial is clearly fastest, or with the budget.
    """
    budget: Budget = Field(default_factory=Budget)
    """Limits of the sweep."""
    usd_per_hour: float | None = Field(
        default=None, gt=0, le=1e12, examples=[9.69]
    )
    """Price of everything that the sweep occupies, in dollars an hour; `python
    -m tune plan` says what a cluster costs.
    """

    @model_validator(mode="after")
    def _fits_function(self) -> Self:
        if isinstance(self.train, dict) and "train_func" in self.train:
            self.check_function()
        return self

    def check_function(self) -> None:
        """Raise ConfigError for a key that needs a task, not a training function."""
        rule = "repeats trials with other seeds, and a train_func gets no seed"
        repeats = self.finalists not in ("auto", 0)
        self.refuse_if(repeats, "finalists", rule, "remove it")

    @model_validator(mode="after")
    def _search_fits_space(self) -> Self:
        for key, values in self.space.items():
            self._check_values(key, values)
        if self.around is not None:
            self._check_around(self.around)
        rule = f"is required with `search: {self.search}`"
        unlimited = self.search != "grid" and self.budget.trials is None
        self.refuse_if(unlimited, "budget.trials", rule, "add `trials: 20`")
        lists = [
            values
            for values in self.space.values()
            if isinstance(values, list)
        ]
        lengths = map(len, lists)
        trials = math.prod(lengths) if self.search == "grid" else sum(lengths)
        rule = f"lists {trials} values, more than {MOST_TRIALS}"
        fix = "list fewer values"
        if self.search == "grid":
            rule = f"makes {trials} trials, more than {MOST_TRIALS}"
            fix = "list fewer values, or set `search: random`"
        self.refuse_if(trials > MOST_TRIALS, "space", rule, fix)
        return self

    def _check_values(self, key: str, values: list[Any] | Range) -> None:
        """Raise ConfigError if the search cannot take a key's values."""
        is_grid = self.search == "grid"
        if isinstance(values, list):
            return
        wanted = "grid" if values.around else "random"
        rule = f"needs a list of values for space.{key}"
        if values.around:
            rule = f"cannot take `around`, which space.{key} has"
        is_wrong = is_grid is not bool(values.around)
        self.refuse_if(is_wrong, "search", rule, f"set `search: {wanted}`")

    def _check_around(self, key: str) -> None:
        """Raise ConfigError if the best value of a key cannot be searched for."""
        several = len(self._all_around) > 1
        rule = f"has `around` for {' and '.join(self._all_around)}, and only one key may have it"
        self.refuse_if(
            several, "space", rule, "list the values of all but one"
        )
        rule = f"would search `around` {key} again for each seed"
        fix = f"remove `seed`, or list the values of `{key}`"
        self.refuse_if("seed" in self.space, "space", rule, fix)
        metric = self.objective.metric
        is_cost = metric in MEASURED and metric not in TO_TARGET
        rule = (
            f"cannot tell which {key} is best, because it measures no learning"
        )
        fix = "name a metric of learning, such as val_loss"
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
        return [
            key
            for key, values in self.space.items()
            if isinstance(values, Range) and values.around
        ]

    @property
    def around(self) -> str | None:
        """The key with `around`: its best value is searched for, given the other keys."""
        return next(iter(self._all_around), None)

    @property
    def learns(self) -> bool:
        """Whether the search chooses by the results of earlier trials."""
        return self.search == "optuna"

    @property
    def redraws(self) -> bool:
        """Whether each start draws the same trials again, from the seed alone."""
        return self.search != "grid" and not self.learns

    @property
    def ends_beaten(self) -> bool:
        """Whether a trial ends once another is certain to beat it."""
        is_race = self.objective.metric in TO_TARGET
        return (
            is_race and self.scheduler == "none" and "seed" not in self.space
        )

    @property
    def time_budget_s(self) -> float | None:
        """Seconds until the budget of time or dollars is used up; None: unlimited."""
        time_s = self.budget.time_s
        if self.budget.usd is None or self.usd_per_hour is None:
            return time_s
        paid_s = min(1e9, self.budget.usd / self.usd_per_hour * 3600)
        return paid_s if time_s is None else min(paid_s, time_s)
