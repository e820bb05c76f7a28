"""TrialRecord: how one trial ended, and its figures, from what its lane reported."""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from trainers.config.model import Tree
from trainers.errors import POLICIES, Status, redact
from tune.config import Objective

REPEATS = 0.2
"""Standard deviation of the logarithm of the time to target between repeats of
one configuration, assumed until enough repeats are measured. In
benchmarks/results/ground-truth-*.json it is 0.11 and 0.20 for the samples to
the target; this is the larger one.
"""
APART = math.exp(1.96 * math.sqrt(2) * REPEATS)
"""The times of two runs of one configuration have a ratio above this in 2.5 % of cases."""
FAR_APART = math.exp(3.24 * math.sqrt(2) * REPEATS)
"""The times of two runs of one configuration have a ratio above this in 0.06 % of
cases. The largest of eighty such ratios is above this in 5 % of cases.
"""
REPEATS_WEIGHT = 4  # degrees of freedom that `REPEATS` counts for
EQUAL = 0.05
"""A smaller relative difference between two configurations does not matter."""
BY_HAND = "stopped by hand"
"""The message in the record of a trial that a user has stopped."""
BY_BUDGET = "stopped by the budget"
"""The message if the budget of time or dollars ended the trial."""
ADVICE: dict[Status, str] = {
    status: policy.advice for status, policy in POLICIES.items()
} | {
    "hung": "see in the trial's `traceback` where it hung, or raise the time limit that its message names"
}
"""What to do about a trial, by status: a trial has no directory for stacks."""
_SPEEDS = ("samples_per_s", "step_time_s", "step_time_ci95_s")
_FIELDS = {
    "time_to_target": "time_to_target_s",
    "samples_per_s": "samples_per_s",
    "step_time_s": "step_time_s",
    "peak_memory_bytes": "peak_memory_bytes",
}
"""The record fields that hold metrics, by the metric's name."""

Purpose = Literal["trial", "repeat", "clone"]
"""trial: a trial of the search; repeat: another run of a finalist, without other
trials and with another seed; clone: a trial that a user has added.
"""
Name = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=200)]
"""A trial's name, which is also the name of a file."""
UnixTime = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0, lt=2**63)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def placed(row: dict[str, float]) -> dict[str, float]:
    """Return an evaluation unchanged; raise ValueError if its position is invalid."""
    for name, otherwise in (
        ("step", -1.0),
        ("epoch", 0.0),
        ("train_time_s", -1.0),
    ):
        if not 0 <= row.get(name, otherwise) < 1e12:
            raise ValueError(f"{name} must be a number from 0 to 1e12")
    return row


Row = Annotated[dict[str, float], AfterValidator(placed)]
"""An evaluation: step, epoch (not for a stream), train_time_s, train_loss,
val_loss, ...; the first three must be finite, all others may be NaN or infinite.
"""


def trial_id(
    config: Tree, purpose: Purpose = "trial", seed: int | None = None
) -> str:
    """Return ten hex digits that identify a configuration, its purpose and its seed."""
    named = config
    if purpose != "trial":
        named = {"purpose": purpose, "seed": seed, "config": config}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval; `low == high` if it is exact."""

    value: float
    low: float
    high: float


def dollars(time_s: float, usd_per_hour: float) -> float:
    """Return the price of a time on a lane that costs `usd_per_hour`."""
    return time_s / 3600 * usd_per_hour


@dataclass(frozen=True)
class Spent:
    """Where a trial's time on its lane went, in its last start."""

    began: UnixTime
    """When the lane took the trial, as Unix time by the node's clock, s."""
    starting_s: _Amount
    """Time outside the training loop: imports, data, model, the search for a
    microbatch, and cleaning up.

    For a training function, the time until it was called.
    """
    training_s: _Amount
    """Time in training steps. For a training function, the whole call."""
    total_s: _Amount
    """The whole time; what is neither starting nor training is evaluation."""
    first_step_s: _Amount | None = None
    """The part of training_s spent in the first step, which compiles."""
    phases_s: dict[str, _Amount] = field(default_factory=dict)
    """total_s, split by phase; empty for a training function."""


