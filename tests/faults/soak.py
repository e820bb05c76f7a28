"""Lanes over random trials, valid and failing, for hours: nothing that they use may grow.

Run as: python -m tests.faults.soak [--hours 2] [--seed 1] [--keep]
One sweep after another on one embedded cluster, each of random trials: most end well, others raise, diverge, leave a
thread behind, or kill their lane. Every few seconds the memory, descriptors and threads of each kind of
process are read, and the number of processes, of placement groups and of files in the temporary directory. After the
warm-up (the first third) the slope of each, over the rest, may not add more than its tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.faults.hook import role_by_title

REPOSITORY = Path(__file__).parents[2]
SWEEP_TRIALS = 40
WARM_UP_SHARE = 1 / 3
# What Ray's GCS remembers of the past is bounded, by numbers that a soak of hours does not reach.
_GCS_LIMITS = {
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_maximum_gcs_destroyed_actor_cached_count": "200",
    "RAY_maximum_gcs_dead_worker_cached_count": "200",
    "RAY_grpc_client_idle_timeout_ms": "60000",
}
_FAILURES = ("none", "none", "none", "none", "none", "raise", "nan", "kill")
_POISONS: tuple[list[str], ...] = ([], [], [], [], [], [], [], ["thread"])


@dataclass(frozen=True)
class Tolerance:
    """How much a figure may grow over the part of the soak that is judged."""

    share: float
    """Of its median."""
    least: float
    """Whatever its median is."""

    def allows(self, growth: float, median: float) -> bool:
        """Whether so much is noise."""
        return growth <= max(self.least, self.share * median)


TOLERANCES = {
    "memory_bytes": Tolerance(0.05, 24 << 20),
    "descriptors": Tolerance(0.05, 4),
    # Ray's holds the logs of workers open until there are 200 (LOG_MONITOR_MAX_OPEN_FILES), and then closes all.
    "descriptors of log monitor": Tolerance(0.0, 200),
    "threads": Tolerance(0.05, 4),
    "processes": Tolerance(0.05, 2),
    "placement_groups": Tolerance(0.0, 1),
    "files": Tolerance(0.0, 2),
    "shared_memory_bytes": Tolerance(0.05, 16 << 20),
}


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes of all pairs of samples (Theil 1950, Sen 1968), a second."""
    t, v = np.asarray(times), np.asarray(values)
    every = max(1, len(t) // 400)
    t, v = t[::every], v[::every]
    first, second = np.triu_indices(len(t), 1)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first]))) if len(t) > 1 else 0.0


