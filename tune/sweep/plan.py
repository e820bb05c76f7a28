"""What a sweep would hold and cost on a cluster file, before a cent is spent: lanes, nodes, hours, dollars.

The duration of a trial is given by the user, or it is the mean of those that the sweep's directory holds already;
without either it is said to be unknown, not guessed.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.files.capacity import cost, grow, nodes_of, total, worker_groups
from cluster.files.prices import STALE_AFTER_DAYS, load_prices
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import MISSING, ConfigError, StorageError
from tune.report.answer import duration
from tune.search.space import planned_trials
from tune.sweep.spec import SweepSpec
from tune.trials.journal import Journal, TrialRecord

if TYPE_CHECKING:
    from cluster.files.cluster_file import ClusterFile

_CPUS_TO_START = 2
"""That a controller, and each worker, keeps busy while it imports torch and Ray. Of lanes that start together on fewer
the first is up as late as the last."""


def lanes_for(wanted: int | Literal["auto"], groups: int, trials: int | None, source: str | None = None) -> int:
    """How many lanes a sweep gets where so many worker groups fit: as many as asked for, or all; never idle ones.

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
    """How many of `count` lanes of so many workers may start at the same time on nodes with so many `cpus` each.

    A node starts one worker at least. All lanes start where some wait for a node (only `fits` have one): that is what
    makes a cluster grow.
    """
    nodes = sum(cpu >= 1 for cpu in cpus)
    return max(1, nodes // workers, int(sum(cpus)) // (_CPUS_TO_START * (1 + workers))) if fits >= count else count


def sweep_s(trials: int, lanes: int, trial_s: float) -> float:
    """Wall time of so many equal trials: each lane runs one after the other."""
    return math.ceil(trials / lanes) * trial_s


def trials_within(time_s: float, lanes: int, trial_s: float) -> int:
    """How many such trials end within a time."""
    return math.floor(time_s / trial_s + 1e-9) * lanes


@dataclass(frozen=True)
class Plan:
    """A sweep on a cluster."""

    cluster: str
    workers: str
    """A lane in words."""
    trials: int
    """Trials that are still to run."""
    ended: int
    """Trials that the sweep's directory holds already."""
    lanes: int
    max_lanes: int
    """Lanes that would fit when the cluster is fully grown."""
    nodes: str
    """What the lanes need, in words."""
    usd_per_hour: float | None
    """None where the price of a node is not known."""
    price: str
    """Where the price is from."""
    trial_s: float | None
    """Duration of a trial; None when nothing is known of it."""
    trial_source: str
    within: int
    """Trials that end within the budget."""
    time_s: float | None
    """Wall time of those trials, or the budget that cuts the sweep off."""
    budget_s: float | None
    """When the budget of time or of dollars is used up."""

    @property
    def usd(self) -> float | None:
        """Dollars of `time_s`."""
        if self.time_s is None or self.usd_per_hour is None:
            return None
        return self.time_s / 3600 * self.usd_per_hour

    def lines(self) -> Iterator[str]:
        """As the terminal shows it."""
        yield self.cluster
        again = f" ({self.ended} more have ended already)" if self.ended else ""
        rounds = math.ceil(self.trials / self.lanes)
        side = f"{self.lanes} of at most {self.max_lanes}" if self.max_lanes > self.lanes else str(self.lanes)
        yield f"trials       {self.trials}{again}"
        yield f"lanes        {side}, each {self.workers}; {rounds} trial{'s' * (rounds != 1)} one after the other"
        yield f"nodes        {self.nodes}"
        price = "unknown" if self.usd_per_hour is None else f"{self.usd_per_hour:.2f}"
        yield f"USD/hour     {price} ({self.price})"
        trial = "unknown" if self.trial_s is None else duration(self.trial_s)
        yield f"one trial    {trial} ({self.trial_source})"
        if self.time_s is None:
            yield "time         unknown" + (
                f", at most {duration(self.budget_s)} by the budget" if self.budget_s else ""
            )
        else:
            yield f"time         {duration(self.time_s)} once the nodes are up"
        yield f"USD          {'unknown' if self.usd is None else f'{self.usd:.2f}'}"
        if self.within < self.trials:
            yield f"budget       ends the sweep after about {self.within} of {self.trials} trials"


def make_plan(spec: SweepSpec, cluster: ClusterFile, minutes_per_trial: float | None) -> Plan:
    """The plan of a sweep on what a cluster file can grow to. Starts nothing.

    Raises ConfigError when the sweep cannot fit: no node holds a worker, the cluster never holds one group or the
    lanes that are asked for, or the budget ends before the first trial does.
    """
    train = build(TrainConfig, spec.train, spec.source)
    scaling, types = train.scaling, cluster.node_types
    for node_type in types:
        if "CPU" not in node_type.resources:
            raise ConfigError(
                f"available_node_types.{node_type.name}.resources",
                MISSING,
                "is not known before the node is up",
                "write `resources: {CPU: n, GPU: n}`, or ask the running cluster with `ray status`",
                cluster.source,
            )
    cpus, gpus = float(scaling.cpus_per_worker), _gpus_per_worker(train, cluster)
    most = nodes_of(types, grow(types, cluster.max_workers, cpus, gpus))
    groups = worker_groups(most, scaling.min_workers, cpus, gpus)
    worker = f"{cpus:g} CPU and {gpus:g} GPU" if gpus else f"{cpus:g} CPU"
    if groups == 0:
        raise ConfigError(
            "train.scaling.num_workers",
            scaling.num_workers,
            f"never fits: {cluster.source} can grow to {worker_groups(most, 1, cpus, gpus)} workers of {worker}",
            "ask for fewer or smaller workers, or raise the cluster's max_workers",
            spec.source,
        )
    records, journal_note = _records(spec)
    planned = planned_trials(spec.config) or 0
    trials = max(0, planned - len(records))
    lanes = lanes_for(spec.config.lanes, groups, max(1, trials), spec.source)
    counts = grow(types, cluster.max_workers, cpus, gpus, lanes * scaling.min_workers)
    usd_per_hour, price = _price(spec, cluster, counts)
    trial_s, trial_source = _trial_s(records, minutes_per_trial, journal_note)
    budget_s, budget = _budget_s(spec, usd_per_hour)
    within, time_s = trials, None if trial_s is None else sweep_s(trials, lanes, trial_s)
    if trial_s is not None and budget_s is not None and time_s is not None and budget_s < time_s:
        within, time_s = min(trials, trials_within(budget_s, lanes, trial_s)), budget_s
        if within == 0:
            raise ConfigError(
                budget,
                getattr(spec.config.budget, budget.rpartition(".")[2]),
                f"is used up before the first trial ends, which takes {duration(trial_s)} on {lanes} lanes"
                + (f" at {usd_per_hour:.2f} USD an hour" if budget == "budget.usd" else ""),
                "raise it, or lower `lanes` or the length of a trial",
                spec.source,
            )
    used = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    held = nodes_of(types, counts)
    size = scaling.min_workers
    return Plan(
        cluster=f"{spec.config.name} on {cluster.name} ({cluster.provider}, {cluster.region or 'no region'})",
        workers=f"{size} worker{'s' * (size > 1)} of {worker}",
        trials=trials,
        ended=len(records),
        lanes=lanes,
        max_lanes=groups,
        nodes=f"the head and {used or 'no worker node'}: {total(held, 'CPU'):g} CPUs, {total(held, 'GPU'):g} GPUs",
        usd_per_hour=usd_per_hour,
        price=price,
        trial_s=trial_s,
        trial_source=trial_source,
        within=within,
        time_s=time_s,
        budget_s=budget_s,
    )


def _gpus_per_worker(train: TrainConfig, cluster: ClusterFile) -> float:
    has_gpus = any(node_type.resources.get("GPU") for node_type in cluster.node_types)
    use_gpu = has_gpus if train.scaling.use_gpu == "auto" else train.scaling.use_gpu
    return train.scaling.gpus_per_worker if use_gpu and train.device in ("auto", "cuda") else 0.0


def _records(spec: SweepSpec) -> tuple[list[TrialRecord], str]:
    """The trials of the sweep's directory, and why none could be read."""
    try:
        return Journal(spec.storage).records(), ""
    except StorageError as error:
        return [], f"; {spec.uri} cannot be read: {str(error).splitlines()[0]}"


def _trial_s(records: Sequence[TrialRecord], minutes: float | None, note: str) -> tuple[float | None, str]:
    if minutes is not None:
        return minutes * 60, "given"
    times = [record.end_time - record.start_time for record in records if record.status in ("done", "stopped")]
    if not times:
        return None, f"give --minutes_per_trial M: no trial of this sweep has ended yet{note}"
    spread = f", {duration(min(times))} to {duration(max(times))}" if len(times) > 1 else ""
    return math.fsum(times) / len(times), f"mean of {len(times)} that ended{spread}"


def _price(spec: SweepSpec, cluster: ClusterFile, counts: dict[str, int]) -> tuple[float | None, str]:
    """Dollars an hour of the head and the nodes, and where the figure is from."""
    if spec.config.usd_per_hour is not None:
        return spec.config.usd_per_hour, "given: usd_per_hour"
    prices = load_prices()
    bill = cost(cluster.node_types, counts, {name: price.usd_per_hour for name, price in prices.items()})
    if bill.missing:
        return None, f"no price of {', '.join(bill.missing)}: give --usd_per_hour X for all nodes together"
    used = {t.instance_type for t in cluster.node_types if t.is_head or counts.get(t.name, 0)}
    known = [prices[name] for name in used if name in prices]
    age = max((price.age_days(dt.datetime.now(dt.UTC).date()) for price in known), default=0)
    stale = ", STALE: look them up" if age > STALE_AFTER_DAYS else ""
    regions = sorted({price.region for price in known})
    return bill.usd_per_hour, f"on-demand prices of {', '.join(regions)}, up to {age} days old{stale}"


def _budget_s(spec: SweepSpec, usd_per_hour: float | None) -> tuple[float | None, str]:
    """The sooner end of the budgets of time and of dollars, and the key that sets it."""
    budget = spec.config.budget
    ends: list[tuple[float, str]] = []
    if budget.time_s is not None:
        ends.append((budget.time_s, "budget.time_s"))
    if budget.usd is not None and usd_per_hour:
        ends.append((budget.usd / usd_per_hour * 3600, "budget.usd"))
    return min(ends, default=(None, ""))