@dataclass(frozen=True)
class TrialRecord:
    """How one trial ended."""

    id: Name
    """Digest of `config` and, for a clone or repeat, of `purpose` and `seed`, too; the
    same in every resume.
    """
    config: Tree
    """Dotted keys of the run and the values that the search gave them."""
    status: Status
    start_time: UnixTime
    """Unix time, s."""
    end_time: UnixTime
    """Unix time, s."""
    samples_per_s: _Amount | None = None
    """Training throughput after warm-up, evaluation left out."""
    step_time_s: _Amount | None = None
    """Mean time of a step."""
    peak_memory_bytes: _Whole | None = None
    """Peak of the device's memory; of the worker's resident memory on a CPU.
    Largest over ranks.
    """
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of everything that was reported: train_loss, val_loss,
    val_accuracy, ...
    """
    curve: list[Row] = field(default_factory=list)
    """One row per evaluation."""
    time_to_target_s: _Amount | None = None
    """Training time at the first evaluation that met the objective's target;
    None if none did.
    """
    lane: _Whole | None = None
    purpose: Purpose = "trial"
    seed: _Whole | None = None
    """Seed of a repeat, in place of the configuration's own."""
    samples: _Amount | None = None
    """Training samples seen."""
    epochs: _Amount | None = None
    """Passes over the training split, fractions included."""
    step_time_ci95_s: _Amount | None = None
    """Half width of the 95 % confidence interval of the mean step time."""
    cpu_pressure: _Amount | None = None
    """Share of the trial's time in which some work on rank 0's node waited for a CPU
    (Linux pressure stall information).
    """
    message: str = ""
    """What went wrong, in one line."""
    traceback: str = ""
    """The worker's traceback, for status `error`; the ranks' stacks, for `hung`."""
    spent: Spent | None = None
    """Where the trial's time went; None if the trial failed."""
    disturbed_s: _Amount | None = None
    """Training time in which the trial was stalled or had no CPU. The trial's
    throughput excludes this time; its other times include it.
    """

    @property
    def finished(self) -> bool:
        """Whether the trial has a result."""
        return self.status in ("done", "stopped")

    @property
    def is_censored(self) -> bool:
        """Whether a user has stopped the trial: nobody knows how it would have ended."""
        return self.status == "stopped" and self.message == BY_HAND

    @property
    def given_seed(self) -> int | None:
        """The seed of a repeat, or else the `seed` of `config`; None if neither exists."""
        if self.seed is not None:
            return self.seed
        return self.config.get("seed")

    @property
    def on_lane_s(self) -> float:
        """How long the trial held its lane, s; if unknown, waiting time is included."""
        if self.spent is not None:
            return self.spent.total_s
        return max(0.0, self.end_time - self.start_time)

    @property
    def missed_target_s(self) -> float | None:
        """Training time at the last evaluation before the one that met the target.

        The trial met the target between these two evaluations. The value is 0 if
        the first evaluation met the target, and None if no evaluation did or
        the evaluations hold no times.
        """
        before = 0.0
        for row in self.curve:
            time_s = row.get("train_time_s")
            if time_s is None:
                continue
            if time_s == self.time_to_target_s:
                return before
            before = time_s
        return None


Records = Sequence[TrialRecord]


def num_lanes(records: Records) -> int:
    """Return how many lanes have run the trials, at least 1.

    The record of a trial that the search or the budget stopped names no lane.
    """
    lanes = {record.lane for record in records}
    return max(1, len(lanes - {None}))


def value_of(metric: str, record: TrialRecord) -> float | None:
    """Return a trial's value of a metric; None if it failed or has no finite value."""
    if not record.finished:
        return None
    value = record.metrics.get(metric)
    if metric in _FIELDS:
        value = getattr(record, _FIELDS[metric])
    if value is None or not math.isfinite(value):
        return None
    return value


def time_to_target(objective: Objective, curve: Sequence[Row]) -> float | None:
    """Return the training time, s, at the first evaluation that met the target, if any."""
    for row in curve:
        if objective.reached(row):
            return row["train_time_s"]
    return None


