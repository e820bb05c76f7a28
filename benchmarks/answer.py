"""Does `search: frontier` find the batch size and precision that get there first, and at what cost?

Run as: python -m benchmarks.answer [--keep]
        python -m benchmarks.answer --front [--keep]             several objectives, by benchmarks/front.py
        python -m benchmarks.answer --table FILE [FILE ...]     whole sweeps over any tables, by benchmarks/rerun.py
Replays the search on the frozen tables of benchmarks/ground_truth.py: every trial that it asks for is looked up (of
one seed, drawn anew for each trial of each replay), nothing is trained. Beside it `largest samples/s`, which needs
hardly any training, and random trials for as many samples as the search spent. The truth is the median over seeds of
the samples to the target, at the median throughput. A pick is right where it is within 10 % of the fastest, or where
the bootstrap interval over seeds of their ratio holds 1.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import KEPT, save
from tune.objective import Objective
from tune.search.frontier import Belief, Choice, Ended, Seen, decide
from tune.search.time_model import Place
from tune.trials.interval import APART, Interval
from tune.trials.record import PROBE_SHARE, PROBE_STEPS

REPLAYS = 200
_RIGHT = 1.10
_FIGURES = (
    "frontier_samples_of_grid",
    "finalists_samples_of_grid",
    "frontier_samples_of_grid_stopped_at_target",
    "frontier_whole_trials",
    "rank_correlation",
)
_SETTLED_STEPS = 40  # warm-up and the fewest steps from which a throughput may be settled


@dataclass(frozen=True)
class Table:
    """A frozen ground truth."""

    name: str
    places: list[Place]
    runs: dict[Place, list[dict[str, Any]]]
    """By place, a run a seed."""
    target: float
    metric: str = "val_accuracy"
    """That has to meet the target."""
    configs: dict[Place, dict[str, Any]] = field(default_factory=dict)
    """Keys of the run and their values, by place."""

    def samples(self, run: dict[str, Any]) -> float:
        """Training samples of a whole run."""
        return float(run["curve"][-1][0]) if run["curve"] else 0.0

    def to_target(self, run: dict[str, Any]) -> Interval | None:
        """Samples until the first evaluation that met the target."""
        before, objective = 0.0, Objective(metric=self.metric, target={self.metric: self.target})
        for samples, value, *_ in run["curve"]:
            if objective.reached({self.metric: value}):
                return Interval((before + samples) / 2, before, float(samples))
            before = float(samples)
        return None

    def true_time_s(self, place: Place, runs: list[dict[str, Any]]) -> float:
        """Median samples to the target over runs, at their median throughput."""
        needed = [math.inf if (found := self.to_target(run)) is None else found.high for run in runs]
        rates = [run["samples_per_s"] for run in self.runs[place] if run["curve"]]
        return statistics.median(needed) / statistics.median(rates) if rates else math.inf


def load(name: str) -> Table:
    """Read a table of benchmarks/results."""
    return read(KEPT / f"ground-truth-{name}.json")


def read(path: Path) -> Table:
    """Read a table of curves; benchmarks/README.md has its format."""
    tree = json.loads(path.read_text())
    runs: dict[Place, list[dict[str, Any]]] = {}
    configs: dict[Place, dict[str, Any]] = {}
    for run in tree["runs"]:
        own = run.get("config", {})
        others = ", ".join(f"{key} {value}" for key, value in own.items())
        setting = ", ".join(part for part in (run.get("precision", "fp32"), others) if part)
        place = Place(setting, others or "all", run["global_batch_size"])
        runs.setdefault(place, []).append(run)
        configs[place] = {"global_batch_size": place.size, "precision": run.get("precision", "fp32"), **own}
    order = list(dict.fromkeys(place.setting for place in runs))
    first = tree.get("precisions", [])
    order.sort(key=lambda setting: first.index(setting) if setting in first else len(first))
    places = sorted(runs, key=lambda place: (order.index(place.setting), place.size))
    [(metric, target)] = tree["target"].items()
    return Table(path.stem.removeprefix("ground-truth-"), places, runs, target, metric, configs)


def look_up(table: Table, choice: Choice, rng: random.Random) -> Seen:
    """What the trial would have shown, and what it would have cost."""
    place, run = choice.place, rng.choice(table.runs[choice.place])
    if not run["curve"]:
        return Seen(place, choice.purpose, 10.0 * place.size, None, status="diverged")
    whole, rate = table.samples(run), run["samples_per_s"]
    width = min(0.5, run["step_time_ci95_s"] / run["step_time_s"]) if run.get("step_time_s") else 0.0
    speed = Interval(rate, rate * (1 - width), rate * (1 + width))
    noise = (run.get("noise_scale") or {}).get("value")
    if choice.purpose == "probe":
        used = max(PROBE_STEPS * place.size, min(PROBE_SHARE * whole, _SETTLED_STEPS * place.size))
        return Seen(place, "probe", min(used, whole), whole, None, speed)
    found = table.to_target(run)
    return Seen(place, choice.purpose, found.high if found else whole, whole, found, speed, noise)


def search(table: Table, seed: int) -> tuple[Place | None, list[Seen], str]:
    """One replay of the search: its pick, its trials, and why it ended."""
    rng, seen = random.Random(seed), list[Seen]()
    while True:
        step = decide(table.places, seen, [])
        if isinstance(step, Choice):
            seen.append(look_up(table, step, rng))
            continue
        assert isinstance(step, Ended)
        belief = Belief(table.places, seen)
        return (None if belief.best is None else table.places[belief.best]), seen, step.reason


def with_finalists(table: Table, seed: int, seen: list[Seen]) -> tuple[Place | None, float]:
    """The pick after two repeats each of the three fastest trials within `APART` of the first, and what those cost."""
    rng = random.Random(-seed - 1)
    times = {
        one.place: one.samples_to_target.high / one.samples_per_s.value
        for one in seen
        if one.samples_to_target and one.samples_per_s
    }
    near = sorted((place for place in times if times[place] <= APART * min(times.values())), key=lambda p: times[p])[:3]
    if len(near) < 2:
        return next(iter(near), None), 0.0
    repeats = {place: [look_up(table, Choice(place, "repeat"), rng) for _ in range(2)] for place in near}
    means: dict[Place, float] = {}
    for place, rows in repeats.items():
        found = [one.samples_to_target.high / one.samples_per_s.value for one in rows if _reached(one)]  # type: ignore[union-attr]
        means[place] = statistics.geometric_mean(found) if found else math.inf
    return min(means, key=lambda place: means[place]), sum(one.samples for rows in repeats.values() for one in rows)


def _reached(one: Seen) -> bool:
    return one.samples_to_target is not None and one.samples_per_s is not None


def at_random(table: Table, seed: int, budget: float) -> Place | None:
    """Whole trials in random order until the budget is spent; the one that was fastest."""
    rng, spent, times = random.Random(seed), 0.0, {}
    for place in rng.sample(table.places, len(table.places)):
        one = look_up(table, Choice(place, "trial"), rng)
        if spent + one.samples > budget and times:
            break
        spent += one.samples
        if one.samples_to_target and one.samples_per_s:
            times[place] = one.samples_to_target.high / one.samples_per_s.value
    return min(times, key=lambda place: times[place], default=None)


def is_right(table: Table, place: Place | None, truth: dict[Place, float]) -> tuple[bool, bool, float]:
    """Whether a pick is right, whether it is within 10 %, and its ratio to the fastest."""
    best = min(truth, key=lambda one: truth[one])
    if place is None or math.isinf(truth[place]):
        return False, False, math.inf
    ratio = truth[place] / truth[best]
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(500):
        pair = []
        for one in (place, best):
            runs = table.runs[one]
            pair.append(table.true_time_s(one, [runs[at] for at in rng.integers(len(runs), size=len(runs))]))
        ratios.append(pair[0] / pair[1] if math.isfinite(pair[1]) else 1.0)
    return ratio <= _RIGHT or float(np.quantile(ratios, 0.025)) <= 1.0, ratio <= _RIGHT, ratio


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's; equal values share their rank."""

    def ranks(values: list[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def judge(table: Table, replays: int = REPLAYS) -> dict[str, Any]:
    """All searches on one table."""
    truth = {place: table.true_time_s(place, table.runs[place]) for place in table.places}
    whole = sum(statistics.mean(table.samples(run) for run in table.runs[place]) for place in table.places)
    stopped = sum(
        statistics.mean(found.high if (found := table.to_target(run)) else table.samples(run) for run in runs)
        for runs in table.runs.values()
    )
    verdicts = {place: is_right(table, place, truth) for place in [*table.places, None]}
    found = [search(table, seed) for seed in range(replays)]
    costs = [sum(one.samples for one in seen) for _, seen, _ in found]
    beliefs = [[one.value for one in Belief(table.places, seen).times()] for _, seen, _ in found]
    rates = {p: [run["samples_per_s"] for run in table.runs[p] if run["curve"]] for p in table.places}
    largest = max((p for p in table.places if rates[p]), key=lambda place: statistics.median(rates[place]))
    final = [with_finalists(table, seed, seen) for seed, (_, seen, _) in enumerate(found)]
    rows: dict[str, list[Place | None]] = {
        "frontier": [pick for pick, _, _ in found],
        "with finalists": [pick for pick, _ in final],
        "largest samples/s": [largest],
        "random": [at_random(table, seed, cost) for seed, cost in enumerate(costs)],
    }
    return {
        "best": _name(min(truth, key=lambda place: truth[place])),
        "true_time_s": {_name(place): round(value, 4) for place, value in truth.items()},
        "searches": {name: _summary(picks, verdicts) for name, picks in rows.items()},
        "frontier_samples_of_grid": _spread([cost / whole for cost in costs]),
        "finalists_samples_of_grid": _spread([cost / whole for _, cost in final]),
        "frontier_samples_of_grid_stopped_at_target": _spread([cost / stopped for cost in costs]),
        "frontier_whole_trials": _spread([sum(one.purpose == "trial" for one in seen) for _, seen, _ in found]),
        "frontier_ended": dict(Counter(reason.split(";")[0] for *_, reason in found)),
        "rank_correlation": _spread([rank_correlation(row, [truth[p] for p in table.places]) for row in beliefs]),
    }


def _name(place: Place) -> str:
    return f"{place.size}, {place.setting}"


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _summary(picks: list[Place | None], verdicts: dict[Place | None, tuple[bool, bool, float]]) -> dict[str, Any]:
    rows = [verdicts[pick] for pick in picks]
    return {
        "right": statistics.mean(row[0] for row in rows),
        "within_10_percent": statistics.mean(row[1] for row in rows),
        "ratio_median": statistics.median(row[2] for row in rows),
        "ratio_worst": max(row[2] for row in rows),
        "picks": dict(Counter("none" if pick is None else _name(pick) for pick in picks).most_common()),
    }


def main(keep: bool) -> None:
    """Every table that is there."""
    results = {}
    for path in sorted(KEPT.glob("ground-truth-*.json")):
        name = path.stem.removeprefix("ground-truth-")
        results[name] = found = judge(load(name))
        print(f"\n{name}: the fastest is {found['best']}")
        for search_name, row in found["searches"].items():
            print(
                f"  {search_name:18} right {row['right']:4.0%}   within 10 % {row['within_10_percent']:4.0%}   "
                f"time / best: median {row['ratio_median']:.2f}, worst {row['ratio_worst']:.2f}"
            )
        for figure in _FIGURES:
            spread = found[figure]
            print(f"  {figure:44} {spread['median']:.2f} [{spread['min']:.2f}, {spread['max']:.2f}]")
        print(f"  ended: {found['frontier_ended']}")
    print(f"\nkept in {save('answer', results, keep)}")


if __name__ == "__main__":
    if "--table" in sys.argv:
        from benchmarks.rerun import replay_tables

        files = [Path(arg) for arg in sys.argv[sys.argv.index("--table") + 1 :] if not arg.startswith("--")]
        replay_tables(files, REPLAYS, "--keep" in sys.argv)
    elif "--front" in sys.argv:
        from benchmarks import front

        front.main("--keep" in sys.argv)
    else:
        main("--keep" in sys.argv)
