"""Does `python -m trainers explain` name what slows a run, and how much its removal gains?

Run as: python -m benchmarks.explain [--seed N] [--cases N] [--healthy N] [--go-on] [--short] [--keep]
Slowdowns (PLANTS) are planted in small tasks (benchmarks/planted.py), with sizes drawn from the seed. Each case trains
for some seconds, is explained, and is right where the planted kind comes first. The predicted gain is held against a
measured one: the advised configuration beside the old one, or, where no key changes it, the task without the plant. A
case that is not right is void where the run without the plant is no faster: it was no slowdown on this machine. Healthy
runs are right without advice. Beside it what torch.profiler's table names first of the same steps.

It measures time: on a machine that is not quiet the figures say little. How busy it is by itself is measured before
each case; where that is more than 5 %, an advice that says so is left out of the judgement, and the case is marked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import earlier, save
from trainers.config import TrainConfig
from trainers.config.overrides import override
from trainers.context import RunContext
from trainers.explain.explanation import explain, read_subject
from trainers.explain.observe import spin
from trainers.explain.profile import ProfileJob, changed
from trainers.explain.stepper import Stepper, warm
from trainers.explain.suspect import WORTH
from trainers.explain.verify import CompareJob
from trainers.launch.local import run_spawn
from trainers.launch.log import setup_logging
from trainers.launch.spec import Job, RunSpec, make_spec
from trainers.output import Output
from trainers.start import run_training

REPOSITORY = Path(__file__).parents[1]
_SELDOM = {"evaluate.every_steps": 10**6, "checkpoint.every_steps": 10**6}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"task": "PlantedDigits", "batch": 256, "args": {}},
    "text": {"task": "PlantedText", "batch": 64, "args": {"lines": 4000}},
    "table": {"task": "PlantedTable", "batch": 2048, "args": {"rows": 40_000, "width": 512}},
    "images": {"task": "PlantedImages", "batch": 32, "args": {"synthetic": True, "samples": 2000}},
}
Changes = dict[str, Any]
"""Dotted keys of the configuration, `batch`, `workers`, `neighbours`; `args.` of the task, `plant.` of its slowdown."""


@dataclass(frozen=True)
class Plant:
    """A slowdown of one kind."""

    kind: str
    draw: Callable[[random.Random, float], Changes]
    """What slows a run, by the time of a healthy step in seconds."""
    around: Callable[[random.Random], Changes] = lambda rng: {}
    """What the run needs for it, slow or not."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Those in which it does what it is to do."""


def _seconds(name: str, low: float, high: float) -> Callable[[random.Random, float], Changes]:
    return lambda rng, step_s: {f"plant.{name}": step_s * rng.uniform(low, high)}


def _two_ranks(batch: int, *widths: int) -> Callable[[random.Random], Changes]:
    return lambda rng: {"workers": 2, "batch": batch, "args.width": rng.choice(widths)}


PLANTS: dict[str, Plant] = {
    "loader waits": Plant("slow loader", _seconds("fetch_wait_s", 0.5, 2)),
    "loader computes": Plant("slow loader", _seconds("fetch_work_s", 0.4, 0.9)),
    "transform": Plant("slow transform", _seconds("transform_s", 0.4, 2)),
    "waits in loss": Plant("hidden synchronisation", _seconds("wait_s", 0.4, 2)),
    "reads in loss": Plant(
        "hidden synchronisation", lambda rng, s: {"plant.reads": int(s * rng.uniform(0.4, 1.5) * 2e6)}
    ),
    "small batch": Plant("host-bound small batches", lambda rng, s: {"batch": rng.choice((1, 2, 4))}),
    "small microbatch": Plant(
        "microbatch too small", lambda rng, s: {"microbatch_size": rng.choice((2, 4))}, tasks=("digits", "images")
    ),
    "evaluations": Plant("evaluation too often", lambda rng, s: {"evaluate.every_steps": rng.randint(2, 5)}),
    "checkpoints": Plant("checkpoint stalls", lambda rng, s: {"checkpoint.every_steps": rng.randint(1, 2)}),
    "precision": Plant("wrong precision", lambda rng, s: {"precision": rng.choice(("bf16", "fp16"))}),
    "neighbour": Plant("busy neighbour", lambda rng, s: {"neighbours": 2 * (os.cpu_count() or 1)}),
    "straggler": Plant("straggling rank", _seconds("slow_rank_s", 0.4, 2), lambda rng: {"workers": 2}),
    "buckets": Plant(
        "small all-reduce buckets", lambda rng, s: {"ddp.bucket_cap_mb": 1}, _two_ranks(64, 1024, 2048), ("table",)
    ),
    "all-reduce": Plant("slow all-reduce", lambda rng, s: {}, _two_ranks(16, 2048, 3072), ("table",)),
    "lengths": Plant(
        "recompiles",
        lambda rng, s: {"plant.lengths": rng.randint(4, 8)},
        lambda rng: {"compile": "default"},
        ("text",),
    ),
}
NAMES = {
    "item": "hidden synchronisation",
    "_local_scalar_dense": "hidden synchronisation",
    "DataLoader": "slow loader",
    "all_reduce": "slow all-reduce",
    "aten::_to_copy": "wrong precision",
    "aten::copy_": "wrong precision",
    "CompiledFunction": "recompiles",
}
"""What a name in the profiler's table tells a reader; the other names are operators of any healthy step."""


