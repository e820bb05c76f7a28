"""Does a unit cost the same however many there are? Lanes, trials, parameters.

Run as: python -m benchmarks.scale [ROUNDS] [--only lanes,trials,parameters] [--short] [--keep]

    lanes       1, 2, 4: trials that wait half a second without a core, as one on a GPU would; a lane's time for each
                trial above that wait, and the time until all lanes are up
    trials      10, 100, 1,000 that train one step of one row, in one lane: time a trial after the first
    parameters  1e5 to 1e8: a step of our loop beside that of a plain one, a checkpoint (weights and two moments, at
                once) beside writing as many bytes, and putting a lane back after a run

A cost that grows with the size is laid beside `fixed + unit x size` through its smallest and largest size, and beside
what the machine itself takes for it (`floor`, measured twice: the A/A floor): what follows either is explained.
`--short` is one round (unless ROUNDS says more) without the largest of each.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import save
from benchmarks.scale_parameters import PARAMETERS, by_parameters, explain, in_turn
from benchmarks.sweep import Rows, sweep_file, through_lanes

LANES = (1, 2, 4)
TRIALS = (10, 100, 1000)
PAUSE_S = 0.5
_TRIALS_OF_A_LANE = 30
_NOOP = {"task_args": {"rows": 1}, "epochs": None, "max_steps": 1, "global_batch_size": 1}


class Pausing(Rows):
    """Takes its time without a core."""

    def __init__(self, rows: int = 1, pause_s: float = PAUSE_S) -> None:
        super().__init__(rows)
        self.pause_s = pause_s

    def setup(self) -> None:
        time.sleep(self.pause_s)


def trial_costs(ends: Sequence[float], lanes: Sequence[int | None], began: float) -> dict[str, float]:
    """Of the times at which trials ended, and on which lane: s until all lanes are up, and s a trial from then on.

    `first_s` and `last_s` are of the first and the last quarter of those. Raises RuntimeError when there are none.
    """
    up = max(min(end for end, own in zip(ends, lanes, strict=True) if own == lane) for lane in set(lanes))
    rest = [up, *sorted(end for end in ends if end > up)]
    quarter = max(1, (len(rest) - 1) // 4)
    if len(rest) <= len(set(lanes)):
        raise RuntimeError(
            f"of {len(ends)} trials hardly one ended after the last lane was up: the machine is too busy"
        )
    return {
        "up_s": up - began,
        "trial_s": (rest[-1] - up) / (len(rest) - 1),
        "first_s": (rest[quarter] - up) / quarter,
        "last_s": (rest[-1] - rest[-1 - quarter]) / quarter,
    }


def sweep(count: int, lanes: int, train: dict[str, Any]) -> dict[str, float]:
    """The figures of one sweep of so many equal trials."""
    directory = Path(tempfile.mkdtemp(prefix="paceline-scale-"))
    try:
        file = sweep_file(directory, f"scale-{count}", {"seed": list(range(count))}, train, lanes)
        began = time.time()
        _, records = through_lanes(file)
        assert [record.status for record in records] == ["done"] * count, [record.message for record in records]
        return trial_costs([record.end_time for record in records], [record.lane for record in records], began)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def by_lanes(counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Lane seconds a trial above its own pause, for each number of lanes."""
    train = {**_NOOP, "task": "benchmarks.scale:Pausing"}
    rows = in_turn(counts, rounds, lambda lanes: sweep(lanes * _TRIALS_OF_A_LANE, lanes, train))
    cores = len(os.sched_getaffinity(0))
    print(f"\nlanes: each trial waits {PAUSE_S} s; {cores} cores")
    for lanes, row in rows.items():
        row["above_s"] = {
            key: row["trial_s"][key] if key == "n" else row["trial_s"][key] * lanes - PAUSE_S for key in row["trial_s"]
        }
        above, up = row["above_s"], row["up_s"]
        print(
            f"  {lanes} lanes   {above['median']:.3f} s of a lane a trial above that [{above['min']:.3f}, "
            f"{above['max']:.3f}] n={above['n']}   all up after {up['median']:.1f} s"
        )
    starts = [row["up_s"]["median"] for row in rows.values()]
    line = explain(counts, starts)
    print(
        f"  start: {line['fixed']:.1f} s + {line['unit']:.1f} s a lane (within {line['off']:.2f} x): the "
        f"processes of all lanes import at once, on {cores} cores"
    )
    return {"rows": rows, "start": line, "cores": cores}


def by_trials(counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds a trial that has hardly any of its own, for each number of trials."""
    rows = in_turn(counts, rounds, lambda count: sweep(count, 1, _NOOP))
    print("\ntrials: one step of one row each, one lane")
    for count, row in rows.items():
        each = row["trial_s"]
        print(
            f"  {count:5} trials   {each['median'] * 1e3:6.1f} ms each after the first [{each['min'] * 1e3:.1f}, "
            f"{each['max'] * 1e3:.1f}] n={each['n']}   first quarter {row['first_s']['median'] * 1e3:.1f}, "
            f"last {row['last_s']['median'] * 1e3:.1f} ms"
        )
    return {"rows": rows}


def main(rounds: int, chosen: list[str], short: bool, keep: bool) -> None:
    """All that was chosen."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if "parameters" in chosen:
        results["parameters"] = by_parameters(PARAMETERS[:-1] if short else PARAMETERS, rounds)
    if {"lanes", "trials"} & set(chosen):
        # isort: split
        import ray

        # A CPU is a place for a lane here: its trials wait, or take turns.
        ray.init(num_cpus=max(LANES), log_to_driver=False, logging_level=logging.WARNING)
        # Trials first: the first start of all on this cluster takes longer, and its time is no figure there.
        if "trials" in chosen:
            results["trials"] = by_trials(TRIALS[:-1] if short else TRIALS, rounds)
        if "lanes" in chosen:
            results["lanes"] = by_lanes(LANES[:-1] if short else LANES, rounds)
        ray.shutdown()
    print(f"\nkept in {save('scale', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, help="default 3, with --short 1")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["lanes", "trials", "parameters"])
    parser.add_argument("--short", action="store_true", help="one round, without the largest sizes")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args()
    main(given.rounds or (1 if given.short else 3), given.only, given.short, given.keep)
