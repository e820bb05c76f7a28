"""The cheapest machines that end a sweep, and the training with its winner, by a deadline; starts nothing.

Asked by `python -m tune plan SWEEP --cluster CLUSTER --deadline TIME`.
"""

import datetime as dt
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cluster.files.capacity import NodeType, worker_slots
from cluster.files.cluster_file import ClusterFile
from cluster.files.prices import Price, all_prices, load_prices
from cluster.spot.availability import SpotRates, checkpoint_interval_s
from cluster.spot.game import Job, Outcome, State, play
from cluster.spot.policy import ExpectedCost
from trainers.errors import MISSING, ConfigError
from tune.report.words import duration
from tune.sweeps.plan import Forecast

SURE = 0.95
"""The probability to be in time, within the budget, below which a choice is no answer."""
_DRAWS = 100
_SIMULATED = 6
"""Choices of spot machines that are simulated: those that would be the cheapest if nothing went wrong."""
_CHECKPOINT_S = 10.0
_SPREAD = 0.1
"""Standard deviation of the time that all takes, relative to what is expected."""


@dataclass(frozen=True)
class Terms:
    """What is asked for, and what is assumed of the machines."""

    by: dt.datetime
    now: dt.datetime
    budget_usd: float = math.inf
    final_s: float | None = None
    """Seconds of the training with the winner; None: as long as a trial."""
    changeover_s: float = 300.0
    spot_share: float | None = None
    """Price of a spot machine, as a share of the on-demand price; None: by the price table."""
    regions: tuple[str, ...] = ()
    """To choose from; none: all that the price table knows."""
    rates: SpotRates = field(default_factory=SpotRates)
    speeds: Mapping[str, float] = field(default_factory=dict)
    """By GPU model: how many times as fast as the cluster file's machine."""

    @property
    def deadline_s(self) -> float:
        """Seconds from now."""
        return (self.by - self.now).total_seconds()


@dataclass(frozen=True)
class Offer:
    """A machine that can be had."""

    price: Price
    spot_usd_per_hour: float | None
    """None: not known, or no less than on demand."""
    speed: float
    """How many times as fast a worker is as on the cluster file's machine."""
    head_usd_per_hour: float
    """Of the file's head in the same region; 0 where its price is not known."""


def offers(cluster: ClusterFile, reference: NodeType, terms: Terms) -> list[Offer]:
    """Return the priced machines of the cluster's cloud, by region, of the same GPU or one whose speed is given.

    All that is read of the price table is read here.
    """
    model = load_prices(cluster.provider)[reference.instance_type or ""].gpu_model
    head = next((one.instance_type for one in cluster.node_types if one.is_head), None)
    heads: dict[str, float] = {}
    found = []
    for price in all_prices().values():
        speed = 1.0 if price.gpu_model == model else terms.speeds.get(price.gpu_model)
        if (
            price.provider != cluster.provider
            or speed is None
            or price.region not in (terms.regions or (price.region,))
        ):
            continue
        if price.region not in heads:
            of_head = load_prices(cluster.provider, price.region).get(head or "")
            heads[price.region] = of_head.usd_per_hour if of_head else 0.0
        spot = price.spot_usd_per_hour if terms.spot_share is None else terms.spot_share * price.usd_per_hour
        spot = None if spot is None or spot >= price.usd_per_hour else spot
        found.append(Offer(price, spot, speed, heads[price.region]))
    return found


