"""SweepConfig: everything that `sweep.yaml` may say, strict, without torch and Ray."""

import datetime as dt
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainers.config import TrainConfig
from trainers.config.foreign import by_name
from trainers.config.function import BATCH_KEYS as BATCH_KEYS
from trainers.config.model import Settings
from trainers.config.sections import NAME, NAME_RULE, PATH, PATH_RULE, Count, Positive, Seconds
from trainers.config.tracking import Tracking
from trainers.errors import MISSING, ConfigError
from tune.objective import SPENT, TO_TARGET, Objective

MOST_TRIALS = 10_000
MOST_FINALISTS = 8


def may_change(key: str) -> bool:
    """Whether a run may go on from its checkpoint with another value of a dotted TrainConfig key: where neither the
    model, nor the data's order, nor the optimizer's state depends on it.
    """
    return key == "clip_grad_norm" or (key.startswith("optimizer.") and key != "optimizer.name")


class Range(Settings):
    """An interval to draw from; exactly one key."""

    uniform: list[float] | None = Field(default=None, min_length=2, max_length=2, examples=[[0.0, 0.5]])
    """Any number between two, evenly."""
    loguniform: list[float] | None = Field(default=None, min_length=2, max_length=2, examples=[[1e-4, 1e-2]])
    """Any number between two, evenly in the logarithm."""
    choice: list[Any] | None = Field(default=None, min_length=1)
    """One of a list, at random."""
    min: Positive | None = Field(default=None)
    """Whole numbers from here, evenly in the logarithm: for batch sizes."""
    max: Positive | None = Field(default=None)
    """Whole numbers up to here, included."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = self.model_dump(exclude_none=True)
        if set(given) not in ({"uniform"}, {"loguniform"}, {"choice"}, {"min", "max"}):
            rule = "must be exactly one of uniform, loguniform, choice, or min with max"
            raise ConfigError("", given, rule, "write for example {loguniform: [1e-4, 1e-2]}")
        fix = "write the smaller number first"
        low, high = self.uniform or (1.0, 2.0)
        self.refuse_if(not 0 < high - low < math.inf, "uniform", "must rise", fix)
        low, high = self.loguniform or (1.0, 2.0)
        self.refuse_if(not 0 < low < high, "loguniform", "must rise from above 0", fix)
        self.refuse_if((self.min or 1) >= (self.max or 2), "max", f"must be greater than min ({self.min})", "raise it")
        return self


def sample_values(values: list[Any] | Range) -> list[Any]:
    """Return a list's values, or of a range its choices or its two ends."""
    if isinstance(values, list):
        return values
    return values.uniform or values.loguniform or values.choice or [values.min, values.max]


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

    count: Literal["auto"] | Count = Field(
        default="auto", examples=[3], json_schema_extra={"rule": "must be auto or a whole number of at least 0"}
    )
    """The most, the fastest first, of those that one run each cannot tell apart; auto: up to 8 that `share` has time
    for, with search frontier at least 3."""
    repeats: Literal["auto"] | Positive = Field(
        default="auto", examples=[4], json_schema_extra={"rule": "must be auto or a whole number of at least 1"}
    )
    """The most repeats of each, in turn; they end as soon as it is clear who is first, or clear that it will not be.
    auto: 16."""
    share: float = Field(default=0.5, ge=0, le=100)
    """Time that repeats may take, as a share of the time that the search took; 15 s they may take in any case, and two
    repeats each of as many as `count` names."""


class Budget(Settings):
    """What the sweep may spend; the first that is used up ends it, with the best so far."""

    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = Field(default=None, examples=[20])
    """Trials."""
    time_s: Seconds | None = Field(default=None, examples=[3600])
    """Seconds."""
    usd: float | None = Field(default=None, gt=0, le=1e12, examples=[50.0])
    """Dollars, at `usd_per_hour`."""


