"""Does `search: frontier` with several objectives find the Pareto front, and at what cost?

Run as: python -m benchmarks.answer --front [--keep]
Replays searches over the frozen tables of benchmarks/ground_truth.py, extended by memory and price: the peak of memory
of each batch size and precision is what fake steps of the table's own task say (trainers/loop/memory_forecast.py), the
same on every machine; a lane costs one dollar an hour. What counts is the share of the hypervolume of the whole grid
that the trials of a search have, by the medians over seeds of the figures, in logarithms and as they are; the
hypervolume ends at 1.1 times the worst of the grid. It is set against the samples that the grid needs, trained to the
end, and where each trial ends at its target. Every trial that a finished one is certain to beat ends there.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.answer import REPLAYS, Table, load, look_up
from benchmarks.ground_truth import WORK
from benchmarks.measure import save
from tune.objective import Objective
from tune.search.front import beaten_by, front
from tune.search.front_belief import FrontBelief
from tune.search.frontier import Choice, Seen, decide
from tune.search.time_model import Place
from tune.trials.interval import dollars
from tune.trials.record import TrialRecord

METRICS = ["time_to_target", "peak_memory_bytes", "usd_to_target"]
_USD_PER_HOUR = 1.0
Costs = NDArray[np.float64]


def peaks(table: Table) -> dict[Place, float]:
    """Return the peak of memory of each place, bytes."""
    from trainers.config import TrainConfig
    from trainers.config.model import build
    from trainers.devices.group import Group
    from trainers.loop.memory_forecast import Forecaster

    plan, found = WORK[table.name], {}
    group = Group(0, 1, torch.device("cpu"))
    for precision in dict.fromkeys(place.setting for place in table.places):
        sizes = [place.size for place in table.places if place.setting == precision]
        tree = {"task": f"benchmarks.ground_truth:{plan['task'].__name__}", **plan["train"]}
        tree |= {"global_batch_size": max(sizes), "precision": precision, "launcher": "local", "device": "cpu"}
        config = build(TrainConfig, tree, "front")
        forecast = Forecaster(plan["task"], config, plan["task"]().dataset("train"), group)
        found |= {Place(precision, "all", size): float(forecast.peak(size)) for size in sizes}
    return found


class Trials:
    """The trials of one replay: each is looked up, and ends where a finished one is certain to beat it."""

    def __init__(self, table: Table, memory: dict[Place, float], seed: int) -> None:
        self.table, self.memory, self.rng = table, memory, random.Random(seed)
        goal = {table.metric: table.target}
        self.objective = Objective.model_validate({"metrics": METRICS, "target": goal})
        self.seen: list[Seen] = []
        self.places: dict[str, Place] = {}
        """Of the records, by id."""
        self.num_beaten = 0
        self.records: list[TrialRecord] = []
        self.samples = 0.0

    def run(self, choice: Choice) -> list[float]:
        """Run one; returns its figures, inf where it did not get to the target."""
        state, place = self.rng.getstate(), choice.place
        found = replace(look_up(self.table, choice, self.rng), peak_memory_bytes=self.memory[place])
        self.rng.setstate(state)
        run = self.rng.choice(self.table.runs[place])
        if choice.purpose == "trial":
            found = self._ended(found, run)
        self.seen.append(found)
        self.samples += found.samples
        if not found.samples_to_target or not found.samples_per_s:
            return [math.inf] * len(self.objective.decisive)
        return self.figures(place, found.samples_to_target.high / found.samples_per_s.value)

    def figures(self, place: Place, time_s: float) -> list[float]:
        """Return what a trial that takes so long has of each metric."""
        return [time_s, self.memory[place], dollars(time_s, _USD_PER_HOUR)]

    def _ended(self, found: Seen, run: dict[str, Any]) -> Seen:
        """Let a trial end where it is certain to be beaten; note the record of one that ended at its target."""
        curve: list[dict[str, float]] = []
        for samples, value, *_ in run["curve"]:
            row = {"train_time_s": samples / run["samples_per_s"], "peak_memory_bytes": self.memory[found.place]}
            curve.append({**row, self.table.metric: value})
            if self.objective.reached(curve[-1]):
                time_s, peak, usd = self.figures(found.place, curve[-1]["train_time_s"])
                name, usd_to = f"t{len(self.records)}", {"usd_to_target": usd}
                self.places[name] = found.place
                ended = {"time_to_target_s": time_s, "peak_memory_bytes": int(peak), "metrics": usd_to}
                record = TrialRecord(name, {}, "done", 0.0, 1.0, curve=list(curve), **ended)
                self.records.append(record)
                return found
            if beaten_by(self.objective, curve, self.records, _USD_PER_HOUR):
                self.num_beaten += 1
                return replace(found, samples=float(samples), samples_to_target=None, status="stopped")
        return found


def by_frontier(trials: Trials, budget: float) -> None:
    """`search: frontier`, until it ends by itself."""
    make = functools.partial(FrontBelief, METRICS)
    while isinstance(step := decide(trials.table.places, trials.seen, [], (), make), Choice):
        trials.run(step)


def at_random(trials: Trials, budget: float) -> None:
    """Trials in random order until the budget is spent."""
    places = list(trials.table.places)
    trials.rng.shuffle(places)
    for place in places:
        if trials.samples >= budget:
            return
        trials.run(Choice(place, "trial"))


def by_optuna(trials: Trials, budget: float) -> None:
    """`search: optuna`, until the budget is spent or it only repeats itself: a trial is made once."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    places, tried = trials.table.places, dict[Place, list[float]]()
    settings = sorted({place.setting for place in places})
    sizes = sorted({place.size for place in places})
    sampler = optuna.samplers.TPESampler(seed=trials.rng.randrange(2**31))
    study = optuna.create_study(directions=["minimize"] * len(METRICS), sampler=sampler)
    for _ in range(4 * len(places)):
        if trials.samples >= budget:
            return
        trial = study.ask()
        size = trial.suggest_categorical("global_batch_size", sizes)
        place = Place(trial.suggest_categorical("precision", settings), "all", size)
        if place not in tried:
            tried[place] = trials.run(Choice(place, "trial"))
        study.tell(trial, tried[place])