def crossing_s(objective: Objective, record: TrialRecord) -> Interval | None:
    """Return the training time, s, at which a trial met the target.

    The value is interpolated linearly between the last evaluation that missed
    the target and the first that met it; the interval extends from the one to
    the other.

    Returns None if the trial did not meet the target.
    """
    time_s = record.time_to_target_s
    before = record.missed_target_s
    goal = objective.goal
    if time_s is None:
        return None
    if goal is None or before is None or not before < time_s:
        return Interval(time_s, time_s, time_s)
    metric = goal.metric
    values = {
        row["train_time_s"]: row[metric]
        for row in record.curve
        if "train_time_s" in row and metric in row
    }
    missed = values.get(before, math.nan)
    met = values.get(time_s, math.nan)
    way = 1.0
    if missed != met:
        way = (goal.value - missed) / (met - missed)
    if before <= 0 or not 0 <= way <= 1:
        way = 1.0  # before the first evaluation, or from a figure that was not finite
    crossed_s = before + way * (time_s - before)
    return Interval(crossed_s, before, time_s)


def _figure(value: float | None) -> float | None:
    """Return the figure, or None if it is outside the range that a record can hold."""
    if value is None or not 0 <= value < 2**63:
        return None
    return value


def make_record(
    config: Tree,
    objective: Objective,
    started: float,
    curve: list[Row],
    outcome: Tree,
    usd_per_hour: float | None = None,
    purpose: Purpose = "trial",
    seed: int | None = None,
) -> TrialRecord:
    """Make the record of a trial from its evaluations and its lane's outcome.

    `usd_per_hour` is the price of one lane. A trial that is done, but has not
    reported the metrics of the objective and target, gets the status `error`.
    """
    result = outcome.get("result") or {}
    speed = result.get("throughput") or {}
    status: Status = outcome["status"]
    message = outcome.get("message") or "; ".join(result.get("warnings", ()))
    metrics: dict[str, float] = {}
    for row in curve:
        metrics |= row
    metrics |= result.get("metrics", {})
    figures: Any = {}
    for name in _SPEEDS:  # a training function may report them itself
        figures[name] = _figure(speed.get(name, metrics.get(name)))
    known = {"samples_per_s", "time_to_target", "usd_to_target", "step_time_s"}
    # The value so far, reported while it ran, or a training function's own.
    peak_bytes = metrics.pop("peak_memory_bytes", None)
    peak_bytes = _figure(result.get("peak_memory_bytes", peak_bytes))
    if peak_bytes is not None:
        figures["peak_memory_bytes"] = int(peak_bytes)
        known.add("peak_memory_bytes")
    disturbed_s = speed.get("disturbed_s", metrics.pop("disturbed_s", None))
    time_s = time_to_target(objective, curve)
    if time_s is not None and usd_per_hour is not None:
        metrics["usd_to_target"] = dollars(time_s, usd_per_hour)
    known |= metrics.keys()
    ends_at_target = objective.ends_at_target or purpose == "repeat"
    if status == "stopped" and time_s is not None and ends_at_target:
        status = "done"
    missing = sorted(set(objective.watched) - known)
    if status == "done" and missing:
        status = "error"
        names = ", ".join(sorted(known))
        message = f"the objective's {missing[0]} was not reported as a number; reported: {names}"
    return TrialRecord(
        id=trial_id(config, purpose, seed),
        config=config,
        status=status,
        start_time=started,
        end_time=time.time(),
        **figures,
        metrics=metrics,
        curve=curve,
        time_to_target_s=time_s,
        lane=outcome.get("lane"),
        purpose=purpose,
        seed=seed,
        samples=result.get("samples"),
        epochs=result.get("epochs"),
        cpu_pressure=outcome.get("cpu_pressure"),
        disturbed_s=_figure(disturbed_s) or None,
        message=redact(message),
        traceback=redact(outcome.get("traceback", "")),
        spent=Spent(**outcome["spent"]) if outcome.get("spent") else None,
    )
