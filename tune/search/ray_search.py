"""A sweep's space, searcher and scheduler in the form that Ray Tune takes (Ray).

No other file in this folder imports Ray.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher

from trainers.config.model import Tree
from tune.config import (
    MOST_TRIALS,
    TO_TARGET,
    Objective,
    Range,
    SweepConfig,
    sample_values,
)
from tune.search.space import NO_SCORE, WHOLE, Score, grid, next_trials, score
from tune.trials.record import (
    FAR_APART,
    Row,
    TrialRecord,
    dollars,
    time_to_target,
    value_of,
)
from tune.trials.record import trial_id as name_of

logger = logging.getLogger(__name__)

_MOST_EVALUATIONS = 10_000
_WORTH_S = 10.0
"""Seconds of training before a trial may be stopped as beaten."""


def tune_space(config: SweepConfig) -> Tree:
    """Return the space for Tune; a grid becomes a list of trials, cut to the budget."""
    if config.around is not None:
        return {}
    if config.search != "grid":
        # In any order of its keys, a space draws the same trials.
        return {
            key: _domain(values)
            for key, values in sorted(config.space.items())
        }
    return {WHOLE: tune.grid_search(grid(config)[: config.budget.trials])}


def _domain(values: list[Any] | Range) -> Any:
    if isinstance(values, list) or values.choice:
        return tune.choice(sample_values(values))
    if values.uniform:
        return tune.uniform(*values.uniform)
    if values.loguniform:
        return tune.loguniform(*values.loguniform)
    low, high = sample_values(values)
    return tune.lograndint(low, high + 1)


def num_samples(config: SweepConfig, before: int) -> int:
    """Return Tune's `num_samples`, given `before` trials from an earlier start."""
    if config.around is not None:
        return config.budget.trials or MOST_TRIALS
    if config.search == "grid":
        return 1
    return max(0, (config.budget.trials or 1) - before)


def searcher(
    config: SweepConfig,
    lanes: int,
    before: Sequence[TrialRecord] = (),
    seed: int = 0,
) -> Any:
    """Return the search algorithm for Tune, limited to `lanes` trials at a time.

    `before` are the trials of an earlier start. Optuna continues from those
    that the space holds; the other algorithms choose the same trials again.
    """
    if config.around is not None:
        return ConcurrencyLimiter(AroundSearch(config), max_concurrent=lanes)
    if config.search == "optuna":
        optuna = _optuna_search(config, before, seed)
        return ConcurrencyLimiter(optuna, max_concurrent=lanes)
    return BasicVariantGenerator(max_concurrent=lanes, random_state=seed)


def _optuna_search(
    config: SweepConfig, before: Sequence[TrialRecord], seed: int
) -> Any:
    import optuna
    from optuna.trial import create_trial
    from ray.tune.search.optuna import OptunaSearch

    # The sweep logs its own line for each trial.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ranges = OptunaSearch.convert_search_space(tune_space(config))
    known = []
    rewards = []
    for record in before:
        value = reward(config.objective, record)
        trial = record.config
        # not if the space lacks it, or if a user has stopped it
        with suppress(ValueError):
            create_trial(value=value, params=trial, distributions=ranges)
            known.append(trial)
            rewards.append(value)
    if len(known) < len(before):
        logger.info("search: uses %d of %d trials", len(known), len(before))
    return OptunaSearch(
        metric="objective",
        mode=config.objective.direction,
        # Otherwise a resumed search would draw its first random trials again.
        seed=seed + len(before),
        points_to_evaluate=known,
        evaluated_rewards=rewards or None,
    )


