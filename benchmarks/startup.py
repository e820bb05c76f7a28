"""How long from the command to the end of the first step? In this process, under torchrun, on Ray, in a warm lane.

Run as: python -m benchmarks.startup [ROUNDS] [--only local,torchrun,ray,lane] [--short] [--keep]
`floor` is benchmarks/startup_floor.py, the least that any script must do (imports, rendezvous, model, optimizer, one
step), started the same way and measured twice (the A/A floor); `paceline` trains examples/your_model, and its time ends
when the terminal shows the first step. What lies between the two is ours: configuration, checks, storage, the probe of
the microbatch. Every command is a process of its own; files are in the page cache after the first, dropped round. `ray`
starts an embedded cluster and a TorchTrainer each time.

`lane` is a sweep of trials of one step in one lane: from the end of one to the end of the next, its record on storage
and the search's next word included. A trial's first step is sooner.
"""

from __future__ import annotations

import argparse
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

from benchmarks.measure import interleave, save, show, summarize

REPOSITORY = Path(__file__).parents[1]
_WORKERS = 2
_TIMEOUT_S = 300
# fmt: off
LAUNCHERS: dict[str, list[str]] = {
    "local": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(_WORKERS),
                 "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"],
    "ray": [sys.executable],
}
# fmt: on


def floor_command(launcher: str) -> list[str]:
    """The plain script."""
    workers = [str(_WORKERS)] if launcher == "ray" else []
    return [*LAUNCHERS[launcher], str(REPOSITORY / "benchmarks/startup_floor.py"), *workers]


def paceline_command(launcher: str, storage: Path) -> list[str]:
    """The same training by Paceline, one step of it."""
    config = str(REPOSITORY / "examples/your_model/train.yaml")
    changes = ["--max_steps", "1", "--log_every_steps", "1", "--storage_path", str(storage), "--device", "cpu"]
    own = {"local": ["--launcher", "local"], "ray": ["--launcher", "ray", "--scaling.num_workers", str(_WORKERS)]}
    return [*LAUNCHERS[launcher], "-m", "trainers", config, *changes, *own.get(launcher, [])]


def first_step_ms(command: list[str]) -> float:
    """Milliseconds from the start of a command to the line of its first step; waits for its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    # fmt: off
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # fmt: on
    assert process.stdout is not None
    found: float | None = None
    for line in process.stdout:
        if found is None and "step 1/" in line:  # Ray puts the worker's name before it
            found = (time.perf_counter() - began) * 1e3
    _, errors = process.communicate(timeout=_TIMEOUT_S)
    if found is None or process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {errors[-2000:]}")
    return found


def measure(launcher: str, rounds: int) -> dict[str, Any]:
    """The figures of one launcher, and what of ours lies above the floor."""
    storage = Path(tempfile.mkdtemp(prefix="startup-"))

    def paceline() -> float:
        shutil.rmtree(storage)
        storage.mkdir()
        return first_step_ms(paceline_command(launcher, storage))

    try:
        found = interleave(
            {
                "floor": lambda: first_step_ms(floor_command(launcher)),
                "paceline": paceline,
                "floor again": lambda: first_step_ms(floor_command(launcher)),
            },
            rounds,
        )
    finally:
        shutil.rmtree(storage)
    summary = summarize(found, "floor", "floor again")
    show(f"{launcher}: command to the end of the first step", "ms", summary)
    above = [mine - floor for mine, floor in zip(found["paceline"], found["floor"], strict=True)]
    print(f"  above the floor: {statistics.median(above):,.0f} ms   [{min(above):,.0f}, {max(above):,.0f}]")
    return {**summary, "above_floor_ms": {"median": statistics.median(above), "min": min(above), "max": max(above)}}


def warm_trials(trials: int) -> dict[str, float]:
    """Milliseconds that a trial of one step takes in a warm lane; the first quarter of them is the lane's start."""
    from benchmarks.sweep import sweep_file, through_lanes
    from trainers.on_ray.connect import connect

    connect(show_workers=False)
    train = {"task_args": {"rows": 1}, "epochs": None, "max_steps": 1, "global_batch_size": 1}
    with tempfile.TemporaryDirectory(prefix="startup-") as directory:
        _, records = through_lanes(sweep_file(Path(directory), "warm", {"seed": list(range(trials))}, train, lanes=1))
    ends = sorted(record.end_time for record in records)[trials // 4 :]
    took = [(later - earlier) * 1e3 for earlier, later in pairwise(ends)]
    found = {"median": statistics.median(took), "min": min(took), "max": max(took), "n": len(took)}
    print(f"\nlane: a trial of one step {found['median']:,.0f} ms   [{min(took):,.0f}, {max(took):,.0f}] n={len(took)}")
    return found


def main(rounds: int, launchers: list[str], keep: bool) -> None:
    """All launchers, then the lane."""
    results = {launcher: measure(launcher, rounds) for launcher in launchers if launcher in LAUNCHERS}
    if "lane" in launchers:
        results["lane"] = {"trial_ms": warm_trials(20 * rounds)}
    print(f"\nkept in {save('startup', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), help="of local, torchrun, ray, lane")
    parser.add_argument("--short", action="store_true", help="two rounds, and Ray only if it is asked for")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args()
    launchers = given.only or [name for name in (*LAUNCHERS, "lane") if not (given.short and name == "ray")]
    main(2 if given.short else given.rounds, launchers, given.keep)
