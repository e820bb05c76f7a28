"""Does a batch that grows by measurement reach the target sooner than the best fixed one, and than known schedules?

Run as: python -m benchmarks.grow [digits | gpt | tabular | bert ...] [--seeds 5] [--bound] [--short] [--keep]
Peers, of one seed in an order of its own, on the examples' train.yaml (gpt and bert made smaller, bert on made texts;
digits and bert at a lower rate, as a run of some hundred steps is over before anything can be learned from it):

    a number   that batch size throughout, at a constant learning rate that is the same for all sizes
    falling    that batch size throughout, with the example's learning rate schedule and rule
    auto       `global_batch_size: auto` with neither, up to the largest size of the grid
    smith      Smith et al. 2018 (arXiv 1711.00489): the rate stays, and the batch is five times as large after 30, 60
               and 80 % of the samples, where others divide the rate by five
    cabs       the rule of Balles et al. 2017 (CABS, arXiv 1612.05086), a batch in proportion to tr(Sigma) / loss, as
               the schedule that follows from a pilot run; from the smallest size on, in powers of two of it; the rate
               stays

A run ends when it has met the target. The best fixed peer is that of both kinds. With `--bound` also every schedule of
two sizes of the grid that changes after one of SHARES of the best fixed one's samples, of both kinds: what the best of
them needs, which nobody knows before, is about what can be gained by growth.

The result of `auto` has the schedules that it found. The target is met between two evaluations: where the line between
them meets it. Times are processor times of one thread, those of comparisons and of trained steps, without evaluations.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import Dataset, Subset

import trainers.loop.growth
from benchmarks.ground_truth import processor_time
from benchmarks.measure import ahead, save
from examples.bert.task import Bert
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.yaml import parse_mapping
from trainers.errors import DivergedError
from trainers.launch.find_task import load_task
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.measure.result import RunResult
from trainers.step.noise_scale import NoiseScale

EXAMPLES = Path(__file__).parents[1] / "examples"
_STRETCHES = 12  # of a pilot run, each of one batch size
_SMITH = ((0.3, 1), (0.6, 5), (0.8, 25), (None, 125))
SHARES = (0.1, 0.3, 0.6)
CONSTANT = {"lr_scaling.rule": "none", "lr_schedule.name": "constant"}

Row = Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """What is trained, to which figure, and with which fixed batch sizes."""

    name: str
    sizes: Sequence[int]
    metric: str
    target: float
    epochs: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the example's file."""
    most_evaluations: int = 200

    def meets(self, rows: Sequence[Row]) -> bool:
        """Whether the newest evaluation meets the target."""
        value = rows[-1].get(self.metric) if rows else None
        return value is not None and (value <= self.target if self.metric.endswith("loss") else value >= self.target)

    def config(self, changes: Mapping[str, Any]) -> tuple[TrainConfig, Path]:
        """Return a run's configuration, and the file that it comes from."""
        file = EXAMPLES / self.name / "train.yaml"
        tree = parse_mapping(file.read_text(encoding="utf-8"), str(file))
        same = {"launcher": "local", "device": "cpu", "epochs": self.epochs}
        return build(TrainConfig, override(TrainConfig, tree, {**same, **self.changes, **changes}), str(file)), file


_SMALL_GPT = {
    "task_args.packed": True,
    "task_args.context": 32,
    "task_args.width": 32,
    "task_args.layers": 1,
    "task_args.heads": 2,
    "task_args.lines": 4000,
}


