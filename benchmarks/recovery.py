"""A worker is killed in mid-run: how long until the next step, and how many steps are done again?

Run as: python -m benchmarks.recovery [ROUNDS] [--kills 3] [--workers 2] [--short] [--keep]
Two commands in turn, each with a Ray of its own on this machine: `paceline`, python -m trainers with `launcher: ray`,
and `plain`, a TorchTrainer as Ray documents it (benchmarks/recovery_plain.py): same model, data, workers and checkpoint
interval. Each run is killed several times (SIGKILL to one worker, each rank in turn), after its newest checkpoint and
at the same steps both ways. Figures come from a timeline that the workers write: seconds from the kill to the end of
the next step, and within them those until a new worker's own code begins (Ray notices and starts processes; ours has
imported the loop by then, where plain's first optimizer goes on importing). The A/A floor is what plain's kills differ
from one another. `--short` is one round.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from benchmarks.measure import save, show, summarize
from benchmarks.recovery_plain import (
    BATCH,
    LEARNING_RATE,
    Moment,
    make_data,
    make_model,
    read_moments,
    watch,
    write_moment,
)
from trainers.config import TrainConfig
from trainers.task import Task

REPOSITORY = Path(__file__).parents[1]
INTERVAL = 100
"""Steps between two checkpoints."""
_TIMEOUT_S = 240
_LOOK_S = 0.005


class Timed(Task):
    """The work of benchmarks/recovery_plain.py, with its timeline."""

    def __init__(self, timeline: str) -> None:
        self.timeline = Path(timeline)
        write_moment(self.timeline, 0)

    def model(self) -> nn.Module:
        return make_model()

    def dataset(self, split: str) -> TensorDataset:
        return make_data()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def optimizer(self, model: nn.Module, config: TrainConfig) -> Optimizer:
        optimizer = super().optimizer(model, config)
        watch(optimizer, self.timeline)
        return optimizer


@dataclass(frozen=True)
class Recovery:
    """What one kill cost."""

    next_step_s: float
    """From the kill to the end of the next step."""
    started_s: float
    """From the kill to the first line of a new worker's own code."""
    redone: int
    """Steps that were done before the kill, and had to be done again."""


def paceline_command(directory: Path, workers: int, steps: int, interval: int) -> list[str]:
    """Our run."""
    tree = {
        "task": "benchmarks.recovery:Timed",
        "task_dir": str(REPOSITORY),
        "task_args": {"timeline": str(directory / "timeline")},
        "storage_path": str(directory),
        "max_steps": steps,
        "global_batch_size": BATCH,
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE},
        "evaluate": {"every_steps": steps},
        "checkpoint": {"every_steps": interval},
        "scaling": {"num_workers": workers, "use_gpu": False},
        "failure": {"node_lost": -1},
        "device": "cpu",
        "launcher": "ray",
    }
    path = directory / "train.yaml"
    path.write_text(yaml.safe_dump(tree))
    return [sys.executable, "-m", "trainers", str(path)]


def plain_command(directory: Path, workers: int, steps: int, interval: int) -> list[str]:
    """The documented way."""
    numbers = [str(number) for number in (workers, steps, interval)]
    return [sys.executable, "-m", "benchmarks.recovery_plain", str(directory), *numbers]


WAYS = {"plain": plain_command, "paceline": paceline_command}


def steps_of(moments: list[Moment]) -> list[Moment]:
    """A process's training steps: the last lines that count up by one.

    A throw-away pass (a probe of memory) looks like a step, but the count goes on elsewhere.
    """
    steps: list[Moment] = []
    for moment in reversed(moments):
        if moment.step == 0 or (steps and steps[-1].step != moment.step + 1):
            break
        steps.append(moment)
    return steps[::-1]


def recovery(moments: list[Moment], killed_s: float, next_kill_s: float) -> Recovery | None:
    """What a kill at a time cost; None where no worker came to two steps before the next kill."""
    last = max(moment.step for moment in moments if moment.time_s <= killed_s)
    old = {moment.process for moment in moments if moment.time_s <= killed_s}  # one of them may yet end its step
    new: dict[int, list[Moment]] = {}
    for moment in moments:
        if killed_s < moment.time_s <= next_kill_s and moment.process not in old:
            new.setdefault(moment.process, []).append(moment)
    runs = [steps for rows in new.values() if len(steps := steps_of(rows)) > 1]
    if not runs:
        return None
    first = min((steps[0] for steps in runs), key=lambda moment: moment.time_s)
    started_s = min(moment.time_s for rows in new.values() for moment in rows)
    return Recovery(first.time_s - killed_s, started_s - killed_s, max(0, last - first.step + 1))


