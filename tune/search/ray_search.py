"""Searches and the population as Ray Tune takes them: spaces, searchers, a scheduler. The only file here with Ray."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher

from tune.config import Range, SweepConfig, may_change, sample_values
from tune.objective import Objective
from tune.search.front import beaten_by
from tune.search.frontier import Choice, Ended
from tune.search.frontier_grid import Frontier
from tune.search.history import Past
from tune.search.population import population, within
from tune.search.space import Suggestion, grid, in_probing_order, planned_trials, unwrap, wrap
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord, value_of

logger = logging.getLogger(__name__)


def tune_space(config: SweepConfig) -> dict[str, Any]:
    """Return the space for Tune: a grid as one list of whole trials, so that a budget can cut it."""
    if config.search == "frontier":
        return {}
    if config.search == "grid":
        return _one_of([Suggestion(trial) for trial in in_probing_order(grid(config)[: config.budget.trials])])
    return {key: _domain(values) for key, values in config.space.items()}


def population_space(config: SweepConfig, journal: Journal) -> dict[str, Any]:
    """Return the population for Tune, each trial with the values that it had last (a resumed sweep)."""
    members = []
    for name, first in population(config):
        stage = journal.newest_stage(name)
        members.append(Suggestion(first if stage is None else stage.config, member=name))
    return _one_of(members)


def _one_of(suggestions: list[Suggestion]) -> dict[str, Any]:
    """Return a grid of whole configurations, which have the same one key."""
    configs = list(map(wrap, suggestions))
    return {key: tune.grid_search([config[key] for config in configs]) for key in configs[0]}


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
    """Return how many trials Tune asks for, after `before` of an earlier start; -1: until the search ends."""
    if config.search == "grid" or config.scheduler == "pbt":
        return 1
    if config.search == "frontier" and config.budget.trials is None:
        return -1
    return max(0, (config.budget.trials or 1) - before)


def searcher(
    config: SweepConfig,
    lanes: int,
    before: Sequence[tuple[dict[str, Any], list[float]]] = (),
    train: Mapping[str, Any] | None = None,
    records: Callable[[], list[TrialRecord]] = list,
    past: Sequence[Past] = (),
) -> Any:
    """Return what chooses the next trial, at most `lanes` at a time.

    `before` are the trials of an earlier start with their objectives (`values_of`): optuna goes on from them, frontier
    from the journal's `records` and what it hears of the `past`, the others choose the same again.
    """
    if config.search == "frontier":
        search: Searcher = FrontierSearcher(Frontier(config, train or {}, past), records)
    elif config.search == "optuna":
        search = _optuna_search(config, before)
    else:
        # A population is trained side by side, a stage of each in turn on the lanes.
        at_a_time = max(lanes, planned_trials(config)) if config.scheduler == "pbt" else lanes
        return BasicVariantGenerator(max_concurrent=at_a_time, random_state=config.seed)
    return ConcurrencyLimiter(search, max_concurrent=lanes)


def _optuna_search(config: SweepConfig, before: Sequence[tuple[dict[str, Any], list[float]]]) -> Any:
    """Return Ray's OptunaSearch, with several objectives where the sweep has them (multi-objective TPE)."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    class Search(OptunaSearch):
        """Takes up the trials of an earlier start with all of their objectives, where Ray's knows of one."""

        def add_evaluated_point(self, parameters: dict[str, Any], value: Any, *_: Any, **__: Any) -> None:
            study: Any = self._ot_study
            space: Any = self._space
            study.add_trial(optuna.trial.create_trial(values=value, params=parameters, distributions=space))

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the sweep has a line of its own for each trial
    objective = config.objective
    modes = ["min" if objective.sign(metric) > 0 else "max" for metric in objective.decisive]
    names = [_objective_name(at) for at in range(len(modes))]
    return Search(
        metric=names if objective.metrics else names[0],
        mode=modes if objective.metrics else modes[0],
        seed=config.seed + len(before),  # else a resumed search would draw its first random trials again
        points_to_evaluate=[trial for trial, _ in before],
        evaluated_rewards=[value for _, value in before] or None,
    )


def _objective_name(at: int) -> str:
    """Return the name under which Tune gets an objective: of the first, which schedulers look at, `objective`."""
    return f"objective_{at}" if at else "objective"


