"""Does a sweep that runs again name the same winner, or call both equal? Are its claims true?

Run as: python -m benchmarks.answer --table FILE [FILE ...]     replays over tables of curves: nothing is trained
        python -m benchmarks.rerun [--sweeps 10] [--repeats 15] [--tasks digits ...] [--go-on] [--keep]
The latter is for a quiet machine.

A replayed sweep is a sweep's own code (its search, its race of finalists, its answer) over records that are drawn: the
samples to the target of a configuration are log-normal, about the geometric mean of the table's seeds and with the
spread that they have within configurations; the throughput is a seed's. The curve is a seed's, stretched to that. The
truth is the geometric mean at the median throughput.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.answer import Table, look_up, read
from benchmarks.ground_truth import WORK
from benchmarks.measure import earlier, save
from trainers.config.yaml import dump_yaml
from tune.config import SweepConfig
from tune.report.answer import Answer, answer
from tune.search.finalists import repeats_to_run
from tune.search.frontier import Choice, Ended, Seen, decide
from tune.search.time_model import Place
from tune.trials.interval import EQUAL, Interval
from tune.trials.journal import trial_id
from tune.trials.record import Purpose, TrialRecord, time_to_target

SEARCHES = ("grid", "frontier")
PRECISIONS = ["fp32", "bf16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["fp32"]
"""A processor that emulates bf16 takes many times as long in it, which no sweep has to find out ten times."""
TASKS: dict[str, tuple[dict[str, Any], dict[str, list[Any]], dict[str, float]]] = {
    "digits": (
        {"task": "examples.digits.task:Digits", "epochs": 15, **WORK["digits"]["train"]},
        {"global_batch_size": [16, 32, 64, 128], "precision": PRECISIONS},
        {"val_accuracy": 0.97},
    ),
    "digits-sgd": (
        {
            "task": "examples.digits.task:Digits",
            "epochs": 15,
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
            "lr_scaling": {"rule": "linear", "base_batch_size": 64},
        },
        {"global_batch_size": [16, 32, 64, 128]},
        {"val_accuracy": 0.95},
    ),
    "rows": (
        {"task": "benchmarks.ground_truth:NoisyRows", **WORK["rows"]["train"]},
        {"global_batch_size": [96, 200, 400, 800]},
        {"val_accuracy": 0.775},
    ),
    "rows-adamw": (
        {"task": "benchmarks.ground_truth:NoisyRows", "epochs": 6, "optimizer": {"name": "adamw", "lr": 0.001}},
        {"global_batch_size": [48, 96, 200, 400], "precision": PRECISIONS},
        {"val_accuracy": 0.775},
    ),
    "clusters": (
        {"task": "benchmarks.sweep:Rows", "epochs": 12, "optimizer": {"name": "adamw", "lr": 0.001}},
        {"global_batch_size": [16, 32, 64, 128, 256]},
        {"val_loss": 0.9},
    ),
}
"""Of each small task the run, the space and the target."""
_LANES = 5
_FEWEST = 8
"""Repeats that tell a median."""


def values_of(config: dict[str, Any]) -> str:
    """Return the values of a configuration, which tell it from others whatever its seed and its trial's purpose."""
    return " ".join(str(value) for key, value in config.items() if key != "seed")


@dataclass(frozen=True)
class Sweep:
    """One sweep that has ended."""

    answer: Answer
    samples: float
    """That it trained on, repeats included."""
    num_repeats: int
    tried: frozenset[str] = frozenset()
    """The configurations that it tried, which are what its answer is about."""
    ended: str = ""
    """Why search frontier ended."""

    @property
    def pick(self) -> str | None:
        """The configuration that it names."""
        return values_of(self.answer.best.config) if self.answer.best else None

    def excludes(self, configuration: str | None) -> bool:
        """Whether it says that a configuration is slower than its own pick."""
        return configuration in {values_of(final.record.config) for final in self.answer.finals if not final.equal}


