"""Plan a sweep: how many trials on how many lanes, from its file and the cluster.

`python -m tune SWEEP.yaml` makes the plan from the live cluster. `python -m
tune plan` makes it from a cluster file, and shows which nodes the sweep would
hold and what it would cost, without starting anything.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from cluster.files.capacity import (
    Cost,
    cost,
    grow,
    load_prices,
    nodes_of,
    total,
    worker_slots,
)
from cluster.files.ray_up import ClusterFile
from trainers.config import TrainConfig
from trainers.config.function import RunConfig, build_run
from trainers.errors import (
    MISSING,
    ConfigError,
    StorageError,
    counted,
    first_line,
    printable,
)
from tune.config import sample_values
from tune.report.words import duration
from tune.sweeps.spec import SweepSpec, num_kept, num_missing
from tune.trials.journal import Journal
from tune.trials.record import Records, TrialRecord, dollars

_PRICES = "Prices are from cluster/files/prices.csv, with dates and sources; if a price is unknown in this region, the most expensive region's price is used."
_CPUS_TO_START = 2
"""CPUs that a worker keeps busy while it and its first trial start.

If lanes start together on fewer CPUs, the first one is up no earlier than the
last.
"""
Nodes = Sequence[Mapping[str, float]]
"""The resources of each node."""


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep runs, and on how many lanes."""

    train: RunConfig
    """The run that trials vary; its `scaling` is the shape of each lane's workers."""
    num_trials: int
    """The number of trials in the search."""
    is_independent: bool
    """Whether the search chooses trials regardless of the results of others,
    so that results may be held back from it.
    """
    precisions: tuple[Any, ...]
    """All precisions that a trial may have."""
    use_gpu: bool
    max_lanes: int
    """The number of worker groups that fit once the cluster has fully grown."""
    num_lanes: int
    """The number of lanes to start. Those without a node wait for one, which
    makes the cluster grow.
    """
    num_at_once: int
    """Lanes that may start at the same time."""
    lane_usd_per_hour: float | None
    """Price of one lane, if the sweep's file gives the price of all lanes."""

    @classmethod
    def make(
        cls, spec: SweepSpec, up: Nodes, at_most: Nodes, use_gpu: bool
    ) -> Self:
        """Plan a sweep on the nodes that are `up`, and on those that may be added.

        Raises ConfigError if more lanes are asked for than fit.
        """
        config = spec.config
        train = build_run(spec.train, spec.source)
        scaling = train.scaling
        shape = (
            scaling.cpus_per_worker,
            scaling.gpus_per_worker if use_gpu else 0.0,
        )
        fits = worker_slots(up, *shape) // scaling.min_workers
        max_lanes = max(
            fits, worker_slots(at_most, *shape) // scaling.min_workers
        )
        num_lanes = lanes_for(
            config.lanes, max_lanes, spec.num_trials, spec.source
        )
        precisions = config.space.get("precision", [train.precision])
        cpus = [node.get("CPU", 0.0) for node in up]
        return cls(
            train=train,
            num_trials=spec.num_trials,
            is_independent=not config.learns and config.around is None,
            precisions=tuple(sample_values(precisions)),
            use_gpu=use_gpu,
            max_lanes=max_lanes,
            num_lanes=num_lanes,
            num_at_once=starts_at_once(
                num_lanes, fits, cpus, scaling.max_workers
            ),
            lane_usd_per_hour=config.usd_per_hour
            and config.usd_per_hour / num_lanes,
        )


def lanes_for(
    wanted: int | Literal["auto"],
    groups: int,
    trials: int,
    source: str | None = None,
) -> int:
    """Return how many lanes a sweep gets if `groups` worker groups fit.

    `auto` gives at most one lane per trial. Raises ConfigError if more lanes
    are asked for than fit.
    """
    if wanted == "auto":
        return max(1, min(groups, trials))
    if wanted > max(groups, 1):
        rule = f"must be at most the {groups} worker groups that fit on the cluster"
        if groups < 2:
            rule = (
                "must be 1, since no second worker group fits on the cluster"
            )
        fix = "lower it, or set `lanes: auto`"
        raise ConfigError("lanes", wanted, rule, fix, source)
    return wanted


