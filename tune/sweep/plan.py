"""The plan of a sweep: how many trials on how many lanes, computed once from its file and from what the cluster has.

`python -m tune SWEEP.yaml` makes it from the live cluster; `python -m tune plan` from a cluster file, and says what the
sweep would hold and cost before a cent is spent. The duration of a trial is given by the user, or it is the mean of
those that the sweep's directory holds already; without either it is said to be unknown, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.files.capacity import total, worker_groups
from cluster.files.cluster_file import ClusterFile
from cluster.plan import ClusterPlan, has_gpus, with_resources
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import MISSING, ConfigError, StorageError
from tune.report.answer import duration
from tune.sweep.spec import SweepSpec
from tune.trials.journal import Journal, TrialRecord

_CPUS_TO_START = 2
"""That a controller, and each worker, keeps busy while it imports torch and Ray. Of lanes that start together on fewer
the first is up as late as the last."""
Nodes = Sequence[Mapping[str, float]]
"""The resources of each node."""


@dataclass(frozen=True)
class Machines:
    """What a cluster has for a sweep."""

    up: Nodes
    """The nodes that are there."""
    at_most: Nodes
    """Those that it may grow to; none where that is not known."""
    use_gpu: bool
    """Whether the workers get GPUs."""


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep runs, and on how many lanes."""

    train: TrainConfig
    """The run that trials vary; the worker group of each lane has its shape."""
    num_trials: int
    """Trials that the search makes; of `search: frontier` an estimate."""
    total: int | None
    """The same where it is certain."""
    is_independent: bool
    """Whether the search chooses trials regardless of how others end, so that an end may be held back from it."""
    precisions: tuple[str, ...]
    """All that a trial may have."""
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
    def make(cls, spec: SweepSpec, machines: Machines) -> SweepPlan:
        """Raises ConfigError where more lanes are asked for than fit."""
        config, train = spec.config, build(TrainConfig, spec.train, spec.source)
        scaling = train.scaling
        shape = (scaling.min_workers, scaling.cpus_per_worker, scaling.gpus_per_worker if machines.use_gpu else 0.0)
        fits = worker_groups(machines.up, *shape)
        max_lanes = max(fits, worker_groups(machines.at_most, *shape))
        num_lanes = lanes_for(config.lanes, max_lanes, spec.num_trials, spec.source)
        precision = config.space.get("precision", [train.precision])
        cpus = [node.get("CPU", 0.0) for node in machines.up]
        return cls(
            train=train,
            num_trials=spec.num_trials,
            total=None if config.search == "frontier" else spec.num_trials,
            is_independent=config.search in ("grid", "random") and config.scheduler != "pbt",
            precisions=tuple(precision if isinstance(precision, list) else precision.choice or []),
            use_gpu=machines.use_gpu,
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
        raise ConfigError(
            "lanes",
            wanted,
            f"must be at most the {groups} worker groups that fit on the cluster",
            "lower it, or set `lanes: auto`",
            source,
        )
    return wanted


def starts_at_once(count: int, fits: int, cpus: Sequence[float], workers: int) -> int:
    """How many of `count` lanes of `workers` workers may start at the same time on nodes with so many `cpus` each.

    A node starts one worker at least. All lanes start where some wait for a node (only `fits` have one): that is what
    makes a cluster grow.
    """
    nodes = sum(cpu >= 1 for cpu in cpus)
    return max(1, nodes // workers, int(sum(cpus)) // (_CPUS_TO_START * (1 + workers))) if fits >= count else count


def sweep_s(trials: int, lanes: int, trial_s: float) -> float:
    """Wall time of equal trials: each lane runs one after the other."""
    return math.ceil(trials / lanes) * trial_s


def trials_within(time_s: float, lanes: int, trial_s: float) -> int:
    """How many such trials end within a time."""
    return math.floor(time_s / trial_s + 1e-9) * lanes


@dataclass(frozen=True)
class Forecast:
    """A sweep on a cluster file: what it would hold, how long it would take, and what it would cost."""

    title: str
    """The sweep and the cluster."""
    plan: SweepPlan
    lane: str
    """The workers of a lane, in words."""
    ended: int
    """Trials that the sweep's directory holds already."""
    nodes: str
    """What the lanes need, in words."""
    usd_per_hour: float | None
    """None where the price of a node is not known."""
    price: str
    """Where the price is from."""
    remarks: tuple[str, ...]
    """Each node's price: its age and source."""
    trial_s: float | None
    """Duration of a trial; None when nothing is known of it."""
    trial_source: str
    budget_s: float | None
    """When the budget of time or of dollars is used up."""

    @property
    def trials(self) -> int:
        """Trials that are still to run."""
        return max(0, self.plan.num_trials - self.ended)

    @property
    def whole_s(self) -> float | None:
        """Wall time of all trials that are still to run, whatever the budget."""
        return None if self.trial_s is None else sweep_s(self.trials, self.plan.num_lanes, self.trial_s)

    @property
    def time_s(self) -> float | None:
        """Wall time until the trials have ended or the budget is used up."""
        return None if self.whole_s is None else min(self.whole_s, self.budget_s or math.inf)

    @property
    def within(self) -> int:
        """Trials that end within the budget."""
        if self.trial_s is None or self.time_s == self.whole_s:
            return self.trials
        return min(self.trials, trials_within(self.budget_s or 0.0, self.plan.num_lanes, self.trial_s))

    @property
    def usd(self) -> float | None:
        """Dollars of `time_s`."""
        if self.time_s is None or self.usd_per_hour is None:
            return None
        return self.time_s / 3600 * self.usd_per_hour

    def lines(self) -> Iterator[str]:
        """As the terminal shows it."""
        lanes, most = self.plan.num_lanes, self.plan.max_lanes
        again = f" ({self.ended} more have ended already)" if self.ended else ""
        of = f" of at most {most}" if most > lanes else ""
        rounds = math.ceil(self.trials / lanes)
        shown = {
            "trials": f"{self.trials}{again}",
            "lanes": f"{lanes}{of}, each {self.lane}; {rounds} trial{'s' * (rounds != 1)} one after the other",
            "nodes": self.nodes,
            "USD/hour": f"{'unknown' if self.usd_per_hour is None else f'{self.usd_per_hour:.2f}'} ({self.price})",
            "one trial": f"{'unknown' if self.trial_s is None else duration(self.trial_s)} ({self.trial_source})",
            "time": "unknown" if self.time_s is None else f"{duration(self.time_s)} once the nodes are up",
            "USD": "unknown" if self.usd is None else f"{self.usd:.2f}",
        }
        if self.time_s is None and self.budget_s:
            shown["time"] += f", at most {duration(self.budget_s)} by the budget"
        if self.within < self.trials:
            shown["budget"] = f"ends the sweep after about {self.within} of {self.trials} trials"
        yield self.title
        for label, words in shown.items():
            yield f"{label:13}{words}"
        yield from self.remarks


def make_plan(spec: SweepSpec, cluster: ClusterFile, minutes_per_trial: float | None) -> Forecast:
    """The forecast of a sweep on what a cluster file can grow to. Starts nothing.

    Raises ConfigError when the sweep cannot fit: no node holds a worker, the cluster never holds one group or the
    lanes that are asked for, or the budget ends before the first trial does.
    """
    config, train = spec.config, build(TrainConfig, spec.train, spec.source)
    cluster, scaling = with_resources(cluster), train.scaling
    use_gpu = has_gpus(cluster) if scaling.use_gpu == "auto" else scaling.use_gpu
    use_gpu = use_gpu and train.device in ("auto", "cuda")
    on = ClusterPlan(cluster, float(scaling.cpus_per_worker), scaling.gpus_per_worker if use_gpu else 0.0)
    on.require(scaling.min_workers, "train.scaling.num_workers", scaling.num_workers, spec.source)
    plan = SweepPlan.make(spec, Machines(on.grown().nodes, (), use_gpu))
    records, journal_note = _records(spec)
    trial_s, trial_source = _trial_s(records, minutes_per_trial, journal_note)
    held = on.grown(plan.num_lanes * scaling.min_workers)
    usd_per_hour, price, remarks = config.usd_per_hour, "given: usd_per_hour", tuple[str, ...]()
    if usd_per_hour is None and held.cost.missing:
        price = f"no price of {', '.join(held.cost.missing)}: give --usd_per_hour X for all nodes together"
    elif usd_per_hour is None:
        usd_per_hour, price, remarks = held.cost.usd_per_hour, "on-demand list prices", tuple(on.remarks(held))
    forecast = Forecast(
        title=f"{config.name} on {on.title}",
        plan=plan,
        lane=f"{scaling.min_workers} worker{'s' * (scaling.min_workers > 1)} of {on.worker}",
        ended=len(records),
        nodes=f"the head and {held.words}: {total(held.nodes, 'CPU'):g} CPUs, {total(held.nodes, 'GPU'):g} GPUs",
        usd_per_hour=usd_per_hour,
        price=price,
        remarks=remarks,
        trial_s=trial_s,
        trial_source=trial_source,
        budget_s=config.time_budget_s,
    )
    if trial_s is not None and forecast.trials and forecast.within == 0:
        by_time = forecast.budget_s == config.budget.time_s
        raise ConfigError(
            "budget.time_s" if by_time else "budget.usd",
            config.budget.time_s if by_time else config.budget.usd,
            f"is used up before the first trial ends, which takes {duration(trial_s)} on {plan.num_lanes} lanes"
            + ("" if by_time else f" at {config.usd_per_hour:.2f} USD an hour"),
            "raise it, or lower `lanes` or the length of a trial",
            spec.source,
        )
    return forecast


def _records(spec: SweepSpec) -> tuple[list[TrialRecord], str]:
    """The trials of the sweep's directory, and why none could be read."""
    try:
        return Journal(spec.storage).records(), ""
    except StorageError as error:
        return [], f"; {spec.uri} cannot be read: {str(error).splitlines()[0]}"


def _trial_s(records: Sequence[TrialRecord], minutes: float | None, note: str) -> tuple[float | None, str]:
    """Duration of a trial, and where that is from."""
    if minutes is not None:
        return minutes * 60, "given"
    times = [record.end_time - record.start_time for record in records if record.status in ("done", "stopped")]
    if not times:
        return None, f"give --minutes_per_trial M: no trial of this sweep has ended yet{note}"
    spread = f", {duration(min(times))} to {duration(max(times))}" if len(times) > 1 else ""
    return math.fsum(times) / len(times), f"mean of {len(times)} that ended{spread}"


def parse_options(overrides: dict[str, Any]) -> tuple[str, float | None, dict[str, Any]]:
    """The cluster file, the minutes of a trial, and what is left for the sweep, from `--key value` options.

    Raises ConfigError for a missing or impossible one.
    """
    rest = dict(overrides)
    file, minutes = rest.pop("cluster", None), rest.pop("minutes_per_trial", None)
    if not isinstance(file, str):
        raise ConfigError(
            "--cluster", MISSING, "is required: what is it to run on?", "add `--cluster cluster/aws.yaml`"
        )
    usable = isinstance(minutes, int | float) and not isinstance(minutes, bool) and 0 < minutes < math.inf
    if minutes is not None and not usable:
        raise ConfigError("--minutes_per_trial", minutes, "must be a number above 0", "write `--minutes_per_trial 12`")
    return file, None if minutes is None else float(minutes), rest
