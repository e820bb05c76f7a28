"""Does a sweep name the fastest configuration every time, and are its claims true?

Run as: python -m benchmarks.answer [TABLE.json ...] [--keep]

Replays 200 sweeps by grid over each given table of curves (benchmarks/README.md
has the format), or over each table in benchmarks/results. Nothing is trained.

A replayed sweep runs a sweep's own code (the race of finalists and the answer)
on trial records that are drawn at random. A configuration's number of samples
to the target is drawn from a log-normal distribution. Its geometric mean is that
of the configuration's seeds in the table, and its spread is that of seeds
within a configuration. The throughput is that of a random seed. The curve is
also that of a random seed, stretched to the drawn number of samples. The true
time to the target is the geometric mean of the samples, divided by the median
throughput.
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
from tune.trials.record import (
    EQUAL,
    Purpose,
    TrialRecord,
    time_to_target,
    trial_id,
)

REPLAYS = 200


class Table:
    """The runs of each configuration, one per seed, and the true times to the target."""

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
        keys = dict.fromkeys(
            key for config in self.configs.values() for key in config
        )
        space = {
            key: list(
                dict.fromkeys(
                    config.get(key) for config in self.configs.values()
                )
            )
            for key in keys
        }
        objective = {"metric": "time_to_target", "target": tree["target"]}
        self.sweep = SweepConfig.model_validate(
            {
                "train": {"task": path.stem},
                "space": space,
                "objective": objective,
            }
        )
        self.rates = {
            name: [run["samples_per_s"] for run in runs if run["curve"]]
            for name, runs in self.runs.items()
        }
        logs = {
            name: [math.log(one) for one in self._needed(name)]
            for name in self.runs
        }
        self.means = {
            name: statistics.fmean(own) for name, own in logs.items() if own
        }
        squares = [
            statistics.variance(own) for own in logs.values() if len(own) > 1
        ]
        self.spread = math.sqrt(statistics.fmean(squares)) if squares else 0.0
        self.truth = {
            name: math.exp(mean) / statistics.median(self.rates[name])
            for name, mean in self.means.items()
        }

    def samples_to_target(self, run: dict[str, Any]) -> float | None:
        """Return the samples at a run's first evaluation that met the target, if any."""
        for samples, value, *_ in run["curve"]:
            if self.sweep.objective.reached({self.metric: value}):
                return float(samples)
        return None

    def _needed(self, name: str) -> list[float]:
        """Return the samples that each seed of a configuration took to the target.

        A seed that did not meet the target counts with all samples of its run.
        """
        runs = [run for run in self.runs[name] if run["curve"]]
        return [
            self.samples_to_target(run) or float(run["curve"][-1][0])
            for run in runs
        ]

    def whole_samples(self) -> float:
        """Return how many samples the grid takes if every trial runs to its last step."""
        return sum(
            statistics.mean(
                run["curve"][-1][0] if run["curve"] else 0 for run in runs
            )
            for runs in self.runs.values()
        )

    def record(
        self,
        name: str,
        rng: random.Random,
        purpose: Purpose = "trial",
        seed: int | None = None,
    ) -> TrialRecord:
        """Draw the record of a trial that ends at the target."""
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
            row
            for row in curve
            if time_s is None or row["train_time_s"] <= time_s
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
    """A sweep that was replayed."""

    answer: Answer
    samples: float
    """The number of samples that the sweep trained on, including repeats."""
    num_repeats: int

    @property
    def pick(self) -> str | None:
        """The ID of the configuration that the sweep names as best."""
        return self.answer.best.id if self.answer.best else None

    def excludes(self, configuration: str | None) -> bool:
        """Return whether the sweep says that a configuration is slower than its pick."""
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
        answer(table.sweep, records),
        samples,
        len(records) - len(table.configs),
    )


def judge(table: Table, count: int = REPLAYS) -> dict[str, Any]:
    """Replay `count` sweeps; return what they say, and how often that is true."""
    sweeps = [sweep(table, seed) for seed in range(count)]
    best_s = min(table.truth.values())
    regrets = [
        table.truth.get(one.pick or "", math.inf) / best_s for one in sweeps
    ]
    ahead = [one.answer.most_ahead or math.inf for one in sweeps]
    bounds = list(zip(regrets, ahead, strict=True))
    claims = [
        regret <= 1 + EQUAL for regret, most in bounds if most <= 1 + EQUAL
    ]
    return agreement(sweeps) | {
        "spread": table.spread,
        "regret_median": statistics.median(regrets),
        "within_5_percent": statistics.mean(
            regret <= 1 + EQUAL for regret in regrets
        ),
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
    """Return how often sweeps over the same table agree.

    `same_winner` is the share of pairs of sweeps with the same winner.
    `same_or_equal` also counts a pair if at least one of its sweeps does not
    call the other's winner slower. `names_the_usual` is the share of sweeps
    that do not call the most frequent winner slower.
    """
    pairs = [
        (one, other)
        for at, one in enumerate(sweeps)
        for other in sweeps[at + 1 :]
    ]
    picks = Counter(one.pick for one in sweeps)
    usual = picks.most_common(1)[0][0]
    same = [one.pick == other.pick for one, other in pairs]
    disagree = [
        one.excludes(other.pick) and other.excludes(one.pick)
        for one, other in pairs
    ]
    return {
        "sweeps": len(sweeps),
        "winners": len(picks),
        "same_winner": statistics.mean(same),
        "same_or_equal": statistics.mean(
            is_same or not no
            for is_same, no in zip(same, disagree, strict=True)
        ),
        "names_the_usual": statistics.mean(
            not one.excludes(usual) for one in sweeps
        ),
    }


def main() -> None:
    """Judge each table, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tables",
        nargs="*",
        type=Path,
        default=sorted(KEPT.glob("ground-truth-*.json")),
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
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