_NAMES = {
    "budget.trials": "n_trials num_trials num_samples max_trials run_cap",
    "budget.time_s": "timeout time_budget time_budget_s",
    "lanes": "max_concurrent max_concurrent_trials n_jobs parallelism",
    "space": "parameters params param_space search_space config distributions",
    "search": "search_alg algorithm sampler searcher method",
    "scheduler": "pruner early_terminate early_stopping",
    "objective.mode": "direction goal",
}


class SweepConfig(Settings):
    """One sweep."""

    call: ClassVar[str] = "python -m tune"
    holds: ClassVar[Mapping[str, type[Settings]]] = {"train": TrainConfig}
    foreign: ClassVar[Mapping[str, tuple[str, ...] | str]] = {
        name: meant if isinstance(meant, str) else tuple(f"train.{key}" for key in meant)
        for name, meant in TrainConfig.foreign.items()
    } | by_name(_NAMES)

    name: str = Field(
        default="sweep",
        pattern=NAME,
        examples=["digits-sweep"],
        json_schema_extra={"rule": NAME_RULE},
    )
    """Name of the sweep: its directory below `storage_path`."""
    storage_path: str | None = Field(
        default=None, pattern=PATH, examples=["s3://bucket/sweeps"], json_schema_extra={"rule": PATH_RULE}
    )
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
    """Dotted keys of the run and their values: a list, {uniform|loguniform|choice: ...} or {min, max}."""
    objective: Objective = Field(default_factory=lambda: Objective(metric="val_loss"))
    """What the best trial is best at."""
    search: Literal["grid", "random", "optuna", "frontier"] = Field(default="grid")
    """How trials are chosen; grid tries every combination of the lists, optuna (TPE) draws where trials went well,
    frontier measures a few batch sizes shortly and trains to the target only where the answer can still change."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of the search."""
    scheduler: Literal["none", "asha", "pbt"] = Field(default="none")
    """What acts on trials while they run: nothing; ASHA, which stops bad ones early by their evaluations; or PBT, which
    trains all side by side and lets bad ones go on from good ones, with other values of the optimizer's keys."""
    pbt: Population = Field(default_factory=Population)
    """How `scheduler: pbt` trains its population."""
    lanes: Literal["auto"] | Positive = Field(
        default="auto", examples=[2], json_schema_extra={"rule": "must be auto or a whole number of at least 1"}
    )
    """Worker groups that run trials side by side; auto: as many as the cluster holds, or may grow to by its file."""
    keep_lanes_s: float = Field(default=300.0, ge=0, le=86400)
    """How long, in seconds, the lanes stay up for the next sweep on a cluster that outlives this one; they end as soon
    as anybody else waits for what they hold. 0: they end with the sweep."""
    isolation: Literal["warm", "fresh"] = Field(default="warm")
    """warm: trial after trial in the same processes; fresh: a worker group of its own for each trial."""
    compare: bool = Field(default=True)
    """Whether a `train_func` that ended well in a fresh process runs once more on a warm lane, for 20 s or until it has
    reported: where that gives anything else, and another fresh process does not, each trial has one of its own."""
    finalists: Finalists = Field(default_factory=Finalists)
    """The best trials once more, for an answer with an interval."""
    explain: bool = Field(default=True)
    """Whether a lane profiles steps of the best trial at the end, for the report: where the trials of a task have
    trained for 20 s or more in all, and for a twentieth of that, 3 s at most."""
    budget: Budget = Field(default_factory=Budget)
    """What the sweep may spend."""
    knowledge: bool = Field(default=False)
    """Whether what earlier sweeps of the task found (`knowledge/` below `storage_path`) is where this one begins, and
    whether it leaves there what it finds itself."""
    deadline: str | None = Field(default=None, examples=["2026-12-01T18:00+01:00"])
    """When the sweep ends at the latest, with the best so far; without a zone, of the machine that runs the sweep."""
    tracking: Tracking | None = Field(default=None, examples=[["mlflow"]])
    """Experiment trackers that get the sweep as a run with its trials below it, as `tracking` of a run has them
    (default: those of `train`)."""
    usd_per_hour: float | None = Field(default=None, gt=0, le=1e12, examples=[9.69])
    """Price of all that the sweep holds, dollars an hour; `python -m tune plan` says it of a cluster file."""

    @model_validator(mode="after")
    def _fits_function(self) -> Self:
        if isinstance(self.train, dict) and "train_func" in self.train:
            self.check_function()
        return self

    def check_function(self) -> None:
        """Raise ConfigError for what the sweep of a training function cannot have."""
        loop, frontier, pbt = "Paceline's own loop", self.search == "frontier", self.scheduler == "pbt"
        rule = f"needs the throughput and the gradient noise scale that {loop} measures: a train_func has neither"
        self.refuse_if(frontier, "search", rule, "set `search: grid`, `random` or `optuna`")
        rule = f"goes on from checkpoints of {loop}, and a train_func has its own"
        self.refuse_if(pbt, "scheduler", rule, "set `scheduler: asha`")
        rule = "repeats trials with other seeds, which a train_func is not given"
        self.refuse_if(self.finalists.count not in ("auto", 0), "finalists.count", rule, "remove it")

    @model_validator(mode="after")
    def _search_fits_space(self) -> Self:
        is_frontier, batch_key = self.search == "frontier", next((key for key in BATCH_KEYS if key in self.space), None)
        if is_frontier:
            rule, fix = f"looks for {' or '.join(TO_TARGET)}", "set `objective.metric: time_to_target`"
            self.refuse_if(self.objective.to_target is None, "search", rule, fix)
            others = sorted({*self.objective.decisive} - {*SPENT, "peak_memory_bytes"})
            rule = f"foresees {', '.join(SPENT)} and peak_memory_bytes, not {others[:1]}"
            self.refuse_if(bool(others), "search", rule, "set `search: optuna` or `grid`")
            rule = f"needs one of {' and '.join(BATCH_KEYS)} in the space"
            fix = "add for example `global_batch_size: {min: 16, max: 1024}`"
            self.refuse_if(sum(key in self.space for key in BATCH_KEYS) != 1, "search", rule, fix)
            self.refuse_if(self.scheduler != "none", "scheduler", "has no effect with search frontier", "remove it")
            if "auto" in (values if isinstance(values := self.space.get(batch_key or ""), list) else ()):
                rule = "is no size that search frontier could compare with others"
                raise ConfigError(f"space.{batch_key}", "auto", rule, "list sizes, or set `search: grid`")
        elif self.search != "grid":
            rule = f"says how many trials search {self.search} makes"
            self.refuse_if(self.budget.trials is None, "budget.trials", rule, "add `trials: 20`")
        lists = [len(values) for values in self.space.values() if isinstance(values, list)]
        trials = math.prod(lists) if self.search == "grid" else sum(lists)
        if trials > MOST_TRIALS:
            rule, fix = f"makes {trials} trials, more than {MOST_TRIALS}", "list fewer values, or set `search: random`"
            raise ConfigError("space", MISSING, rule, fix)
        for key, values in self.space.items():
            if values == []:
                raise ConfigError(f"space.{key}", values, "has no values", "list at least one")
            may_draw = is_frontier and key == batch_key and isinstance(values, Range) and values.min is not None
            needs_list = (is_frontier or self.search == "grid") and not isinstance(values, list) and not may_draw
            fix = "list them" if is_frontier else "set `search: random`"
            self.refuse_if(needs_list, "search", f"needs a list of values for space.{key}", fix)
        return self

    @model_validator(mode="after")
    def _population_fits(self) -> Self:
        if self.scheduler != "pbt":
            self.refuse_if(self.pbt != Population(), "pbt", "has no effect without PBT", "set `scheduler: pbt`")
            return self
        rule, fix = "cannot draw a population", "set `search: random`"
        self.refuse_if(self.search not in ("grid", "random"), "search", rule, fix)
        rule = "has no effect with scheduler pbt, which trains a population on from stage to stage"
        self.refuse_if(self.objective.train_to == "target", "objective.train_to", rule, "remove it")
        is_computed = self.objective.metric in (*TO_TARGET, "samples_per_s", "step_time_s")
        rule = "is not known at every evaluation, which PBT needs"
        self.refuse_if(is_computed, "objective.metric", rule, "name a metric that the task reports, as `val_loss`")
        rule = "has no effect with scheduler pbt, whose best is a course of values"
        self.refuse_if(self.finalists.count not in ("auto", 0), "finalists.count", rule, "remove it")
        rule = (
            "needs a key in the space that may change in mid-run: one of the optimizer's, or clip_grad_norm (any "
            "other key is part of what a checkpoint was trained with)"
        )
        fix = "add for example `optimizer.lr: {loguniform: [1e-4, 1e-1]}`"
        self.refuse_if(not any(map(may_change, self.space)), "scheduler", rule, fix)
        return self

    @model_validator(mode="after")
    def _front_fits(self) -> Self:
        if self.objective.metrics is not None:
            rule = "decides by one metric, and objective.metrics are several: they end beaten trials by themselves"
            self.refuse_if(self.scheduler != "none", "scheduler", rule, "remove it")
        if self.objective.weights is not None:
            rule = "has no effect with objective.weights: finalists are repeated for the first of metrics"
            self.refuse_if(self.finalists.count not in ("auto", 0), "finalists.count", rule, "remove it")
        return self

    @model_validator(mode="after")
    def _deadline_is_a_time(self) -> Self:
        try:
            _ = self.deadline and dt.datetime.fromisoformat(self.deadline)
        except ValueError as error:
            fix = "write for example 2026-12-01T18:00"
            raise ConfigError("deadline", self.deadline, "must be a date with a time", fix) from error
        return self

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Self:
        needs = "budget.usd" if self.budget.usd is not None else "usd_to_target"
        needed = self.budget.usd is not None or "usd_to_target" in self.objective.decisive
        fix = "add for example `usd_per_hour: 9.69`; `python -m cluster plan` says what a cluster costs"
        self.refuse_if(needed and self.usd_per_hour is None, "usd_per_hour", f"is needed for {needs}", fix)
        return self

    @property
    def ends_beaten(self) -> bool:
        """Whether a trial ends once another is certain to beat it."""
        is_race = self.objective.ends_at_target and self.scheduler == "none" and "seed" not in self.space
        return self.objective.metrics is not None or is_race

    @property
    def num_finalists(self) -> int:
        """The most trials that are repeated."""
        return MOST_FINALISTS if self.finalists.count == "auto" else self.finalists.count

    @property
    def least_finalists(self) -> int:
        """How many are repeated twice, whatever time that takes."""
        count = self.finalists.count
        return (3 if self.search == "frontier" else 0) if count == "auto" else count

    @property
    def time_budget_s(self) -> float | None:
        """Seconds until the budget of time or of dollars is used up, whichever is first; None without either."""
        limits = [] if self.budget.time_s is None else [self.budget.time_s]
        if self.budget.usd is not None and self.usd_per_hour is not None:
            limits.append(min(1e9, self.budget.usd / self.usd_per_hour * 3600))
        return min(limits, default=None)

    def time_left_s(self, spent_s: float, now: float) -> float | None:
        """Seconds until the budget is used up, of which `spent_s` are, or the deadline, at `now` (seconds since 1970),
        whichever is first; None without either.
        """
        limits = [] if self.time_budget_s is None else [self.time_budget_s - spent_s]
        if self.deadline is not None:
            limits.append(dt.datetime.fromisoformat(self.deadline).timestamp() - now)
        return min(limits, default=None)