def starts_at_once(
    count: int, fits: int, cpus: Sequence[float], workers: int
) -> int:
    """Return how many of `count` lanes of `workers` workers may start at the same time.

    Each node starts at least one worker at a time. If fewer than `count` lanes
    have a node (`fits`), all start at the same time, because lanes that wait
    for a node make the cluster grow.
    """
    nodes = sum(cpu >= 1 for cpu in cpus)
    if fits < count:
        return count
    by_cpus = int(sum(cpus)) // (_CPUS_TO_START * (1 + workers))
    return max(1, nodes // workers, by_cpus)


@dataclass(frozen=True)
class Size:
    """A cluster: its head, and a number of worker nodes of each type."""

    counts: Mapping[str, int]
    nodes: Nodes
    """The resources of all nodes, including the head."""
    num_workers: int
    """The number of workers that fit at the same time."""
    cost: Cost

    @property
    def words(self) -> str:
        """Its nodes and their resources, in words."""
        workers = [
            f"{count} {name}" for name, count in self.counts.items() if count
        ]
        has = f"{total(self.nodes, 'CPU'):g} CPUs, {total(self.nodes, 'GPU'):g} GPUs"
        return f"the head and {', '.join(workers) or 'no worker node'}: {has}"


def size_of(
    cluster: ClusterFile,
    cpus: float,
    gpus: float,
    num_workers: int | None = None,
) -> Size:
    """Return the smallest cluster for `num_workers` workers; if None, the largest."""
    types = cluster.node_types
    counts = grow(types, cluster.max_workers, cpus, gpus, num_workers)
    nodes = nodes_of(types, counts)
    held = cost(types, counts, load_prices(cluster.provider, cluster.region))
    return Size(counts, nodes, worker_slots(nodes, cpus, gpus), held)


@dataclass(frozen=True)
class Forecast:
    """A sweep on a cluster file's largest size: its trials, its time and its price."""

    lines: list[str]
    """What the terminal shows."""
    trials: int
    """The number of trials still to run."""
    ended: int
    """The number of trials that already have a record in the sweep's directory."""
    usd_per_hour: float | None
    """Price of the nodes that the sweep holds, as given or from the price
    list; None if a node's price is not known.
    """
    trial_s: float | None
    """Duration of a trial, or None if unknown."""
    time_s: float | None
    """Wall time until the fullest lane has run its trials one after the other,
    or the budget is used up.
    """
    usd: float | None
    """Price of `time_s`, in US dollars."""


def make_plan(
    spec: SweepSpec, cluster: ClusterFile, minutes_per_trial: float | None
) -> Forecast:
    """Forecast a sweep on the largest size of a cluster file. Starts nothing.

    Raises ConfigError if the sweep cannot fit: no node holds a worker, or the
    cluster never holds one worker group or the requested lanes; and if the
    sweep's directory holds another sweep.
    """
    _check_resources(cluster)
    train = build_run(spec.train, spec.source)
    scaling = train.scaling
    cpus = float(scaling.cpus_per_worker)
    gpus = scaling.gpus_per_worker if _uses_gpu(train, cluster) else 0.0
    worker = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
    most = size_of(cluster, cpus, gpus)
    if most.num_workers < scaling.min_workers:
        workers = f"{counted(most.num_workers, 'worker')} of {worker}"
        rule = f"never fits: {cluster.source} can grow to {workers}"
        fix = "ask for fewer or smaller workers, or raise the cluster's max_workers"
        key = "train.scaling.num_workers"
        raise ConfigError(key, scaling.num_workers, rule, fix, spec.source)
    plan = SweepPlan.make(spec, most.nodes, (), gpus > 0)
    lanes = plan.num_lanes
    held = size_of(cluster, cpus, gpus, lanes * scaling.min_workers)
    usd_per_hour = spec.config.usd_per_hour
    if usd_per_hour is None:
        usd_per_hour = held.cost.usd_per_hour
    records, trial_s, trial_source = _trial_s(spec, minutes_per_trial)
    num_ended = sum(record.purpose == "trial" for record in records)
    trials = num_missing(spec.config, records)
    within, time_s = _time_s(spec, trials, lanes, trial_s)
    usd = None
    if time_s is not None and usd_per_hour is not None:
        usd = dollars(time_s, usd_per_hour)
    again = f" ({num_ended} more have ended already)" if num_ended else ""
    of_most = f" of at most {plan.max_lanes}" if plan.max_lanes > lanes else ""
    lane = f"{counted(scaling.min_workers, 'worker')} of {worker}"
    rounds = counted(math.ceil(trials / lanes), "trial")
    rows = {
        "trials": f"{'at least ' if spec.config.around else ''}{trials}{again}",
        "lanes": f"{lanes}{of_most}, each {lane}; {rounds} one after the other",
        "nodes": held.words,
        "fully grown": f"{most.words}, {_usd(most.cost.usd_per_hour)} USD/hour",
        "USD/hour": f"{_usd(usd_per_hour)} ({_price_source(spec, held.cost)})",
        "one trial": trial_source,
        "time": _time(time_s, spec.config.time_budget_s),
        "USD": _usd(usd),
    }
    if within < trials:
        rows["budget"] = (
            f"ends the sweep after about {within} of {counted(trials, 'trial')}"
        )
    where = f"{cluster.provider}, {cluster.region or 'no region'}"
    lines = [f"{spec.config.name} on {printable(cluster.name)} ({where})"]
    lines += [f"{label:13}{words}" for label, words in rows.items()]
    if spec.config.usd_per_hour is None and not held.cost.missing:
        lines.append(_PRICES)
    return Forecast(
        lines, trials, num_ended, usd_per_hour, trial_s, time_s, usd
    )


def _uses_gpu(train: RunConfig, cluster: ClusterFile) -> bool:
    if isinstance(train, TrainConfig) and train.device not in ("auto", "cuda"):
        return False
    if train.scaling.use_gpu != "auto":
        return train.scaling.use_gpu
    return any(
        node_type.resources.get("GPU") for node_type in cluster.node_types
    )


def _time_s(
    spec: SweepSpec, trials: int, lanes: int, trial_s: float | None
) -> tuple[int, float | None]:
    """Return how many trials end within the budget, and the sweep's wall time."""
    if trial_s is None:
        return trials, None
    time_s = math.ceil(trials / lanes) * trial_s
    budget_s = spec.config.time_budget_s
    if budget_s is None:
        return trials, time_s
    within = math.floor(budget_s / trial_s + 1e-9) * lanes
    return min(trials, within), min(time_s, budget_s)


def _price_source(spec: SweepSpec, found: Cost) -> str:
    if spec.config.usd_per_hour is not None:
        return "given: usd_per_hour"
    if found.missing:
        return f"no price for {', '.join(found.missing)}: give --usd_per_hour X for all nodes together"
    if found.spot_usd_per_hour is None:
        return "on-demand list prices"
    return f"on-demand list prices; {_usd(found.spot_usd_per_hour)} with spot nodes at their spot prices"


def _time(time_s: float | None, budget_s: float | None) -> str:
    if time_s is not None:
        return f"{duration(time_s)} once the nodes are up"
    if budget_s is None:
        return "unknown"
    return f"unknown, at most {duration(budget_s)} by the budget"


def _usd(amount: float | None) -> str:
    return "unknown" if amount is None else f"{amount:.2f}"


def _check_resources(cluster: ClusterFile) -> None:
    """Raise ConfigError for a node type whose CPUs are unknown until a node is up."""
    for node_type in cluster.node_types:
        if "CPU" in node_type.resources:
            continue
        name = f"available_node_types.{node_type.name}.resources"
        fix = "write `resources: {CPU: n, GPU: n}` (`ray status` on the running cluster shows them)"
        if cluster.provider == "local":
            name = f"resources of a {node_type.name}"
            fix = "add --num-cpus and --num-gpus to the file's `ray start`"
        rule = "must say how many CPUs a node has, which is not known before a node is up"
        raise ConfigError(name, MISSING, rule, fix, cluster.source)


def _trial_s(
    spec: SweepSpec, minutes: float | None
) -> tuple[Records, float | None, str]:
    """Return the records so far, seconds per trial, and the figure's source."""
    note = ""
    records: list[TrialRecord] = []
    try:
        num_kept(spec)
        records = Journal(spec.storage).records()
    except StorageError as error:
        note = f"; {spec.uri} cannot be read: {first_line(error)}"
    if minutes is not None:
        return records, minutes * 60, f"{duration(minutes * 60)} (given)"
    times = [record.on_lane_s for record in records if record.finished]
    if not times:
        why = (
            "give --minutes_per_trial M: no trial of this sweep has ended yet"
        )
        return records, None, f"unknown ({why}{note})"
    mean_s = statistics.fmean(times)
    spread = ""
    if len(times) > 1:
        spread = f", {duration(min(times))} to {duration(max(times))}"
    words = f"{duration(mean_s)} (mean of {len(times)} that ended{spread})"
    return records, mean_s, words
