"""Where do the seconds of a sweep's cold start go? From the command to the first trial, on an embedded cluster.

Run as: python -m benchmarks.cold_start [ROUNDS] [--keep]
Each round is `python -m tune` in a process of its own, over a task that takes no time, in one lane of one worker.
As soon as a part is done it is noted when, and how much processor time the command's processes have used until then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import save

REPOSITORY = Path(__file__).parents[1]
PARTS = {
    "imports": "Python starts and imports the command",
    "checks": "the sweep is read, the task imported and checked (torch)",
    "ray": "Ray's own processes: GCS, raylet, dashboard agent",
    "plan": "the cluster is looked at, and the sweep planned",
    "mailbox": "a process of the mailbox",
    "controller": "Ray Train's controller of the lane, a process",
    "workers": "the worker processes of the lane",
    "lane": "a worker imports torch and joins its group",
    "trial": "the first trial's task is imported and set up",
}
_TASK = """
import os, time
import torch
from trainers import Task

class Short(Task):
    def model(self):
        return torch.nn.Linear(2, 1)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])
    def setup(self):
        with open("MARKS", "a") as file:
            file.write(f"trial {time.time()}\\n")
"""


def drive(marks: Path, arguments: list[str]) -> int:
    """The command, in this process, which notes when each part is done."""
    import psutil

    own = psutil.Process()

    def mark(part: str) -> None:
        used = 0.0
        for process in [own, *own.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            used += times.user + times.system
        with marks.open("a") as file:
            file.write(f"{part} {time.time()} {used}\n")

    import tune.__main__

    mark("imports")
    import ray

    from tune.sweeps import run

    connect, start_mailbox = run.connect, run.start_mailbox

    def connected(**given: Any) -> None:
        mark("checks")
        connect(**given)
        mark("ray")

    def started(*given: Any) -> Any:
        mark("plan")
        mailbox = start_mailbox(*given)
        threading.Thread(target=follow, args=(mailbox,), daemon=True).start()
        return mailbox

    def follow(mailbox: Any) -> None:
        ray.get(mailbox.starts.remote("controller"))
        mark("mailbox")
        for part, asked in (
            ("controller", lambda: mailbox.starts.remote("controller")),
            ("workers", lambda: mailbox.starts.remote("workers")),
        ):
            while not ray.get(asked()):
                time.sleep(0.02)
            mark(part)
        while not ray.get(mailbox.watch.remote())["lanes"]:
            time.sleep(0.02)
        mark("lane")

    run.connect, run.start_mailbox = connected, started
    return tune.__main__.run_here(arguments)


def measure(directory: Path) -> dict[str, tuple[float, float]]:
    """Seconds of the wall and of the processor that each part has taken in one cold start."""
    marks = directory / "marks"
    (directory / "short.py").write_text(_TASK.replace("MARKS", str(marks)))
    tree = {
        "name": "cold",
        "storage_path": str(directory / "runs"),
        "train": {"task": "short:Short", "global_batch_size": 8, "epochs": 1, "optimizer": {"name": "sgd", "lr": 0.1}},
        "space": {"seed": [1]},
        "objective": {"metric": "val_loss"},
        "lanes": 1,
    }
    (directory / "sweep.yaml").write_text(json.dumps(tree))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
        "PYTHONPATH": str(REPOSITORY)
    }
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cold_start", "--drive", str(marks), str(directory / "sweep.yaml")],
        cwd=REPOSITORY,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    first: dict[str, tuple[float, float]] = {}
    for line in marks.read_text().splitlines():
        part, at, *used = line.split()
        first.setdefault(part, (float(at), float(used[0]) if used else 0.0))
    found, before, used_before = {}, began, 0.0
    for part in PARTS:
        at, used_s = first[part]
        found[part] = (max(0.0, at - before), max(0.0, used_s - used_before))  # marks are set by a look every 20 ms
        before, used_before = at, used_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive:
        raise SystemExit(drive(Path(given.drive[0]), given.drive[1:]))
    rounds = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as directory:
            rounds.append(measure(Path(directory)))
    results: dict[str, Any] = {"rounds": given.rounds}
    for part, what in PARTS.items():
        wall_s, used_s = (statistics.median(values) for values in zip(*(one[part] for one in rounds), strict=True))
        results[part] = {"wall_s": wall_s, "cpu_s": used_s}
        print(f"{part:<11} {wall_s:5.2f} s  {used_s:5.2f} s of the processor   {what}")
    results["wall_s"] = statistics.median(sum(wall_s for wall_s, _ in one.values()) for one in rounds)
    print(f"{'all':<11} {results['wall_s']:5.2f} s\n{save('cold-start', results, given.keep)}")


if __name__ == "__main__":
    main()