def values_of(objective: Objective, record: TrialRecord) -> list[float]:
    """Return a trial's objectives; the worst, inf or -inf, for each that it does not have."""
    values = [value_of(metric, record) for metric in objective.decisive]
    return [
        objective.sign(metric) * math.inf if value is None else value
        for metric, value in zip(objective.decisive, values, strict=True)
    ]


def as_result(values: Sequence[float]) -> dict[str, float]:
    """Return a trial's objectives as Tune gets them."""
    return {_objective_name(at): value for at, value in enumerate(values)}


class BeatenScheduler(FIFOScheduler):
    """Stops a trial as soon as a finished one is certain to beat it in all objectives."""

    def __init__(
        self, objective: Objective, records: Mapping[str, TrialRecord], usd_per_hour: float | None, why: dict[str, str]
    ) -> None:
        """`records` are those of all trials that have ended, `usd_per_hour` the price of a lane; `why` is given the
        reason for each trial that was stopped, by Tune's id.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._objective, self._records, self._usd_per_hour, self._why = objective, records, usd_per_hour, why
        self._met: dict[str, list[dict[str, float]]] = {}
        """By Tune's id, the evaluation that first met the target."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (FIFOScheduler, ())  # Tune pickles it for a restore that the journal replaces

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Tune with each evaluation."""
        row = {name: value for name, value in result.items() if isinstance(value, int | float)}
        if self._objective.reached(row):
            self._met.setdefault(trial.trial_id, [row])
        curve = [*self._met.get(trial.trial_id, []), row]
        found = beaten_by(self._objective, curve, list(self._records.values()), self._usd_per_hour)
        if found is None:
            return str(TrialScheduler.CONTINUE)
        self._why[trial.trial_id] = (
            f"certain to be beaten in {' and '.join(self._objective.decisive)} by trial {found.id}"
        )
        return str(TrialScheduler.STOP)


class FrontierSearcher(Searcher):
    """search: frontier for Tune: asks `Frontier` each time that a lane is free.

    `records` reads the journal: a trial's record is there before Tune hears of its end.
    """

    def __init__(self, frontier: Frontier, records: Callable[[], list[TrialRecord]]) -> None:
        super().__init__(metric="objective", mode="min")
        self._frontier, self._records = frontier, records
        self._running: dict[str, Choice] = {}
        self._known = records()
        self._waits = False
        self._said: set[tuple[str, str]] = set()

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Accept what Tune sets."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial, the end, or None: wait for one that is running."""
        if self._waits:
            return None
        step = self._frontier.next(self._known, list(self._running.values()))
        if isinstance(step, Choice):
            self._running[trial_id] = step
            return wrap(Suggestion(self._frontier.trials[step.place], step.purpose))
        self._waits = step is None
        return Searcher.FINISHED if isinstance(step, Ended) else None

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Learn from the trial's record."""
        self._running.pop(trial_id, None)
        self._known, self._waits = self._records(), False
        for one in self._frontier.belief(self._known).misled if self._frontier.past else ():
            if (one.name, one.of) not in self._said:
                self._said.add((one.name, one.of))
                logger.warning("%s", one)

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the journal has it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


def member_name(trial: Any) -> str:
    """Return the id of one of Tune's new trials; Tune keeps it through every change of the configuration."""
    return str(unwrap(trial.config).member)


def population_scheduler(config: SweepConfig) -> Any:
    """Return Tune's PopulationBasedTraining (Jaderberg et al. 2017): each of its iterations is a stage."""
    # Ray draws new values from these, or changes them by a factor; of a list it takes the neighbour.
    mutations = {
        key: values if isinstance(values, list) else values.choice or _domain(values)
        for key, values in config.space.items()
        if may_change(key)
    }

    def explored(tune_config: dict[str, Any]) -> dict[str, Any]:
        member = unwrap(tune_config)
        return wrap(replace(member, trial=within(config, member.trial)))

    return PopulationBasedTraining(
        time_attr="training_iteration",
        metric="objective",
        mode=config.objective.direction,
        perturbation_interval=1,
        hyperparam_mutations=wrap(Suggestion(mutations)),
        quantile_fraction=config.pbt.quantile_fraction,
        resample_probability=config.pbt.resample_probability,
        custom_explore_fn=explored,
        log_config=False,  # the journal does
    )