@dataclass(frozen=True)
class Choice:
    """Machines for a sweep and the training after it, and what came of them in the simulation."""

    offer: Offer
    is_spot: bool
    num_nodes: int
    lanes: int
    job: Job
    outcomes: tuple[Outcome, ...] = ()

    @property
    def least_usd(self) -> float:
        """Dollars if nothing goes wrong."""
        hours = (self.job.work_s + self.job.changeover_s) / 3600
        return hours * (self.offer.head_usd_per_hour + self.job.spot_usd_per_hour)

    @property
    def usd(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Dollars of each simulated run, the head's among them."""
        ends = np.array([min(one.end_s, self.job.deadline_s) for one in self.outcomes])
        return np.array([one.usd for one in self.outcomes]) + ends / 3600 * self.offer.head_usd_per_hour

    def probability(self, budget_usd: float = math.inf) -> float:
        """Return the share of simulated runs that end in time, and within a budget."""
        in_time = np.array([one.end_s <= self.job.deadline_s for one in self.outcomes])
        return float(np.mean(in_time & (self.usd <= budget_usd)))

    @property
    def words(self) -> str:
        """The machines."""
        price, kind = self.offer.price, "spot" if self.is_spot else "on-demand"
        return f"{self.num_nodes} x {price.instance_type} {kind} ({price.provider}, {price.region}), {self.lanes} lanes"

    def simulate(self, rates: SpotRates, seed: int = 0) -> "Choice":
        """Return the choice with its outcomes: the policy of least expected cost on drawn availabilities."""
        job, rng = self.job, np.random.default_rng(seed)
        step_s = max(30.0, job.deadline_s / 500)
        steps, policy, outcomes = math.floor(job.deadline_s / step_s), _Given(rates), []
        for _ in range(_DRAWS):
            drawn = replace(job, work_s=job.work_s * max(0.1, 1 + _SPREAD * rng.standard_normal()))
            if self.is_spot:
                outcomes.append(play(drawn, rates.draw(steps, step_s, rng), step_s, policy))
            else:
                time_s = drawn.work_s + drawn.changeover_s
                outcomes.append(Outcome(drawn.on_demand_usd, time_s, 0, 0.0, 0.0, time_s))
        return replace(self, outcomes=tuple(outcomes))


class _Given(ExpectedCost):
    """With rates that are given: nothing is learned, so nothing is solved twice."""

    def see(self, state: State) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class DeadlinePlan:
    """The answer, and the next best."""

    forecast: Forecast
    terms: Terms
    reference: NodeType
    choices: tuple[Choice, ...]
    """Best first."""

    @property
    def best(self) -> Choice:
        """The cheapest that is sure enough; where none is, the surest."""
        return self.choices[0]

    @property
    def is_sure(self) -> bool:
        """Whether the best is in time and within the budget with a probability of `SURE`."""
        return self.best.probability(self.terms.budget_usd) >= SURE

    def lines(self) -> Iterator[str]:
        """As the terminal shows it."""
        best, terms, job = self.best, self.terms, self.best.job
        budget = "" if math.isinf(terms.budget_usd) else f", for at most {terms.budget_usd:.2f} USD"
        interval_s = checkpoint_interval_s(_CHECKPOINT_S, terms.rates.up)
        last = terms.by - dt.timedelta(seconds=job.work_s + job.changeover_s)
        final = "as long as a trial" if terms.final_s is None else f"{duration(terms.final_s)} on its machine, given"
        shown = {
            "deadline": f"{terms.by:%Y-%m-%d %H:%M %Z}, in {duration(terms.deadline_s)}{budget}",
            "choice": best.words if self.is_sure else f"none is sure; the surest is {best.words}",
            "work": f"{duration(job.work_s)}: {self.forecast.trials} trials and the training with the winner",
            "USD": f"{best.usd.mean():.2f} expected, at most {np.quantile(best.usd, 0.95):.2f} in 95 % (with the head)",
            "in time": f"{best.probability():.0%} of {_DRAWS} simulated runs; "
            f"{best.probability(terms.budget_usd):.0%} within the budget as well",
        }
        if best.is_spot:
            shown["checkpoint"] = f"every {duration(interval_s)}: --train.checkpoint.every_s {interval_s:.0f}"
            shown["spot goes"] = (
                "wait while that is expected to cost less, else go on on on-demand machines; with nothing done, these "
                f"run from {last:%Y-%m-%d %H:%M} at the latest, and stay"
            )
        for label, words in shown.items():
            yield f"{label:13}{words}"
        price, home = best.offer.price, self.forecast.on.cluster.region
        spot = "" if best.offer.spot_usd_per_hour is None else f", on spot {best.offer.spot_usd_per_hour:g}"
        yield f"price        {price.usd_per_hour:g} USD/hour{spot}; {price.age(terms.now.date())} ({price.source})"
        others = list(self.choices[1:4])
        others += [one for one in self.choices[4:] if one.offer.price.region == home][: price.region != home]
        for other in others:
            chance = other.probability(terms.budget_usd)
            yield f"{'or':13}{other.words}: {other.usd.mean():.2f} USD, {chance:.0%}"
        yield f"one trial    {duration(self.forecast.trial_s or 0.0)} on {self.reference.instance_type}"
        yield f"assumed      the last training takes {final}; all takes as expected, with a deviation of {_SPREAD:.0%};"
        yield f"             machines are up after {duration(terms.changeover_s)}; speed does not depend on the number"
        yield f"             of lanes; other GPUs as given by --speed ({len(terms.speeds)}), else they are left out"
        if price.region != home:
            yield f"             traffic to the bucket in {home} is not priced; --region {home} leaves all there"
        if not best.offer.head_usd_per_hour:
            yield "             the head costs nothing: its machine has no known price"
        if best.is_spot:
            up, down = duration(terms.rates.up), duration(terms.rates.down)
            yield f"             spot is had for {up}, then not for {down}, in the mean,"
            yield "             all machines at once, at the price above"
        elif not any(one.is_spot for one in self.choices):
            yield "             no price of spot machines is known: give --spot-share"


def plan_by_deadline(forecast: Forecast, terms: Terms) -> DeadlinePlan:
    """Choose machines for what is left of a sweep and the training with its winner.

    Raises ConfigError when the deadline has passed, when a trial's time is not known, or when no machine fits.
    """
    cluster, spec = forecast.on.cluster, forecast.spec
    if terms.deadline_s <= 0:
        raise ConfigError("--deadline", f"{terms.by:%Y-%m-%d %H:%M}", "has passed", "give a time to come")
    if forecast.trial_s is None:
        rule = f"is not known: no trial of {spec.uri} has ended"
        raise ConfigError("--minutes-per-trial", MISSING, rule, "give it, of the cluster file's machine")
    workers = [one for one in cluster.node_types if forecast.held.counts.get(one.name)]
    if not workers or workers[0].instance_type not in load_prices(cluster.provider):
        fix = "name a machine of the price table, or bring it up to date with `python -m cluster prices update`"
        raise ConfigError("--cluster", cluster.source, "has no worker machine with a price", fix)
    found = [one for offer in offers(cluster, workers[0], terms) for one in _choices(forecast, terms, offer)]
    if not found:
        where = f" in {', '.join(terms.regions)}" if terms.regions else ""
        rule = f"fits no machine of {cluster.provider}{where} whose price and speed are known"
        fix = "ask for smaller workers, give --speed MODEL=X, or other regions"
        raise ConfigError("train.scaling", MISSING, rule, fix, spec.source)
    could = [one for one in found if one.job.work_s + one.job.changeover_s <= terms.deadline_s] or found
    could = _cheapest_regions(could, cluster.region)
    spot = [one for one in could if one.is_spot]
    tried = [*spot[:_SIMULATED], *(one for one in could if not one.is_spot)]
    done = [one.simulate(terms.rates) for one in tried]

    def rank(one: Choice) -> tuple[float, float]:
        """Those that are sure by their price; the others after them, the surest first."""
        probability = one.probability(terms.budget_usd)
        return (0.0 if probability >= SURE else 1 - probability), float(one.usd.mean())

    return DeadlinePlan(forecast, terms, workers[0], tuple(sorted(done, key=rank)))


def _cheapest_regions(choices: Iterable[Choice], home: str | None) -> list[Choice]:
    """Of choices that differ by region alone the cheapest, and that of `home`; the cheapest first, of equals `home`'s.

    Rates of preemption are assumed alike in all regions, so that nothing but the price sets these apart.
    """
    seen, kept = set[tuple[str, bool, int]](), []
    for one in sorted(choices, key=lambda one: (round(one.least_usd, 6), one.offer.price.region != home)):
        same = one.offer.price.instance_type, one.is_spot, one.lanes
        if same not in seen or one.offer.price.region == home:
            kept.append(one)
        seen.add(same)
    return kept


def _choices(forecast: Forecast, terms: Terms, offer: Offer) -> Iterator[Choice]:
    """Yield every useful number of one machine, on-demand and spot."""
    on, scaling, trials = forecast.on, forecast.plan.train.scaling, forecast.trials
    node = {"CPU": float(offer.price.vcpus), "GPU": float(offer.price.gpus)}
    slots = worker_slots([node], on.cpus_per_worker, on.gpus_per_worker)
    if not slots:
        return
    trial_s = (forecast.trial_s or 0.0) / offer.speed
    final_s = trial_s if terms.final_s is None else terms.final_s / offer.speed
    final_nodes = math.ceil(scaling.min_workers / slots)
    for lanes in sorted({math.ceil(max(1, trials) / rounds) for rounds in range(1, max(1, trials) + 1)}):
        nodes = math.ceil(lanes * scaling.min_workers / slots)
        if nodes > on.cluster.max_workers:
            break
        sweep_s = math.ceil(trials / lanes) * trial_s
        node_share = (sweep_s * nodes + final_s * final_nodes) / (sweep_s + final_s)  # only those in use are kept
        demand = node_share * offer.price.usd_per_hour
        for spot in (None, offer.spot_usd_per_hour):
            price = demand if spot is None else node_share * spot
            work_s, start_s = sweep_s + final_s, terms.changeover_s
            job = Job(work_s, terms.deadline_s, start_s, price, demand, _CHECKPOINT_S)
            yield Choice(offer, spot is not None, nodes, lanes, job)
            if offer.spot_usd_per_hour is None:
                break
