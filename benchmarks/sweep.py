"""What does a trial cost besides its training?

Three ways are compared: a sweep as Ray documents it; the same script with Paceline's
Tuner and TorchTrainer in place of Ray's; and a sweep of Paceline. Each is a command that
starts its own Ray.

Run as:
    python -m benchmarks.sweep [--full] [--keep]
        8 and 24 trials; without --full, Ray's way runs two trials, and the time of all
        is estimated from these
    python -m benchmarks.sweep --noop [1000] [--keep]
        trials of one step each: do the last ones cost as little as the first ones?

A trial is three short epochs of an MLP on 2,000 rows. The trials are 4 or 12 batch sizes,
each in fp32 and bf16. All ways run the same loop with the same configurations, and must
end with the same losses. In Ray's way, a trial is a function that builds a TorchTrainer
with TuneReportCallback; as many trials run at a time as the CPUs can hold with their
workers. Paceline's sweep and the changed script take turns, and their medians count.
Ray's way, which takes minutes, runs once, after the first turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.measure import save
from trainers.task import Task

BATCHES = {
    8: [16, 64, 256, 1000],
    24: [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1000],
}
PRECISIONS = ["fp32", "bf16"]
RAYS_OWN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "2.0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
}
"""Ray's own values of the variables that Paceline sets to something else
(trainers/on_ray/environment.py).
"""
_IDLE_PERCENT = 10.0
_EDGE = 100
"""The most trials at the beginning, and as many at the end, that are compared."""


class Rows(Task):
    """2,000 rows of 32 numbers in ten classes, and an MLP."""

    def __init__(self, rows: int = 2000) -> None:
        self.rows = rows

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        labels = torch.randint(0, 10, (self.rows,), generator=generator)
        centres = torch.randn(
            10, 32, generator=torch.Generator().manual_seed(7)
        )
        return TensorDataset(
            centres[labels]
            + 2 * torch.randn(self.rows, 32, generator=generator),
            labels,
        )

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def sweep_file(
    directory: Path,
    name: str,
    space: dict[str, Any],
    train: dict[str, Any],
    lanes: int | str = "auto",
) -> Path:
    """Write a sweep's YAML file, and return its path."""
    tree = {
        "name": name,
        "storage_path": str(directory),
        "train": {
            "task": "benchmarks.sweep:Rows",
            "task_dir": str(Path(__file__).parents[1]),
            "epochs": 3,
            "global_batch_size": 64,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            **train,
        },
        "space": space,
        "objective": {"metric": "val_loss"},
        "lanes": lanes,
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def in_process(file: Path) -> tuple[float, list[Any]]:
    """Run a sweep in this process; return its wall time, s, and the records."""
    from tune.sweeps._run import run_sweep
    from tune.sweeps.spec import prepare, read_sweep

    spec = read_sweep(str(file), {})
    began = time.perf_counter()
    prepare(spec, fresh=True)
    records = run_sweep(spec)
    return time.perf_counter() - began, records


def timed(*command: str) -> tuple[float, str]:
    """Run a command; return its wall time, s, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    elapsed_s = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return elapsed_s, done.stdout


def train_one(loop_config: dict[str, Any]) -> None:
    """Train by Paceline's loop; each worker of Ray's way calls this."""
    from trainers.launch.training import TrainJob
    from trainers.on_ray.worker_group import RayContext

    context = RayContext(None)
    path = tuple(loop_config["path"])
    TrainJob(loop_config["tree"], path, "benchmark", "").execute(context)
    context.flush()


def as_documented(file: Path, limit: int | None, in_lanes: bool) -> None:
    """Run the sweep's trials as Ray documents it, with a TorchTrainer for each.

    Only the first `limit` trials run, if a limit is given. If `in_lanes`, the
    two names TorchTrainer and Tuner are imported from `tune.ray`.

    This function prints, as JSON, the wall time in Tune, and the configuration
    and loss of each trial.
    """
    import ray.train
    from ray import tune
    from ray.tune.integration.ray_train import TuneReportCallback

    if in_lanes:
        from tune.ray import TorchTrainer, Tuner
    else:
        from ray.train.torch import TorchTrainer  # type: ignore[assignment]
        from ray.tune import Tuner  # type: ignore[assignment]

    from trainers.config import TrainConfig
    from trainers.config.model import override
    from tune.search.space import grid
    from tune.sweeps.spec import read_sweep

    spec = read_sweep(str(file), {})
    storage = str(
        file.parent / f"{spec.config.name}-{'import' if in_lanes else 'ray'}"
    )

    def trial(config: dict[str, Any]) -> None:
        os.environ.update(RAYS_OWN)
        trainer = TorchTrainer(
            train_one,
            train_loop_config=config["run"],
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(
                name=f"train-{tune.get_context().get_trial_id()}",
                storage_path=storage,
                callbacks=[TuneReportCallback()],
            ),
        )
        trainer.fit()

    trials = grid(spec.config)[:limit]
    runs = [
        {
            "tree": override(TrainConfig, spec.train, one),
            "path": list(spec.path),
        }
        for one in trials
    ]
    # A trial's function holds one CPU, and its worker another. If more trials
    # ran at a time, they would wait forever.
    at_a_time = None if in_lanes else max(1, (os.cpu_count() or 1) // 2)
    tuner = Tuner(
        trial,
        param_space={"run": tune.grid_search(runs)},
        tune_config=tune.TuneConfig(max_concurrent_trials=at_a_time),
        run_config=tune.RunConfig(
            name="tune", storage_path=storage, verbose=0
        ),
    )
    began = time.perf_counter()
    results = tuner.fit()
    elapsed_s = time.perf_counter() - began
    found = [
        (
            trials[runs.index(result.config["run"])],
            float(result.metrics["val_loss"]),
        )
        for result in results
    ]
    print(json.dumps({"tune_s": elapsed_s, "found": found}))


def seconds_each(records: list[Any]) -> float:
    """Return the mean time from a trial's end to the next trial's end on its lane, s."""
    ends: dict[int | None, list[float]] = {}
    for record in records:
        ends.setdefault(record.lane, []).append(record.end_time)
    return statistics.mean(
        later - earlier
        for lane in ends.values()
        for earlier, later in pairwise(sorted(lane))
    )


def settle(most_s: float = 60.0) -> None:
    """Wait until the machine is idle, because a cluster has just been started.

    The first trials should not share the machine with that start.
    """
    deadline = time.monotonic() + most_s
    while (
        psutil.cpu_percent(interval=2.0) > _IDLE_PERCENT
        and time.monotonic() < deadline
    ):
        pass


def compare(
    directory: Path, count: int, full: bool, rounds: int
) -> dict[str, Any]:
    """Measure all ways on the same trials."""
    from tune.sweeps.spec import read_sweep
    from tune.trials.journal import Journal

    space = {"global_batch_size": BATCHES[count], "precision": PRECISIONS}
    file = sweep_file(directory, f"sweep-{count}", space, {})
    ours_s = []
    import_s = []
    said = []
    for number in range(rounds):
        ours_s.append(timed("tune", str(file), "--fresh", "--quiet")[0])
        took_s, printed = timed(
            "benchmarks.sweep", "--way", "import", "--file", str(file)
        )
        import_s.append(took_s)
        said.append(printed)
        if number == 0:
            command_s, printed = timed(
                "benchmarks.sweep",
                "--way",
                "full" if full else "ray",
                "--file",
                str(file),
            )
            said.append(printed)
            of_ray = json.loads(printed.splitlines()[-1])
    records = Journal(read_sweep(str(file), {}).storage).records()
    assert [record.status for record in records] == ["done"] * count, [
        record.message for record in records
    ]
    for printed in said:
        for config, loss in json.loads(printed.splitlines()[-1])["found"]:
            ours = next(
                record for record in records if record.config == config
            )
            assert ours.metrics["val_loss"] == loss, (
                config,
                ours.metrics["val_loss"],
                loss,
            )
    ray_trial_s = of_ray["tune_s"] / len(of_ray["found"])
    ray_s = command_s - of_ray["tune_s"] + ray_trial_s * count
    lanes_s = statistics.median(ours_s)
    changed_s = statistics.median(import_s)
    row = {
        "trials": count,
        "lanes_s": lanes_s,
        "lanes_rounds_s": ours_s,
        "import_s": changed_s,
        "import_rounds_s": import_s,
        "ray_s": ray_s,
        "ray_measured": len(of_ray["found"]),
        "ray_trial_s": ray_trial_s,
        "speedup": ray_s / lanes_s,
        "import_speedup": ray_s / changed_s,
        "train_s": statistics.mean(
            record.metrics["train_time_s"] for record in records
        ),
        "lanes": len({record.lane for record in records}),
        "each_s": seconds_each(records),
    }
    print(
        f"{count:5d} trials   lanes {lanes_s:7.1f} s   Ray's script on them {changed_s:7.1f} s   Ray {ray_s:7.1f} s "
        f"({row['ray_measured']} measured)   {row['speedup']:5.1f} x and {row['import_speedup']:5.1f} x   equal losses",
        flush=True,
    )
    return row


def constant_cost(directory: Path, count: int) -> dict[str, Any]:
    """Run trials of one step of one row; compare what the last and the first ones cost."""
    train = {
        "task_args": {"rows": 1},
        "epochs": None,
        "max_steps": 1,
        "global_batch_size": 1,
    }
    file = sweep_file(
        directory, f"noop-{count}", {"seed": list(range(count))}, train
    )
    elapsed_s, records = in_process(file)
    ends = sorted(record.end_time for record in records)
    edge = min(_EDGE, count // 4)
    # The very first trials still share the machine with the sweep's start.
    first_s, last_s = (
        (span[-1] - span[0]) / edge
        for span in (ends[edge : 2 * edge + 1], ends[-edge - 1 :])
    )
    print(
        f"{count} trials without training in {elapsed_s:.1f} s: {first_s:.3f} s each at the beginning, {last_s:.3f} s "
        f"at the end ({last_s / first_s:.2f} x)",
        flush=True,
    )
    return {
        "trials": count,
        "elapsed_s": elapsed_s,
        "first_s": first_s,
        "last_s": last_s,
        "ratio": last_s / first_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--full", action="store_true", help="run all trials of Ray's way"
    )
    parser.add_argument(
        "--noop",
        type=int,
        nargs="?",
        const=1000,
        default=0,
        help="run this many trials of one step each",
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds of Paceline's sweep and of the changed script",
    )
    parser.add_argument(
        "--way", choices=["ray", "full", "import"], help=argparse.SUPPRESS
    )
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        as_documented(
            args.file, 2 if args.way == "ray" else None, args.way == "import"
        )
        return
    directory = Path(tempfile.mkdtemp(prefix="paceline-sweep-"))
    try:
        if args.noop:
            from trainers.on_ray.cluster import connect

            connect(show_workers=False)
            settle()
            print(
                save(
                    "sweep-noop",
                    constant_cost(directory, args.noop),
                    args.keep,
                )
            )
            return
        rows = [
            compare(directory, count, args.full, args.rounds)
            for count in BATCHES
        ]
        many = rows[-1]
        marginal_s = many["each_s"] - many["train_s"]
        print(
            f"a further trial costs a lane {marginal_s:.2f} s beyond its own {many['train_s']:.2f} s of training"
        )
        print(
            save("sweep", {"rows": rows, "marginal_s": marginal_s}, args.keep)
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