@dataclass
class Samples:
    """Readings of the whole soak, by what is read of whom."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, at_s: float, readings: Mapping[str, float]) -> None:
        """Add what was read at a time."""
        for name, value in readings.items():
            self.times[name].append(at_s)
            self.values[name].append(value)

    def judged(self) -> dict[str, dict[str, Any]]:
        """Each figure: its median, how much it grew over the judged part, and whether that is flat."""
        end = max((times[-1] for times in self.times.values()), default=0.0)
        found = {}
        for name in sorted(self.times):
            late = [
                (t, v) for t, v in zip(self.times[name], self.values[name], strict=True) if t >= end * WARM_UP_SHARE
            ]
            if len(late) < 5:
                continue
            times, values = zip(*late, strict=True)
            growth, median = slope(times, values) * (times[-1] - times[0]), float(np.median(values))
            is_flat = (TOLERANCES.get(name) or TOLERANCES[name.partition(" ")[0]]).allows(growth, median)
            found[name] = {"median": median, "growth": growth, "samples": len(late), "flat": is_flat}
        return found


class Sampler:
    """A thread that reads what the cluster of this process uses."""

    def __init__(self, directory: Path, every_s: float) -> None:
        self.samples, self._directory, self._every_s = Samples(), directory, every_s
        self._closing, self._began = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(self._every_s):
            self.samples.add(time.monotonic() - self._began, self.read())

    def read(self) -> dict[str, float]:
        """Everything, now. The largest process of each kind: a kind may have more of them at another moment."""
        import psutil

        found: dict[str, float] = defaultdict(float)
        own = psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                kind = "driver" if process == own else _kind(" ".join(process.cmdline()))
                found["processes"] += 1
                of_one = {
                    "memory_bytes": process.memory_info().rss - process.memory_info().shared,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                for name, value in of_one.items():
                    found[f"{name} of {kind}"] = max(found[f"{name} of {kind}"], value)
        found["files"] = len(list(self._directory.iterdir()))
        found["shared_memory_bytes"] = sum(
            entry.stat().st_size
            for entry in os.scandir("/dev/shm")
            if entry.name.startswith(("torch_", "psm_", "sem."))
        )
        with contextlib.suppress(Exception):  # between two sweeps there may be no cluster to ask
            found["placement_groups"] = self._groups()
        return dict(found)

    def _groups(self) -> int:
        import ray
        from ray.util.state import list_placement_groups

        address = ray.get_runtime_context().gcs_address
        groups = list_placement_groups(address, limit=10_000, timeout=10)
        return sum(group.state != "REMOVED" for group in groups)


def _kind(command: str) -> str:
    return "log monitor" if "log_monitor.py" in command else role_by_title(command)


def tree(directory: Path, number: int, seed: int) -> dict[str, Any]:
    """A sweep of random trials."""
    train = {
        "task": "tests.lane_tasks:Poison",
        "task_dir": str(REPOSITORY),
        "task_args": {"fail_at": 9},
        "max_steps": 40,
        "global_batch_size": 24,
        "log_every_steps": 10,
        "evaluate": {"every_steps": 20},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "device": "cpu",
        "failure": {"hang_timeout_s": 60},
    }
    return {
        "name": f"soak-{number}",
        "storage_path": str(directory),
        "train": train,
        "space": {
            "task_args.failure": {"choice": list(_FAILURES)},
            "task_args.poison": {"choice": list(_POISONS)},
            "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
        },
        "search": "random",
        "seed": seed * 1000 + number,
        "budget": {"trials": SWEEP_TRIALS},
        "objective": {"metric": "val_loss"},
        "lanes": 2,
    }


def soak(hours: float, seed: int) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Run sweeps for so long; returns what was read, judged, and how the trials ended."""
    directory = Path(tempfile.mkdtemp(prefix="pls-", dir="/tmp"))
    (directory / "tmp").mkdir()
    os.environ.update(_GCS_LIMITS)
    os.environ.update(
        {"TMPDIR": str(directory / "tmp"), "RAY_TMPDIR": str(directory / "r"), "OMP_NUM_THREADS": "1"}
        | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "PYTHONPATH": str(REPOSITORY)}
    )
    os.environ.pop("RAY_ADDRESS", None)
    tempfile.tempdir = None
    from trainers.launch.log import setup_logging
    from trainers.on_ray.connect import connect, disconnect
    from tune.sweeps.run import run_sweep
    from tune.sweeps.spec import prepare, read_sweep

    setup_logging(1)

    statuses: dict[str, int] = defaultdict(int)
    connect(show_workers=False)
    deadline = time.monotonic() + hours * 3600
    try:
        with Sampler(directory / "tmp", max(1.0, hours * 3600 / 1500)) as sampler:
            for number in range(10**6):
                if time.monotonic() > deadline:
                    break
                file = directory / "sweep.yaml"
                file.write_text(yaml.safe_dump(tree(directory / "runs", number, seed)))
                spec = read_sweep(str(file), {})
                prepare(spec, fresh=False)
                for record in run_sweep(spec, checked=False):
                    statuses[record.status] += 1
                shutil.rmtree(directory / "runs", ignore_errors=True)
                print(f"sweep {number + 1}: {dict(statuses)}", flush=True)
        return sampler.samples.judged(), dict(statuses)
    finally:
        disconnect()
        shutil.rmtree(directory, ignore_errors=True)


def table(judged: Mapping[str, Mapping[str, Any]]) -> str:
    """As docs/reliability.md has it."""
    lines = ["| | median | growth | |", "|---|---|---|---|"]
    for name, row in judged.items():
        is_bytes = "bytes" in name
        shown = [f"{row[key] / 2**20:,.1f} MiB" if is_bytes else f"{row[key]:,.1f}" for key in ("median", "growth")]
        lines.append(
            f"| {name.replace('_bytes', '').replace('_', ' ')} | {' | '.join(shown)} | "
            f"{'flat' if row['flat'] else 'GROWS'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """1 where anything grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write to docs/reliability.md and benchmarks/results")
    given = parser.parse_args()
    judged, statuses = soak(given.hours, given.seed)
    shown = table(judged)
    print(f"\n{sum(statuses.values())} trials: {statuses}\n\n{shown}")
    if given.keep:
        from tests.faults.table import RESULTS, write_page

        write_page("soak", f"{given.hours:g} hours, {sum(statuses.values())} trials ({statuses}):\n\n{shown}")
        kept = {"hours": given.hours, "statuses": statuses, "figures": judged}
        (RESULTS / "soak.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(row["flat"] for row in judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