class Replay:
    """Sweeps over a table."""

    def __init__(self, table: Table, search: str) -> None:
        self.table, self.search = table, search
        self.settings = table.configs
        keys = dict.fromkeys(key for one in self.settings.values() for key in one)
        space = {key: list(dict.fromkeys(one[key] for one in self.settings.values() if key in one)) for key in keys}
        self.config = SweepConfig.model_validate(
            {
                "train": {"task": table.name},
                "space": space,
                "search": search,
                "objective": {"metric": "time_to_target", "target": {table.metric: table.target}},
            }
        )
        self.rates = {
            place: [run["samples_per_s"] for run in table.runs[place] if run["curve"]] for place in table.places
        }
        logs = {place: [math.log(one) for one in _needed(table, place)] for place in table.places}
        self.means = {place: statistics.fmean(own) for place, own in logs.items() if own}
        squares = [statistics.variance(own) for own in logs.values() if len(own) > 1]
        self.spread = math.sqrt(statistics.fmean(squares)) if squares else 0.0
        self.truth = {
            values_of(self.settings[place]): math.exp(mean) / statistics.median(self.rates[place])
            for place, mean in self.means.items()
        }

    def sweep(self, seed: int) -> Sweep:
        """Replay one."""
        rng, seen, records = random.Random(seed), list[Seen](), list[TrialRecord]()
        if self.search == "grid":
            records = [self.record(place, rng) for place in self.table.places]
        while self.search == "frontier" and isinstance(step := decide(self.table.places, seen, []), Choice):
            found = look_up(self.table, step, rng)
            if step.purpose == "trial":
                records.append(record := self.record(step.place, rng))
                ends = [0.0, *(row["step"] * step.place.size for row in record.curve)]
                met = None
                if record.time_to_target_s is not None:
                    met = Interval(statistics.fmean(ends[-2:]), ends[-2], ends[-1])
                found = replace(found, samples=ends[-1] or found.samples, samples_to_target=met)
            seen.append(found)
        place_of = {trial_id(setting): place for place, setting in self.settings.items()}
        while wanted := repeats_to_run(self.config, {}, records):
            for finalist, number in wanted:
                records.append(self.record(place_of[finalist.id], rng, "repeat", number))
        probes = sum(one.samples for one in seen if one.purpose == "probe")
        samples = probes + sum(record.samples or 0.0 for record in records)
        tried = frozenset(values_of(record.config) for record in records if record.purpose == "trial")
        ended = step.reason if self.search == "frontier" and isinstance(step, Ended) else ""
        return Sweep(answer(self.config, records), samples, len(records) - len(tried), tried, ended)

    def record(
        self, place: Place, rng: random.Random, purpose: Purpose = "trial", seed: int | None = None
    ) -> TrialRecord:
        """Draw what a trial to the target shows."""
        table, setting = self.table, self.settings[place]
        run, rate = rng.choice(table.runs[place]), rng.choice(self.rates[place] or [1.0])
        found, stretch = table.to_target(run), 1.0
        if found is not None:
            stretch = math.exp(self.means[place] + rng.gauss(0, self.spread)) / found.high
        curve = [
            {
                "step": samples * stretch / place.size,
                "train_time_s": samples * stretch / rate,
                table.metric: float(value),
            }
            for samples, value, *_ in run["curve"]
        ]
        time_s = time_to_target(self.config.objective, curve)
        curve = [row for row in curve if time_s is None or row["train_time_s"] <= time_s]
        whole_s = curve[-1]["train_time_s"] if curve else 0.0
        return TrialRecord(
            trial_id(setting, purpose, seed),
            setting,
            "done" if curve else "diverged",
            0.0,
            whole_s,
            samples_per_s=rate,
            curve=curve,
            time_to_target_s=time_s,
            purpose=purpose,
            seed=seed,
            samples=curve[-1]["step"] * place.size if curve else 10.0 * place.size,
        )


def _needed(table: Table, place: Place) -> list[float]:
    """Return the samples to the target of each seed; of one that did not meet it, all that it had."""
    found = [(table.to_target(run), table.samples(run)) for run in table.runs[place] if run["curve"]]
    return [whole if met is None else met.high for met, whole in found]