class FewTexts(Bert):
    """BERT that is evaluated on an eighth of as many texts as it is trained on."""

    def dataset(self, split: str) -> Dataset[Any]:
        """Token ids [length] and label of each text."""
        texts = super().dataset(split)
        return texts if split == "train" else Subset(texts, range(self.samples // 8))


_SMALL_BERT = {
    "task": "benchmarks.grow:FewTexts",
    "task_args.synthetic": True,
    "task_args.geometry": "tiny",
    "task_args.length": 32,
    "task_args.samples": 8192,
    "precision": "fp32",
    "optimizer.lr": 3e-4,
}
WORKS = [
    Work("digits", [8, 16, 32, 64, 128], "val_accuracy", 0.985, 30, {"optimizer.lr": 5e-4}),
    Work("gpt", [8, 16, 32, 64, 128], "val_loss", 0.39, 6, _SMALL_GPT),
    Work("tabular", [128, 256, 512, 1024, 2048, 4096], "val_accuracy", 0.96, 5),
    Work("bert", [16, 32, 64, 128, 256], "val_accuracy", 0.95, 6, _SMALL_BERT, 80),
]


class _Watched(LocalContext):
    """Keeps the evaluations of a run, and the noise and the loss of each of its log windows."""

    def __init__(self, work: Work | None) -> None:
        super().__init__(None, "local")
        self.work = work
        """The run ends when it has met the target of this one."""
        self.rows: list[dict[str, Any]] = []
        self.windows: list[tuple[float, float, float]] = []
        """Progress, tr(Sigma) and loss."""
        self.noise: float | None = None

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Keep an evaluation."""
        self.rows.append(dict(metrics))

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether the target is met."""
        return self.work is not None and self.work.meets(self.rows)

    def observe(self, figures: dict[str, float]) -> None:
        """Keep a window in which gradients were measured."""
        if self.noise is not None:
            self.windows.append((figures["progress"], self.noise, figures["loss"]))
            self.noise = None

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Take tr(Sigma) of each window from what measures it."""
        take = NoiseScale.take

        def taken(noise: NoiseScale) -> None:
            count = len(noise.windows)
            take(noise)
            for window in noise.windows[count:]:
                self.noise = window.noise / window.weight

        with mock.patch.object(NoiseScale, "take", taken):
            yield


def train(work: Work, changes: Mapping[str, Any], whole: bool = False) -> tuple[_Watched, RunResult | None, int]:
    """Train one run, the `whole` of it or to its target; return what was seen of it, its result (None: it diverged),
    and the samples of an epoch.
    """
    config, file = work.config(changes)
    task, context = load_task(config.task, config.task_args, str(file)), _Watched(None if whole else work)
    task.setup()
    length = len(task.dataset("train"))  # type: ignore[arg-type]
    least = min(size for _, size in config.batch_sizes)
    every = max(1, work.epochs * length // (least * work.most_evaluations))
    config, _ = work.config({**changes, "evaluate.every_steps": every})
    clock = mock.Mock(perf_counter=time.process_time)
    with processor_time(), mock.patch.object(trainers.loop.growth, "time", clock), context.measuring():
        try:
            return context, fit(task, config, context), length
        except DivergedError:
            return context, None, length


def to_target(rows: Sequence[Row], metric: str, target: float, length: int) -> tuple[float, float] | None:
    """Return the samples and the time at which the line between two evaluations met the target; None: nowhere."""
    sign = -1 if metric.endswith("loss") else 1
    before = (0.0, 0.0, -math.inf)
    for row in rows:
        if metric not in row:
            continue
        here = (row.get("samples", row["epoch"] * length), row["train_time_s"], sign * (row[metric] - target))
        if here[2] >= 0:
            share = 1.0 if math.isinf(before[2]) else before[2] / (before[2] - here[2])
            return before[0] + share * (here[0] - before[0]), before[1] + share * (here[1] - before[1])
        before = here
    return None


def smith(base: int, samples: int) -> list[dict[str, int]]:
    """Return Smith et al.'s schedule over so many samples."""
    return [
        {"size": base * times} | ({} if share is None else {"until_samples": round(share * samples)})
        for share, times in _SMITH
    ]


def cabs(windows: Sequence[tuple[float, float, float]], sizes: Sequence[int], samples: int) -> list[dict[str, int]]:
    """Return the schedule that CABS makes of a pilot run's progress, tr(Sigma) and losses."""
    wanted: list[float] = []
    for number in range(_STRETCHES):
        within = [(noise, loss) for at, noise, loss in windows if number < at * _STRETCHES <= number + 1]
        noise, loss = (statistics.fmean(column) for column in zip(*within, strict=True)) if within else (0.0, 1.0)
        wanted.append(max(0.0, noise) / loss if within else wanted[-1] if wanted else 1.0)
    first = next((one for one in wanted if one > 0), 1.0)
    schedule: list[dict[str, int]] = []
    for number, one in enumerate(wanted, 1):
        power = round(math.log2(one / first)) if one > 0 else 0
        size = min(max(sizes), sizes[0] * 2 ** max(0, power))
        if schedule and schedule[-1]["size"] == size:
            schedule.pop()
        schedule.append({"until_samples": round(number / _STRETCHES * samples), "size": size})
    del schedule[-1]["until_samples"]
    return schedule


def peers_of(work: Work) -> dict[str, dict[str, Any]]:
    """Return each peer's changes; CABS's schedule by a pilot run."""
    start, largest = work.sizes[0], work.sizes[-1]
    config, _ = work.config({})
    pieces = {"global_batch_size": start, "microbatch_size": max(1, start // 2), "noise_scale": True, "seed": 99}
    pilot, _, length = train(work, {**pieces, **CONSTANT, "log_every_steps": 20}, whole=True)
    samples = work.epochs * length
    return {
        **{str(size): {"global_batch_size": size, **CONSTANT} for size in work.sizes},
        **{f"{size} falling": {"global_batch_size": size} for size in work.sizes},
        "auto": {"global_batch_size": "auto", "auto_batch.largest": largest, **CONSTANT},
        "smith": {"batch_schedule": smith(config.batch_size, samples), **CONSTANT},
        "cabs": {"batch_schedule": cabs(pilot.windows, work.sizes, samples), **CONSTANT},
    }


@dataclass
class Needed:
    """What each peer needs to the target, in the order of the seeds: inf where it was not met."""

    samples: dict[str, list[float]]
    times_s: dict[str, list[float]]
    schedules: list[Any]
    """Those that `auto` found."""


def needed(work: Work, peers: Mapping[str, dict[str, Any]], seeds: int) -> Needed:
    """Train every peer under every seed."""
    needs = Needed({name: [] for name in peers}, {name: [] for name in peers}, [])
    for seed in range(seeds):
        order = list(peers)
        random.Random(seed).shuffle(order)
        for name in order:
            context, result, length = train(work, {**peers[name], "seed": seed})
            met = to_target(context.rows, work.metric, work.target, length)
            samples, time_s = met or (math.inf, math.inf)
            needs.samples[name].append(samples)
            needs.times_s[name].append(time_s)
            if name == "auto" and result is not None:
                needs.schedules.append(result.batch_schedule)
            told = "not met" if met is None else f"{samples:,.0f} samples, {time_s:.2f} s"
            print(f"{work.name} seed {seed} {name}: {told}", flush=True)
    return needs


def compare(work: Work, seeds: int, bound: bool) -> dict[str, Any]:
    """Return what every peer needs to the target, and auto against the others; also of the best of two sizes."""
    peers = peers_of(work)
    needs = needed(work, peers, seeds)
    found = {
        "target": {work.metric: work.target},
        "epochs": work.epochs,
        "schedules": {name: peers[name]["batch_schedule"] for name in ("smith", "cabs")} | {"auto": needs.schedules},
        "samples": _figures(needs.samples),
        "time_s": _figures(needs.times_s),
    }
    if bound:
        best = found["time_s"]["best_fixed"]
        of_two = needed(work, two_sizes(work, statistics.median(needs.samples[best])), seeds).times_s
        medians = {name: statistics.median(values) for name, values in of_two.items()}
        first = min(medians, key=medians.__getitem__)
        ratio = medians[first] / statistics.median(needs.times_s[best])
        found["bound"] = {"schedule": first, "of_best_fixed": ratio if math.isfinite(ratio) else None}
    return found


def two_sizes(work: Work, samples: float) -> dict[str, dict[str, Any]]:
    """Return all schedules of two sizes, the larger of which comes after one of SHARES of so many samples; at the
    constant rate, and with the example's.
    """
    return {
        f"{small}-{large} at {share:.0%}{kind}": {
            "batch_schedule": [{"until_samples": round(share * samples), "size": small}, {"size": large}],
            **changes,
        }
        for kind, changes in (("", CONSTANT), (" falling", {}))
        for small, large in itertools.combinations(work.sizes, 2)
        for share in SHARES
    }


def _figures(of: dict[str, list[float]]) -> dict[str, Any]:
    """Every value (None: not met), the best fixed size by its median, and auto against each that always met it."""
    fixed = {name: statistics.median(values) for name, values in of.items() if name.split()[0].isdecimal()}
    met = {name: values for name, values in of.items() if all(map(math.isfinite, values))}
    return {
        "values": {name: [one if math.isfinite(one) else None for one in values] for name, values in of.items()},
        "best_fixed": min(fixed, key=fixed.__getitem__),
        "auto": ahead(met, "auto") if "auto" in met else None,
    }


def show(work: Work, found: dict[str, Any]) -> None:
    """Print the table of a work."""
    print(f"\n{work.name} to {work.metric} {work.target}")
    for what in ("samples", "time_s"):
        best, against = found[what]["best_fixed"], found[what]["auto"]
        for name, values in found[what]["values"].items():
            met = [one for one in values if one is not None]
            median = f"{statistics.median(met):>12,.2f}" if met else f"{'-':>12}"
            ratio = (against or {}).get(name)
            told = "" if ratio is None else f"   auto {ratio['ratio']:.2f} x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
            mark = "   the best fixed" if name == best else ""
            print(f"  {what:8} {name:12} {median}   met {len(met)} of {len(values)}{told}{mark}")
    if bound := found.get("bound"):
        print(f"  of all schedules of two sizes {bound['schedule']} is the fastest: {bound['of_best_fixed']} x")


def main() -> None:
    """Compare on every work that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", choices=[work.name for work in WORKS], metavar="WORK")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bound", action="store_true", help="also all schedules of two sizes")
    parser.add_argument("--short", action="store_true", help="one seed, and two fixed sizes")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for work in WORKS:
        if given.works and work.name not in given.works:
            continue
        short = replace(work, sizes=[work.sizes[0], work.sizes[-1]])
        results[work.name] = compare(short if given.short else work, 1 if given.short else given.seeds, given.bound)
        show(work, results[work.name])
    print(f"\nwritten to {save('grow', results, given.keep)}")


if __name__ == "__main__":
    main()
