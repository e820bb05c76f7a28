"""Objective: what the best trial of a sweep is best at, and the metrics whose direction is known."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainers.config.model import Settings

TO_TARGET = ("time_to_target", "usd_to_target")
SPENT = (*TO_TARGET, "energy_j")  # what a trial has used so far can only grow; so can the peak of its memory
SCORES = ("accuracy", "f1", "auc")  # ends of the names of metrics of which more is better


class Objective(Settings):
    """What the best trial is best at."""

    metric: str = Field(default="time_to_target", min_length=1, examples=["val_accuracy"])
    """time_to_target, usd_to_target, samples_per_s, peak_memory_bytes, energy_j, or any metric that the task reports
    (val_loss, ...)."""
    metrics: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=2, max_length=6, examples=[["time_to_target", "peak_memory_bytes"]]
    )
    """Several in place of `metric`: the answer is the Pareto front, the trials that no other beats in all of them, and
    a trial ends as soon as it is certain to be beaten. energy_j is that of the trial's GPUs."""
    weights: dict[str, Annotated[float, Field(ge=0, le=1e6)]] | None = Field(
        default=None, min_length=1, examples=[{"time_to_target": 2, "peak_memory_bytes": 1}]
    )
    """Which trial of the front is the best (default: the best by the first of `metrics`): what 5 % of a metric, or 0.01
    of a score, counts; 0 for those that are not named."""
    mode: Literal["min", "max"] | None = Field(default=None)
    """min or max; known by itself for *_to_target, samples_per_s, *_loss and *_accuracy."""
    target: dict[str, float] | None = Field(default=None, min_length=1, max_length=1, examples=[{"val_accuracy": 0.97}])
    """The metric and the value to reach: time_to_target and usd_to_target count until then."""
    train_to: Literal["target", "end"] | None = Field(default=None)
    """Where a trial ends: at the first evaluation that meets the target, or after its last step (default: target with
    time_to_target and usd_to_target, else end). With these two, target also ends a trial that has trained 2.5 times as
    long as another took."""

    @model_validator(mode="before")
    @classmethod
    def _first_of_metrics(cls, given: Any) -> Any:
        metrics = given.get("metrics") if isinstance(given, dict) else None
        return {"metric": metrics[0], **given} if isinstance(metrics, list) and metrics else given

    @model_validator(mode="after")
    def _several(self) -> Self:
        if self.metrics is None:
            self.refuse_if(self.weights is not None, "weights", "needs objective.metrics", "remove it")
            return self
        self.refuse_if(self.metric != self.metrics[0], "metric", "must be the first of metrics", "remove it")
        self.refuse_if(self.mode is not None, "mode", "has no effect with metrics", "remove it")
        self.refuse_if(len(set(self.metrics)) < len(self.metrics), "metrics", "names one twice", "name each once")
        unknown = [metric for metric in self.metrics if _mode_of(metric) is None]
        rule = f"must name metrics whose direction is known, which that of {unknown[:1]} is not"
        self.refuse_if(bool(unknown), "metrics", rule, "rename it, so that it ends in loss, error or accuracy")
        foreign = sorted(set(self.weights or {}) - set(self.metrics))
        self.refuse_if(bool(foreign), "weights", f"names {foreign[:1]}, which is not among metrics", "add it there")
        weightless = self.weights is not None and not any(self.weights.values())
        self.refuse_if(weightless, "weights", "must have one above 0", "raise one")
        return self

    @model_validator(mode="after")
    def _known(self) -> Self:
        needed = bool(set(self.decisive) & set(TO_TARGET)) and self.target is None
        fix = "add `target: {val_accuracy: 0.97}`"
        self.refuse_if(needed, "target", f"is what {self.to_target} counts to", fix)
        unknown = self.mode is None and _mode_of(self.metric) is None
        self.refuse_if(unknown, "mode", f"is needed for the metric {self.metric}", "add `mode: min` or `mode: max`")
        rule = "must name a metric that ends in loss, error or accuracy"
        fix = "rename the metric, so that its direction is known"
        self.refuse_if(not all(map(_mode_of, self.target or {})), "target", rule, fix)
        aimless = self.train_to == "target" and self.target is None
        self.refuse_if(aimless, "train_to", "needs an objective.target", "add `target: {val_accuracy: 0.97}`")
        return self

    @property
    def ends_at_target(self) -> bool:
        """Whether a trial ends at the evaluation that meets the target."""
        return self.target is not None and (self.train_to or ("target" if self.to_target else "end")) == "target"

    @property
    def decisive(self) -> tuple[str, ...]:
        """The metric, or each of several."""
        return tuple(self.metrics or (self.metric,))

    @property
    def to_target(self) -> str | None:
        """The first metric that counts to the target."""
        return next((metric for metric in self.decisive if metric in TO_TARGET), None)

    def sign(self, metric: str) -> int:
        """Return 1 where less of a metric is better, -1 where more is."""
        mode = self.mode if metric == self.metric and self.mode else _mode_of(metric)
        return -1 if mode == "max" else 1

    @property
    def direction(self) -> Literal["min", "max"]:
        """Whether less or more of `metric` is better."""
        mode = self.mode or _mode_of(self.metric)
        assert mode is not None
        return mode

    @property
    def watched(self) -> tuple[str, ...]:
        """The metrics that decide: its own and the target's."""
        return *self.decisive, *(self.target or {})

    def reached(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation's metrics meet the target."""
        for name, value in (self.target or {}).items():
            if name in metrics:
                return metrics[name] <= value if _mode_of(name) == "min" else metrics[name] >= value
        return False


def _mode_of(metric: str) -> Literal["min", "max"] | None:
    if metric.endswith(("loss", "error", "perplexity")) or metric in (*SPENT, "step_time_s", "peak_memory_bytes"):
        return "min"
    return "max" if metric.endswith(SCORES) or metric == "samples_per_s" else None