def tree(task: str, changes: Changes, directory: str, steps: int) -> dict[str, Any]:
    """The configuration of a task with changes."""
    about = TASKS[task]
    plant = {name.partition(".")[2]: value for name, value in changes.items() if name.startswith("plant.")}
    args = {name.partition(".")[2]: value for name, value in changes.items() if name.startswith("args.")}
    batch, workers = changes.get("batch", about["batch"]), changes.get("workers", 1)
    base = {
        "task": f"benchmarks.planted:{about['task']}",
        "task_dir": str(REPOSITORY),
        "task_args": {"plant": plant, "per_step": batch, **about["args"], **args},
        "name": task,
        "storage_path": directory,
        "max_steps": steps,
        "global_batch_size": batch,
        "log_every_steps": 5,
        "drop_last": True,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "scaling": {"num_workers": workers},
        "launcher": "spawn",
    }
    own = {name: value for name, value in changes.items() if name in TrainConfig.model_fields or _is_section(name)}
    return override(TrainConfig, base, {**_SELDOM, **own})


def _is_section(name: str) -> bool:
    return name.partition(".")[0] in TrainConfig.model_fields


@dataclass(frozen=True)
class Table:
    """Names of the profiler's table, those with most own time first."""

    names: list[str]

    def to_json(self) -> str:
        """As it crosses between processes."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class TableJob(Job[Table]):
    """Takes steps under torch.profiler."""

    def read_result(self, text: bytes) -> Table:
        """Parse what `execute` returned."""
        return Table(**json.loads(text))

    def execute(self, context: RunContext) -> Table:
        """Profile as one worker."""
        context.storage = None
        job = ProfileJob(**asdict(self), seconds=1.0)
        with job.replica(self.config, context) as parts:
            stepper = Stepper(parts)
            warm(stepper, 0.1)
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
                for _ in range(5):
                    stepper.step()
        rows = sorted(recorded.key_averages(), key=lambda row: -row.self_cpu_time_total)
        return Table([row.key for row in rows[:5]])


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that keep cores busy in a block."""
    made = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(count)]
    for process in made:
        process.start()
    try:
        yield
    finally:
        for process in made:
            process.kill()
            process.join()


def _burn() -> None:
    while True:
        pass


def stolen() -> float:
    """Share of a core that other work takes from a busy thread now."""
    spun = [0.0, 0.0]
    for _ in range(100):
        spin(spun)
    return 1 - spun[1] / spun[0]


@dataclass(frozen=True)
class Bench:
    """Where cases run, and for how long."""

    directory: str
    seconds: float
    step_s: dict[str, float]
    """Of a healthy step, by task."""

    def spec(self, task: str, changes: Changes, steps: int | None = None) -> RunSpec:
        """A run of a task with changes; where nothing is said of its steps, as many as fill the time."""
        planted_s = sum(v for k, v in changes.items() if k.startswith("plant.") and k.endswith("_s"))
        step_s, usual = self.step_s[task] + planted_s, TASKS[task]["batch"]
        if "workers" not in changes:  # a small batch's steps are short, but by how much nobody knows
            step_s /= math.sqrt(usual / changes.get("batch", usual))
        steps = steps or max(40, int(self.seconds / step_s))
        return replace(make_spec(tree(task, changes, self.directory, steps), "benchmark", None), quiet=True)

    def case(self, task: str, plant: Plant | None, slow: Changes, around: Changes) -> dict[str, Any]:
        """Train, explain, measure."""
        kind, busy, spec = plant.kind if plant is not None else None, stolen(), self.spec(task, slow | around)
        is_run = kind not in (None, "busy neighbour")
        with neighbours(slow.get("neighbours", 0)):
            run_training(spec, fresh=True, output=Output(quiet=True))
            found = explain(read_subject(spec.uri), self.seconds)
        excused = "busy neighbour" if busy > WORTH and kind != "busy neighbour" else None
        judged = [one for one in found.advice if one.kind != excused]
        first = judged[0] if judged else None
        row: dict[str, Any] = {"task": task, "changes": slow | around, "kind": kind, "busy": busy}
        row |= {"first": first.kind if first else None, "all": [(one.kind, one.predicted.value) for one in judged]}
        row["right"] = row["first"] == kind
        if first is not None and row["right"] and is_run:
            row["predicted"] = first.predicted.value
            if first.changes:
                new = changed(spec.tree, first.changes, spec.source)
                row["verified"] = self.gain(spec, new, found.step_s or self.step_s[task])
            else:
                row["verified"] = self.removed(task, slow, around)
            row["within_20_percent"] = abs(row["predicted"] - row["verified"]) <= 0.2 * abs(row["verified"])
        elif is_run and slow:
            row["removed"] = self.removed(task, slow, around)
            row["void"] = row["removed"] < WORTH
        table = run_spawn(TableJob(**asdict(spec)))
        told = next((one for name, one in NAMES.items() if name in table.names[0]), None)
        return row | {"profiler": table.names[0], "profiler_right": told == kind}

    def removed(self, task: str, slow: Changes, around: Changes) -> float:
        """The gain of the run without its plant, measured side by side."""
        old = self.spec(task, slow | around)
        return self.gain(old, self.spec(task, around, old.config.max_steps).tree, self.step_s[task])

    def gain(self, old: RunSpec, new: dict[str, Any], step_s: float) -> float:
        """The gain of another configuration, measured side by side, as `--verify` does."""
        with old.storage.beside() as place:
            given = {"seconds": self.seconds, "step_s": step_s, "place": place.uri}
            return run_spawn(CompareJob(**asdict(old), new=new, **given)).gain.value