def replay(table: Table, search: str, count: int) -> dict[str, Any]:
    """Replay `count` sweeps; returns what they say, and how often that is true."""
    of = Replay(table, search)
    sweeps, best_s = [of.sweep(seed) for seed in range(count)], min(of.truth.values())
    picks = [of.truth.get(one.pick or "", math.inf) for one in sweeps]
    regrets = [pick_s / best_s for pick_s in picks]
    tried = [
        pick_s / min(of.truth.get(one, math.inf) for one in sweep.tried)
        for pick_s, sweep in zip(picks, sweeps, strict=True)
    ]
    ahead = [one.answer.most_ahead or math.inf for one in sweeps]
    claims = [regret <= 1 + EQUAL for regret, most in zip(tried, ahead, strict=True) if most <= 1 + EQUAL]
    of_model = []
    for pick_s, one in zip(picks, sweeps, strict=True):
        if "model guesses" in one.ended:
            rest = [time_s for trial, time_s in of.truth.items() if trial not in one.tried]
            of_model.append(pick_s <= (1 + EQUAL) * min(rest, default=math.inf))
    whole = sum(statistics.mean(table.samples(run) for run in runs) for runs in table.runs.values())
    return judged(sweeps) | {
        "spread": of.spread,
        "regret_median": statistics.median(regrets),
        "within_5_percent": statistics.mean(regret <= 1 + EQUAL for regret in regrets),
        "regret_worst": max(regrets),
        "bound_holds": statistics.mean(regret <= most * (1 + 1e-9) for regret, most in zip(tried, ahead, strict=True)),
        "bound_median": statistics.median(ahead),
        "claims_5_percent": len(claims) / count,
        "claims_true": statistics.mean(claims) if claims else None,
        "model_claims": len(of_model) / count,
        "model_claims_true": statistics.mean(of_model) if of_model else None,
        "samples_of_grid": statistics.median(one.samples for one in sweeps) / whole,
        "repeats_median": statistics.median(one.num_repeats for one in sweeps),
    }


def judged(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Return how often sweeps of one kind agree.

    `same_or_equal`: of all pairs, those with one winner, or of which one does not call the other's winner slower.
    `names_the_usual`: sweeps that name the winner that most name, or do not call it slower.
    """
    pairs = [(one, two) for at, one in enumerate(sweeps) for two in sweeps[at + 1 :]]
    picks = Counter(one.pick for one in sweeps)
    usual = picks.most_common(1)[0][0]
    return {
        "sweeps": len(sweeps),
        "winners": len(picks),
        "same_winner": statistics.mean(one.pick == two.pick for one, two in pairs),
        "same_or_equal": statistics.mean(
            one.pick == two.pick or not (one.excludes(two.pick) and two.excludes(one.pick)) for one, two in pairs
        ),
        "names_the_usual": statistics.mean(not one.excludes(usual) for one in sweeps),
    }


def replay_tables(files: Sequence[Path], count: int, keep: bool) -> None:
    """Replay sweeps by grid and by frontier over tables, and print what they say."""
    results: dict[str, Any] = {}
    for path in files:
        table = read(path)
        for search in SEARCHES:
            found = results[f"{table.name} {search}"] = replay(table, search, count)
            print(f"\n{table.name}, {search}: {count} sweeps, repeats spread by {found['spread']:.2f}")
            for name, value in found.items():
                print(f"  {name:20} {'-' if value is None else f'{value:.3g}'}")
    print(f"\nkept in {save('answer-tables', results, keep)}")


def run(
    directory: Path, task: str, name: str, more: dict[str, Any], seeds: list[int] | None = None, seed: int = 0
) -> tuple[Any, list[TrialRecord]]:
    """Run a sweep of a task on one lane, over `seeds` where there are any; returns its spec and its records."""
    from tune.sweeps.run import run_sweep
    from tune.sweeps.spec import prepare, read_sweep

    train, space, target = TASKS[task]
    own = {"task_dir": str(Path(__file__).parents[1]), "evaluate": {"every_steps": 10}, "seed": seed}
    tree = {
        "name": name,
        "storage_path": str(directory),
        "train": {**train, **own},
        "space": {**space, **({"seed": seeds} if seeds else {})},
        "objective": {"metric": "time_to_target", "target": target},
        "lanes": 1,
        **more,
    }
    file = directory / f"{name}.yaml"
    file.write_text(dump_yaml(tree))
    spec = read_sweep(str(file), {})
    prepare(spec, fresh=True)
    return spec, run_sweep(spec)


def measure(directory: Path, task: str, repeats: int) -> dict[str, float]:
    """Return the median time to target, s, of every configuration, each run alone.

    The same step is up to 1.5 times as fast in one process as in the next: the repeats are those of several lanes.
    """
    times: dict[str, list[float]] = {}
    for lane in range(min(_LANES, repeats)):
        seeds = [500_000 + number for number in range(lane, repeats, _LANES)]
        for record in run(directory, task, f"{task}-truth-{lane}", {}, seeds)[1]:
            times.setdefault(values_of(record.config), []).append(_time_s(record))
    return {own: statistics.median(found) for own, found in times.items()}


def _time_s(record: TrialRecord) -> float:
    return math.inf if record.time_to_target_s is None else record.time_to_target_s


def main() -> None:
    """Sweeps of small tasks again and again, and what they named, measured alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--sweeps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15, help="of every configuration, alone, for the truth")
    parser.add_argument(
        "--go-on", action="store_true", help="after the sweeps that the last run had, if of the same code"
    )
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    asked = {name: getattr(args, name) for name in ("tasks", "searches", "sweeps", "repeats")}
    results = {"truth": {}, "rows": {}, **(earlier("rerun", asked) if args.go_on else {}), **asked}
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.tasks:
            truth = results["truth"].get(name) or measure(Path(scratch), name, args.repeats)
            results["truth"][name] = truth
            for search in args.searches:
                row = results["rows"].get(f"{name} {search}") or again(Path(scratch), name, search, args.sweeps, truth)
                results["rows"][f"{name} {search}"] = row
                save("rerun", results, keep=False)
            names = [f"{name} {search}" for search in args.searches]
            rows = [results["rows"][one] for one in names]
            for one, row, found in zip(names, rows, by_others(rows), strict=True):
                near = statistics.mean(regret <= 1 + EQUAL for regret in found)
                row |= {"regret_by_others_median": statistics.median(found), "within_5_percent": near}
                print(one, {key: value for key, value in row.items() if key != "said"}, flush=True)
    if args.keep:
        for row in results["rows"].values():
            del row["said"]
    print(f"kept in {save('rerun', results, args.keep)}")


