"""The plan of a sweep: how many trials on how many lanes, computed once from its file and from what the cluster has.

`python -m tune SWEEP.yaml` makes it from the live cluster; `python -m tune plan` from a cluster file, and says what the
sweep would hold and cost before a cent is spent.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from cluster.files.capacity import total, worker_slots
from cluster.files.cluster_file import ClusterFile
from cluster.plan import ClusterPlan, Size, has_gpus, with_resources
from trainers.config.function import FunctionConfig, RunConfig, build_run
from trainers.errors import ConfigError, StorageError, first_line
from tune.report.words import duration
from tune.sweeps.spec import SweepSpec
from tune.trials.interval import dollars
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord

_CPUS_TO_START = 2
"""That a controller, and each worker, keeps busy while it imports torch and Ray. Of lanes that start together on fewer
the first is up as late as the last."""
Nodes = Sequence[Mapping[str, float]]
"""The resources of each node."""


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep runs, and on how many lanes."""

    train: RunConfig
    """The run that trials vary; the worker group of each lane has its shape."""
    num_trials: int
    """Trials that the search makes."""
    is_independent: bool
    """Whether the search chooses trials regardless of how others end, so that an end may be held back from it."""
    precisions: tuple[Any, ...]
    """All those that a trial may have."""
    use_gpu: bool
    max_lanes: int
    """Worker groups that fit when the cluster has grown."""
    num_lanes: int
    """Those for which there is no node yet wait for one: that is what makes the cluster grow."""
    num_at_once: int
    """Lanes that may start at the same time."""
    lane_usd_per_hour: float | None
    """Price of one lane, where the sweep's file gives the price of all."""

    @classmethod
    def make(cls, spec: SweepSpec, up: Nodes, at_most: Nodes, use_gpu: bool) -> Self:
        """Plan a sweep on the nodes that are `up`, and those `at_most` that the cluster may grow to (none: unknown).

        Raises ConfigError where more lanes are asked for than fit.
        """
        config, train = spec.config, build_run(spec.train, spec.source)
        scaling = train.scaling
        shape = (scaling.cpus_per_worker, scaling.gpus_per_worker if use_gpu else 0.0)
        fits = worker_slots(up, *shape) // scaling.min_workers
        max_lanes = max(fits, worker_slots(at_most, *shape) // scaling.min_workers)
        num_lanes = lanes_for(config.lanes, max_lanes, spec.num_trials, spec.source)
        precision = config.space.get("precision", [train.precision])
        cpus = [node.get("CPU", 0.0) for node in up]
        return cls(
            train=train,
            num_trials=spec.num_trials,
            is_independent=config.search in ("grid", "random"),
            precisions=tuple(precision if isinstance(precision, list) else precision.choice or []),
            use_gpu=use_gpu,
            max_lanes=max_lanes,
            num_lanes=num_lanes,
            num_at_once=starts_at_once(num_lanes, fits, cpus, scaling.max_workers),
            lane_usd_per_hour=config.usd_per_hour and config.usd_per_hour / num_lanes,
        )


def lanes_for(wanted: int | Literal["auto"], groups: int, trials: int | None, source: str | None = None) -> int:
    """How many lanes a sweep gets where `groups` worker groups fit: as many as asked for, or all; never idle ones.

    Raises ConfigError when more are asked for than fit.
    """
    if wanted == "auto":
        return max(1, min(groups, trials or groups))
    if wanted > max(groups, 1):
        rule = f"must be at most the {groups} worker groups that fit on the cluster"
        raise ConfigError("lanes", wanted, rule, "lower it, or set `lanes: auto`", source)
    return wanted


def starts_at_once(count: int, fits: int, cpus: Sequence[float], workers: int) -> int:
    """How many of `count` lanes of `workers` workers may start at the same time on nodes with so many `cpus` each.

    A node starts one worker at least. All lanes start where some wait for a node (only `fits` have one): that is what
    makes a cluster grow.
    """
    nodes = sum(cpu >= 1 for cpu in cpus)
    return max(1, nodes // workers, int(sum(cpus)) // (_CPUS_TO_START * (1 + workers))) if fits >= count else count


@dataclass(frozen=True)
class Forecast:
    """A sweep on what a cluster file can grow to: what it would hold, how long it would take, what it would cost."""

    spec: SweepSpec
    plan: SweepPlan
    on: ClusterPlan
    """The cluster, and workers of the sweep's shape."""
    ended: int
    """Trials that the sweep's directory holds already."""
    trials: int
    """Trials that are still to run."""
    within: int
    """Those of them that end within the budget."""
    held: Size
    """The nodes that the lanes need."""
    usd_per_hour: float | None
    """Price of those nodes, as given or by the price list; None where that of a node is not known."""
    trial_s: float | None
    """Duration of a trial; None when nothing is known of it."""
    trial_source: str
    time_s: float | None
    """Wall time until the fullest lane has run its trials one after the other, or the budget is used up."""
    usd: float | None
    """Dollars of `time_s`."""

    def lines(self) -> Iterator[str]:
        """As the terminal shows it."""
        config, held, time_s = self.spec.config, self.held, self.time_s
        lanes, most, size = self.plan.num_lanes, self.plan.max_lanes, self.plan.train.scaling.min_workers
        again = f" ({self.ended} more have ended already)" if self.ended else ""
        of = f" of at most {most}" if most > lanes else ""
        rounds = math.ceil(self.trials / lanes)
        lane = f"{size} worker{'s' * (size > 1)} of {self.on.worker}"
        source = "on-demand list prices"
        if held.cost.spot_usd_per_hour is not None:
            source += f"; {held.cost.spot_usd_per_hour:.2f} with spot nodes at their spot prices"
        if config.usd_per_hour is not None:
            source = "given: usd_per_hour"
        elif held.cost.missing:
            source = f"no price of {', '.join(held.cost.missing)}: give --usd_per_hour X for all nodes together"
        time = "unknown" if time_s is None else f"{duration(time_s)} once the nodes are up"
        if time_s is None and config.time_budget_s is not None:
            time += f", at most {duration(config.time_budget_s)} by the budget"
        shown = {
            "trials": f"{self.trials}{again}",
            "lanes": f"{lanes}{of}, each {lane}; {rounds} trial{'s' * (rounds != 1)} one after the other",
            "nodes": f"the head and {held.words}: {total(held.nodes, 'CPU'):g} CPUs, {total(held.nodes, 'GPU'):g} GPUs",
            "USD/hour": f"{'unknown' if self.usd_per_hour is None else f'{self.usd_per_hour:.2f}'} ({source})",
            "one trial": f"{'unknown' if self.trial_s is None else duration(self.trial_s)} ({self.trial_source})",
            "time": time,
            "USD": "unknown" if self.usd is None else f"{self.usd:.2f}",
        }
        if self.within < self.trials:
            shown["budget"] = f"ends the sweep after about {self.within} of {self.trials} trials"
        yield f"{config.name} on {self.on.title}"
        for label, words in shown.items():
            yield f"{label:13}{words}"
        if config.usd_per_hour is None and not held.cost.missing:
            yield from self.on.remarks(held)


def make_plan(spec: SweepSpec, cluster: ClusterFile, minutes_per_trial: float | None) -> Forecast:
    """Forecast a sweep on what a cluster file can grow to. Starts nothing.

    Raises ConfigError when the sweep cannot fit: no node holds a worker, the cluster never holds one group or the
    lanes that are asked for, or the budget ends before the first trial does.
    """
    train, cluster = build_run(spec.train, spec.source), with_resources(cluster)
    scaling, budget = train.scaling, spec.config.budget
    use_gpu = has_gpus(cluster) if scaling.use_gpu == "auto" else scaling.use_gpu
    use_gpu = use_gpu and (isinstance(train, FunctionConfig) or train.device in ("auto", "cuda"))
    on = ClusterPlan(cluster, float(scaling.cpus_per_worker), scaling.gpus_per_worker if use_gpu else 0.0)
    on.require(scaling.min_workers, "train.scaling.num_workers", scaling.num_workers, spec.source)
    plan = SweepPlan.make(spec, on.grown().nodes, (), use_gpu)
    try:
        records, note = Journal(spec.storage).records(), ""
    except StorageError as error:
        records, note = [], f"; {spec.uri} cannot be read: {first_line(error)}"
    trial_s, trial_source = _trial_s(records, minutes_per_trial, note)
    trials = within = max(0, plan.num_trials - len(records))
    held = on.grown(plan.num_lanes * scaling.min_workers)
    usd_per_hour = spec.config.usd_per_hour or (None if held.cost.missing else held.cost.usd_per_hour)
    budget_s, time_s = spec.config.time_budget_s, None
    if trial_s is not None:
        time_s = min(math.ceil(trials / plan.num_lanes) * trial_s, budget_s or math.inf)
        if budget_s is not None:
            within = min(trials, math.floor(budget_s / trial_s + 1e-9) * plan.num_lanes)
    if trial_s is not None and trials and within == 0:
        key = "time_s" if budget_s == budget.time_s else "usd"
        rule = f"is used up before the first trial ends, which takes {duration(trial_s)} on {plan.num_lanes} lanes"
        rule += f" at {usd_per_hour:.2f} USD an hour" if key == "usd" else ""
        fix = "raise it, or lower `lanes` or the length of a trial"
        raise ConfigError(f"budget.{key}", getattr(budget, key), rule, fix, spec.source)
    usd = None if time_s is None or usd_per_hour is None else dollars(time_s, usd_per_hour)
    return Forecast(
        spec, plan, on, len(records), trials, within, held, usd_per_hour, trial_s, trial_source, time_s, usd
    )


def _trial_s(records: Sequence[TrialRecord], minutes: float | None, note: str) -> tuple[float | None, str]:
    """Duration of a trial, and where that is from: given, or the mean of those that ended; else it is unknown."""
    if minutes is not None:
        return minutes * 60, "given"
    times = [record.end_time - record.start_time for record in records if record.finished]
    if not times:
        return None, f"give --minutes_per_trial M: no trial of this sweep has ended yet{note}"
    spread = f", {duration(min(times))} to {duration(max(times))}" if len(times) > 1 else ""
    return statistics.fmean(times), f"mean of {len(times)} that ended{spread}"
