"""Early stopping: a run ends where a figure of its evaluations no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from trainers.config.sections import EarlyStoppingConfig
from trainers.errors import ConfigError


class EarlyStopping:
    """Counts evaluations since the best one. Every rank has the same figures, so nothing has to be agreed."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.best_step = self.waited = 0

    @property
    def words(self) -> str | None:
        """Why the run ends; None while it goes on."""
        metric, patience = self.config.metric, self.config.patience
        if patience is None or self.waited < patience:
            return None
        best = (
            "no value of it was finite"
            if self.best is None
            else f"its best is {self.best:.6g} of step {self.best_step}"
        )
        return f"stopped early: {metric} has not improved in {self.waited} evaluations ({best})"

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in the figures of an evaluation; ConfigError when the metric is none of them."""
        metric = self.config.metric
        if metric is None:
            return
        if metric not in figures:
            rule, fix = "is no metric of this task's evaluation", f"use one of {', '.join(sorted(figures))}"
            raise ConfigError("early_stopping.metric", metric, rule, fix)
        value, margin = figures[metric], self.config.min_delta or 0.0
        sign = 1.0 if self.config.smaller else -1.0
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best - margin):
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Return plain data; nothing where the run has no early stopping."""
        if self.config.metric is None:
            return {}
        return {"metric": self.config.metric, "best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, where it is of this metric."""
        if self.config.metric is not None and state.get("metric") == self.config.metric:
            self.best, self.best_step, self.waited = (state[name] for name in ("best", "best_step", "waited"))