class AroundSearch(Searcher):
    """Proposes the trials that `next_trials` returns.

    A resumed sweep proposes the same trials again; their results come from the
    journal.
    """

    def __init__(self, config: SweepConfig) -> None:
        super().__init__("objective", config.objective.direction)
        self._config = config
        self._scores: dict[str, Score] = {}
        self._running: dict[str, str] = {}
        """The trials that are running: our IDs, by Tune's IDs."""

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial, or None if a running trial must end first."""
        running = self._running.values()
        for trial in next_trials(self._config, self._scores):
            name = name_of(trial)
            if name not in running:
                self._running[trial_id] = name
                return trial
        return None if running else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: Tree | None = None, error: bool = False
    ) -> None:
        """Store an ended trial's score; if a result has no status, it was stopped."""
        result = result or {"status": "error"}
        found = NO_SCORE
        if result.get("status", "stopped") in ("done", "stopped"):
            found = score(
                self._config.objective, result.get("objective"), result
            )
        name = self._running.pop(trial_id)
        self._scores[name] = found

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the journal has all results."""


def reward(objective: Objective, record: TrialRecord) -> float:
    """Return a trial's objective, or the worst possible value if it has none.

    A trial that a user has stopped gets NaN, which search algorithms ignore.
    """
    if record.is_censored:
        return math.nan
    value = value_of(objective.metric, record)
    return worst(objective) if value is None else value


def worst(objective: Objective) -> float:
    """Return an infinite value that is worse than any value of the objective."""
    return math.inf if objective.direction == "min" else -math.inf


def so_far(
    objective: Objective, curve: Sequence[Row], usd_per_hour: float | None
) -> float:
    """Return the objective's value after a curve's evaluations, for a scheduler.

    If the target is not met, or the metric is NaN, this is the worst value. If
    no evaluation has the metric yet, this is NaN.
    """
    if objective.metric in TO_TARGET:
        value = time_to_target(objective, curve)
        if value is not None and objective.metric == "usd_to_target":
            value = dollars(value, usd_per_hour or 0.0)
        return worst(objective) if value is None else value
    for row in reversed(curve):
        if objective.metric in row:
            value = row[objective.metric]
            return worst(objective) if math.isnan(value) else value
    return math.nan


def _as_none(scheduler: Any) -> tuple[Any, ...]:
    """Pickle a scheduler as one that does nothing.

    Tune pickles schedulers for its own restore; a sweep resumes from the
    journal instead.
    """
    return FIFOScheduler, ()


class AshaScheduler(AsyncHyperBandScheduler):
    """ASHA by the evaluations of all trials, including those that Tune did not see."""

    def __init__(
        self,
        objective: Objective,
        records: Mapping[str, TrialRecord],
        usd_per_hour: float | None,
    ) -> None:
        """`records`: those of all ended trials, by ID; the sweep keeps adding to them."""
        super().__init__(
            metric="objective",
            mode=objective.direction,
            max_t=_MOST_EVALUATIONS,
        )
        self._objective = objective
        self._records = records
        self._usd_per_hour = usd_per_hour

    __reduce__ = _as_none

    def on_trial_result(
        self, tune_controller: Any, trial: Any, result: Tree
    ) -> str:
        """Decide whether a trial continues; called by Tune with each evaluation."""
        if math.isnan(result["objective"]):
            return str(TrialScheduler.CONTINUE)
        return str(super().on_trial_result(tune_controller, trial, result))

    def on_trial_complete(
        self, tune_controller: Any, trial: Any, result: Tree
    ) -> None:
        """Note a trial's end; called by Tune.

        If a trial ended before Tune started it, Tune learns only of its end,
        as if that were its first evaluation. This method notes the trial's
        evaluations instead.
        """
        record = self._records.get(result.get("trial", ""))
        if record is None or record.is_censored:
            super().on_trial_complete(tune_controller, trial, result)
            return
        for count in range(1, len(record.curve) + 1):
            curve = record.curve[:count]
            value = so_far(self._objective, curve, self._usd_per_hour)
            row = {"training_iteration": count, "objective": value}
            self.on_trial_result(tune_controller, trial, row)


class BeatenScheduler(FIFOScheduler):
    """Stops a trial that trained far longer than another trial needed to its target."""

    def __init__(
        self,
        objective: Objective,
        records: Mapping[str, TrialRecord],
        why: dict[str, str],
    ) -> None:
        """`records`: those of all ended trials, by ID; the sweep keeps adding to them.

        When the scheduler stops a trial, it adds the reason to `why`, by
        Tune's ID of the trial.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._objective = objective
        self._records = records
        self._why = why

    __reduce__ = _as_none

    def on_trial_result(
        self, tune_controller: Any, trial: Any, result: Tree
    ) -> str:
        """Decide whether a trial continues; called by Tune with each evaluation."""
        trained_s = result.get("train_time_s", 0.0) - result.get(
            "disturbed_s", 0.0
        )
        if self._objective.reached(result) or trained_s < _WORTH_S:
            return str(TrialScheduler.CONTINUE)
        for record in self._records.values():
            is_whole = record.status == "done" and record.purpose == "trial"
            time_s = record.time_to_target_s
            if is_whole and time_s and time_s * FAR_APART <= trained_s:
                metric = self._objective.metric
                why = f"certain to be beaten in {metric} by trial {record.id}"
                self._why[trial.trial_id] = why
                return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE)
