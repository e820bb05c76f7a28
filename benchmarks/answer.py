"""Does a sweep name the fastest configuration, again and again, with true claims?

Run as: python -m benchmarks.answer [TABLE.json ...] [--keep] Replays 200 sweeps by grid
over tables of curves (benchmarks/README.md has their format), or over the frozen ones
of benchmarks/results: nothing is trained. A replayed sweep is a sweep's own code (its
race of finalists, its answer) over records that are drawn: the samples to the target of
a configuration are log-normal, about the geometric mean of the table's seeds and with
the spread that they have within configurations; the throughput and the curve, stretched
to that, are a seed's. The truth is the geometric mean at the median throughput.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import KEPT, save
from tune.config import SweepConfig
from tune.report.answer import Answer, answer
from tune.search.finalists import repeats_to_run
from tune.trials.record import EQUAL, Purpose, TrialRecord, time_to_target, trial_id

REPLAYS = 200


class Table:
    """Runs of each configuration, a seed each, and their times to the target."""

    def __init__(self, path: Path) -> None:
        tree = json.loads(path.read_text())
        [(self.metric, self.target)] = tree["target"].items()
        self.configs: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for run in tree["runs"]:
            config = {
                "global_batch_size": run["global_batch_size"],
                "precision": run.get("precision", "fp32"),
            }
            config |= run.get("config", {})
            name = trial_id(config)
            self.configs[name] = config
            self.runs.setdefault(name, []).append(run)
        keys = dict.fromkeys(key for config in self.configs.values() for key in config)
        space = {
            key: list(
                dict.fromkeys(config.get(key) for config in self.configs.values())
            )
            for key in keys
        }
        objective = {"metric": "time_to_target", "target": tree["target"]}
        self.sweep = SweepConfig.model_validate(
            {"train": {"task": path.stem}, "space": space, "objective": objective}
        )
        self.rates = {
            name: [run["samples_per_s"] for run in runs if run["curve"]]
            for name, runs in self.runs.items()
        }
        logs = {
            name: [math.log(one) for one in self._needed(name)] for name in self.runs
        }
        self.means = {name: statistics.fmean(own) for name, own in logs.items() if own}
        squares = [statistics.variance(own) for own in logs.values() if len(own) > 1]
        self.spread = math.sqrt(statistics.fmean(squares)) if squares else 0.0
        self.truth = {
            name: math.exp(mean) / statistics.median(self.rates[name])
            for name, mean in self.means.items()
        }

    def samples_to_target(self, run: dict[str, Any]) -> float | None:
        """Samples at the first evaluation that met the target."""
        for samples, value, *_ in run["curve"]:
            if self.sweep.objective.reached({self.metric: value}):
                return float(samples)
        return None

    def _needed(self, name: str) -> list[float]:
        """Return the samples to the target of each seed.

        For a seed that did not meet it: all that it had.
        """
        runs = [run for run in self.runs[name] if run["curve"]]
        return [
            self.samples_to_target(run) or float(run["curve"][-1][0]) for run in runs
        ]

    def whole_samples(self) -> float:
        """Samples of training every configuration once to its last step."""
        return sum(
            statistics.mean(run["curve"][-1][0] if run["curve"] else 0 for run in runs)
            for runs in self.runs.values()
        )

    def record(
        self,
        name: str,
        rng: random.Random,
        purpose: Purpose = "trial",
        seed: int | None = None,
    ) -> TrialRecord:
        """Draw what a trial to the target shows."""
        config = self.configs[name]
        run = rng.choice(self.runs[name])
        rate = rng.choice(self.rates[name] or [1.0])
        found = self.samples_to_target(run)
        stretch = (
            1.0
            if found is None
            else math.exp(self.means[name] + rng.gauss(0, self.spread)) / found
        )
        size = config["global_batch_size"]
        curve = []
        for samples, value, *_ in run["curve"]:
            trained = samples * stretch
            curve.append(
                {
                    "step": trained / size,
                    "train_time_s": trained / rate,
                    self.metric: float(value),
                }
            )
        time_s = time_to_target(self.sweep.objective, curve)
        curve = [
            row for row in curve if time_s is None or row["train_time_s"] <= time_s
        ]
        return TrialRecord(
            trial_id(config, purpose, seed),
            config,
            "done" if curve else "diverged",
            0.0,
            curve[-1]["train_time_s"] if curve else 0.0,
            samples_per_s=rate,
            curve=curve,
            time_to_target_s=time_s,
            purpose=purpose,
            seed=seed,
            samples=curve[-1]["step"] * size if curve else 0.0,
        )


@dataclass(frozen=True)
class Sweep:
    """One sweep that has ended."""

    answer: Answer
    samples: float
    """That it trained on, repeats included."""
    num_repeats: int

    @property
    def pick(self) -> str | None:
        """The configuration that it names."""
        return self.answer.best.id if self.answer.best else None

    def excludes(self, configuration: str | None) -> bool:
        """Whether it says that a configuration is slower than its own pick."""
        return configuration in {
            final.record.id for final in self.answer.finals if not final.equal
        }


def sweep(table: Table, seed: int) -> Sweep:
    """Replay one sweep."""
    rng = random.Random(seed)
    records = [table.record(name, rng) for name in table.configs]
    while wanted := repeats_to_run(table.sweep, {}, records):
        records += [
            table.record(finalist.id, rng, "repeat", number)
            for finalist, number in wanted
        ]
    samples = sum(record.samples or 0.0 for record in records)
    return Sweep(
        answer(table.sweep, records), samples, len(records) - len(table.configs)
    )


def judge(table: Table, count: int = REPLAYS) -> dict[str, Any]:
    """Replay `count` sweeps; returns what they say, and how often that is true."""
    sweeps = [sweep(table, seed) for seed in range(count)]
    best_s = min(table.truth.values())
    regrets = [table.truth.get(one.pick or "", math.inf) / best_s for one in sweeps]
    ahead = [one.answer.most_ahead or math.inf for one in sweeps]
    bounds = list(zip(regrets, ahead, strict=True))
    claims = [regret <= 1 + EQUAL for regret, most in bounds if most <= 1 + EQUAL]
    return agreement(sweeps) | {
        "spread": table.spread,
        "regret_median": statistics.median(regrets),
        "within_5_percent": statistics.mean(regret <= 1 + EQUAL for regret in regrets),
        "regret_worst": max(regrets),
        "bound_holds": statistics.mean(
            regret <= most * (1 + 1e-9) for regret, most in bounds
        ),
        "bound_median": statistics.median(ahead),
        "claims_5_percent": len(claims) / count,
        "claims_true": statistics.mean(claims) if claims else None,
        "samples_of_grid": statistics.median(one.samples for one in sweeps)
        / table.whole_samples(),
        "repeats_median": statistics.median(one.num_repeats for one in sweeps),
    }


def agreement(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Return how often sweeps of one kind agree.

    `same_or_equal`: of all pairs, those with one winner, or of which one does not call
    the other's winner slower. `names_the_usual`: sweeps that name the winner that most
    name, or do not call it slower.
    """
    pairs = [
        (one, other) for at, one in enumerate(sweeps) for other in sweeps[at + 1 :]
    ]
    picks = Counter(one.pick for one in sweeps)
    usual = picks.most_common(1)[0][0]
    same = [one.pick == other.pick for one, other in pairs]
    disagree = [
        one.excludes(other.pick) and other.excludes(one.pick) for one, other in pairs
    ]
    return {
        "sweeps": len(sweeps),
        "winners": len(picks),
        "same_winner": statistics.mean(same),
        "same_or_equal": statistics.mean(
            is_same or not no for is_same, no in zip(same, disagree, strict=True)
        ),
        "names_the_usual": statistics.mean(not one.excludes(usual) for one in sweeps),
    }


def main() -> None:
    """Judge each table, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", type=Path, default=sorted(KEPT.glob("ground-truth-*.json"))
    )
    parser.add_argument("--keep", action="store_true", help="into benchmarks/results")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for path in args.tables:
        name = path.stem.removeprefix("ground-truth-")
        found = results[name] = judge(Table(path))
        print(f"\n{name}: {REPLAYS} sweeps by grid")
        for figure, value in found.items():
            print(f"  {figure:20} {'-' if value is None else f'{value:.3g}'}")
    print(f"\nkept in {save('answer', results, args.keep)}")


if __name__ == "__main__":
    main()