def hypervolume(costs: Costs, reference: Costs) -> float:
    """Return the volume [m dimensions] that points [n, m] dominate below a reference [m], slice by slice."""
    costs = costs[(costs < reference).all(axis=1)]
    if not len(costs):
        return 0.0
    if costs.shape[1] == 1:
        return float(reference[0] - costs.min())
    costs = costs[np.argsort(costs[:, -1], kind="stable")]
    ends = np.append(costs[1:, -1], reference[-1])
    slices = [
        (end - row[-1]) * hypervolume(costs[: at + 1, :-1], reference[:-1])
        for at, (row, end) in enumerate(zip(costs, ends, strict=True))
        if end > row[-1]
    ]
    return float(sum(slices))


def judge(table: Table, replays: int) -> dict[str, Any]:
    """All searches on one table."""
    memory = peaks(table)
    ask = Trials(table, memory, 0)
    true = {place: np.array(ask.figures(place, table.true_time_s(place, table.runs[place]))) for place in table.places}
    finite = np.array([row for row in true.values() if np.isfinite(row).all()])
    worst = finite.max(axis=0) * 1.1

    def share(places: Iterable[Place], count: int, scale: Any = np.log) -> float:
        own = np.array([true[place] for place in places if np.isfinite(true[place]).all()]).reshape(-1, len(METRICS))
        volumes = [hypervolume(scale(rows[:, :count]), scale(worst[:count])) for rows in (own, finite)]
        return volumes[0] / volumes[1]

    whole = sum(statistics.mean(table.samples(run) for run in runs) for runs in table.runs.values())
    at_target = sum(
        statistics.mean(found.high if (found := table.to_target(run)) else table.samples(run) for run in runs)
        for runs in table.runs.values()
    )
    searches: dict[str, Callable[[Trials, float], None]] = {"frontier": by_frontier}
    searches |= {"optuna, as long": by_optuna, "random, as long": at_random}
    found: dict[str, Any] = {}
    budgets = [math.inf] * replays
    for name, run in searches.items():
        replayed = [Trials(table, memory, seed) for seed in range(replays)]
        for trials, budget in zip(replayed, budgets, strict=True):
            run(trials, budget)
        if name == "frontier":
            budgets = [trials.samples for trials in replayed]
        tried = [[trials.places[record.id] for record in trials.records] for trials in replayed]
        members = [front(trials.objective, trials.records) for trials in replayed]
        shares = [share(own, 2) for own in tried]
        found[name] = {
            "hypervolume_share": _spread(shares),
            "at_least_0.97": statistics.mean(one >= 0.97 for one in shares),
            "not_in_logarithms": _spread([share(own, 2, np.asarray) for own in tried]),
            "with_dollars": _spread([share(own, len(METRICS)) for own in tried]),
            "of_trials_named_front": _spread(
                [
                    share((t.places[m.record.id] for m in own if m.is_on_front), 2)
                    for t, own in zip(replayed, members, strict=True)
                ]
            ),
            "of_trials_that_may_belong": _spread(
                [share((t.places[m.record.id] for m in own), 2) for t, own in zip(replayed, members, strict=True)]
            ),
            "samples_of_grid": _spread([trials.samples / whole for trials in replayed]),
            "samples_of_grid_to_target": _spread([trials.samples / at_target for trials in replayed]),
            "trials_to_target": _spread([len(trials.records) for trials in replayed]),
            "trials_ended_as_beaten": _spread([trials.num_beaten for trials in replayed]),
        }
    return {
        "true_time_s_and_peak_mib": {
            f"{place.size}, {place.setting}": [round(float(row[0]), 4), round(float(row[1]) / 2**20, 3)]
            for place, row in true.items()
        },
        "searches": found,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return {"mean": statistics.fmean(values), "median": float(middle), "p05": float(low), "p95": float(high)}


def main(keep: bool, replays: int = REPLAYS) -> None:
    """Every table of whose task the memory can be told."""
    results = {}
    for name in WORK:
        results[name] = found = judge(load(name), replays)
        print(f"\n{name}, {replays} replays: mean [5 %, 95 %]")
        for search, row in found["searches"].items():
            print(f"  {search}   at least 0.97 in {row['at_least_0.97']:.0%}")
            for figure, spread in row.items():
                if isinstance(spread, dict):
                    print(f"    {figure:28} {spread['mean']:.3f} [{spread['p05']:.3f}, {spread['p95']:.3f}]")
    print(f"\nkept in {save('front', results, keep)}")