def kill_at(timeline: Path, step: int, rank: int, since_s: float, process: subprocess.Popen[bytes]) -> float:
    """Wait until a rank has done a step, kill it, and say when."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for moment in reversed(read_moments(timeline)):
            if moment.time_s > since_s and moment.rank == rank and moment.step >= step:
                os.kill(moment.process, signal.SIGKILL)
                return time.time()
        time.sleep(_LOOK_S)
    raise RuntimeError(f"rank {rank} never did step {step}")


def run_killed(way: str, steps: list[int], workers: int, interval: int) -> list[Recovery]:
    """One run, killed after each of some steps."""
    directory = Path(tempfile.mkdtemp(prefix="recovery-"))
    timeline, log = directory / "timeline", directory / "log"
    total = steps[-1] - steps[-1] % interval + interval
    command = WAYS[way](directory, workers, total, interval)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output)
        try:
            kills = [0.0]
            for number, step in enumerate(steps):
                kills.append(kill_at(timeline, step, number % workers, kills[-1], process))
            code = process.wait(timeout=_TIMEOUT_S)
            moments = read_moments(timeline)
            found = [recovery(moments, *pair) for pair in zip(kills[1:], [*kills[2:], time.time()], strict=True)]
            if code != 0 or None in found:
                raise RuntimeError(f"it ended with {code}: {found}")
            return [one for one in found if one is not None]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{way}: {error}\n{log.read_text(errors='replace')[-3000:]}") from error
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            shutil.rmtree(directory, ignore_errors=True)


def figures(found: dict[str, list[Recovery]], interval: int) -> dict[str, Any]:
    """Seconds as ms with their ratios, parts and redone steps, of kills that belong together by their place."""
    times = {way: [one.next_step_s * 1e3 for one in kills] for way, kills in found.items()}
    # The floor: each of plain's kills beside the next one.
    times["plain again"] = [*times["plain"][1:], times["plain"][0]]
    parts = {
        way: {
            "started_ms": statistics.median(one.started_s for one in kills) * 1e3,
            "first_step_ms": statistics.median(one.next_step_s - one.started_s for one in kills) * 1e3,
            "redone": {
                "median": statistics.median(one.redone for one in kills),
                "min": min(one.redone for one in kills),
                "max": max(one.redone for one in kills),
            },
        }
        for way, kills in found.items()
    }
    return {**summarize(times, "plain", "plain again"), "parts": parts, "interval": interval}


def tell(results: dict[str, Any]) -> None:
    """The tables."""
    show("a worker is killed: from the kill to the end of the next step", "ms", results)
    for way, parts in results["parts"].items():
        redone = parts["redone"]
        print(
            f"  {way:10} {parts['started_ms']:>7,.0f} ms until a worker begins, {parts['first_step_ms']:>7,.0f} ms "
            f"from there;   {redone['median']:g} steps done again [{redone['min']}, {redone['max']}] "
            f"of an interval of {results['interval']}"
        )


def main(rounds: int, kills: int, workers: int, keep: bool) -> None:
    """All rounds, plain and ours in turn; who goes first alternates."""
    chance = random.Random(0)
    found: dict[str, list[Recovery]] = {way: [] for way in WAYS}
    for number in range(rounds):
        steps = [INTERVAL * (kill + 1) + chance.randrange(10, INTERVAL - 10) for kill in range(kills)]
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            rows = run_killed(way, steps, workers, INTERVAL)
            print(
                f"round {number + 1} {way:8}", *(f"{one.next_step_s:.2f} s ({one.redone})" for one in rows), flush=True
            )
            found[way] += rows
    results = figures(found, INTERVAL)
    tell(results)
    print(f"\nkept in {save('recovery', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3, help="of each run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="one round")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args()
    main(1 if given.short else given.rounds, given.kills, given.workers, given.keep)