def again(directory: Path, task: str, search: str, count: int, truth: dict[str, float]) -> dict[str, Any]:
    """Run `count` sweeps of a task; return what they say, beside the times that were measured alone."""
    sweeps, said = [], []
    for number in range(count):
        spec, records = run(directory, task, f"{task}-{search}-{number}", {"search": search}, seed=1000 * number)
        samples = sum(record.samples or 0 for record in records)
        sweeps.append(one := Sweep(answer(spec.config, records, spec.train), samples, len(records)))
        repeats: dict[str, list[float]] = {}
        for record in records:
            if record.purpose == "repeat":
                repeats.setdefault(values_of(record.config), []).append(_time_s(record))
        said.append({"pick": one.pick, "repeats": repeats})
    regrets = [truth.get(one.pick or "", math.inf) / min(truth.values()) for one in sweeps]
    claims = [
        regret <= 1 + EQUAL
        for regret, one in zip(regrets, sweeps, strict=True)
        if (one.answer.most_ahead or math.inf) <= 1 + EQUAL
    ]
    return judged(sweeps) | {
        "regret_median": statistics.median(regrets),
        "regret_worst": max(regrets),
        "claims_5_percent": len(claims),
        "claims_true": sum(claims),
        "said": said,
    }


def by_others(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return of all sweeps of a task how many times as long as the fastest their picks take, in the median of what
    repeats in all other sweeps took: those ran in processes of their own. Of a pick that others did not repeat, inf.
    """
    everything = [one for row in rows for one in row["said"]]
    found = []
    for row in rows:
        found.append(regrets := list[float]())
        for own in row["said"]:
            times: dict[str, list[float]] = {}
            for other in everything:
                for trial, values in other["repeats"].items() if other is not own else ():
                    times.setdefault(trial, []).extend(values)
            medians = {trial: statistics.median(values) for trial, values in times.items() if len(values) >= _FEWEST}
            regrets.append(medians.get(own["pick"], math.inf) / min(medians.values(), default=1.0))
    return found


if __name__ == "__main__":
    main()