def main() -> None:
    """Draw cases from the seed, run them, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--healthy", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="plants to draw from")
    parser.add_argument(
        "--go-on", action="store_true", help="after the cases that the last run had, if of the same code"
    )
    parser.add_argument("--short", action="store_true", help="a second each, four cases, two healthy ones")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    setup_logging(0, quiet=True)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a run compiles what an earlier case has compiled, too
    num_cases, num_healthy = (4, 2) if given.short else (given.cases, given.healthy)
    rng, seconds = random.Random(given.seed), 1.0 if given.short else 3.0
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(directory, seconds, dict.fromkeys(TASKS, 0.01))
        for task in TASKS:
            job = ProfileJob(**asdict(bench.spec(task, {})), seconds=1.0)
            bench.step_s[task] = run_spawn(job).readings.step_s
        plants = given.only or list(PLANTS)
        rng.shuffle(plants)
        asked = {name: getattr(given, name) for name in ("seed", "cases", "healthy", "only", "short")}
        rows = earlier("explain", asked).get("rows", []) if given.go_on else []
        for number in range(num_cases + num_healthy):
            name = plants[number % len(plants)] if number < num_cases else "healthy"
            plant = PLANTS.get(name)
            task = rng.choice(plant.tasks) if plant is not None else list(TASKS)[number % len(TASKS)]
            slow, around = (plant.draw(rng, bench.step_s[task]), plant.around(rng)) if plant is not None else ({}, {})
            if number >= len(rows):
                rows.append({"plant": name, **bench.case(task, plant, slow, around)})
                save("explain", {**asked, "score": summary(rows), "rows": rows}, keep=False)
            print(_line(rows[number]), flush=True)
    score = summary(rows)
    print(json.dumps(score, indent=2))
    print(f"\nkept in {save('explain', {**asked, 'score': score, 'rows': rows}, given.keep)}")


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Shares over all cases."""
    planted = [row for row in rows if row["kind"] is not None and not row.get("void")]
    healthy = [row for row in rows if row["kind"] is None]
    held = [row for row in planted if "verified" in row]
    return {
        "cases": len(planted),
        "void": sum(bool(row.get("void")) for row in rows),
        "right_first": _share([row["right"] for row in planted]),
        "within_20_percent": _share([row["within_20_percent"] for row in held]),
        "healthy": len(healthy),
        "healthy_without_advice": _share([row["right"] for row in healthy]),
        "profiler_right_first": _share([row["profiler_right"] for row in planted]),
        "busy": _share([row["busy"] > WORTH for row in rows]),
    }


def _share(values: list[bool]) -> float:
    return statistics.fmean(values) if values else 0.0


def _line(row: dict[str, Any]) -> str:
    gain = f"predicted {row['predicted']:.0%}, measured {row['verified']:.0%}" if "verified" in row else ""
    verdict = "right" if row["right"] else "void" if row.get("void") else f"WRONG: {row['all']}"
    gain = f"without it {row['removed']:.0%} less" if "removed" in row else gain
    busy = f"(the machine was busy: {row['busy']:.0%})" if row["busy"] > WORTH else ""
    return f"{row['task']:8} {row['plant']:18} {verdict}  {gain}  profiler: {row['profiler']}  {busy}"


if __name__ == "__main__":
    main()
