"""What does a job with a deadline cost on spot machines, beside a clairvoyant's choice of machines?

Run as: python -m benchmarks.spot --traces DIR [--jobs 500] [--seed 0] [--keep]
DIR holds traces as in github.com/skypilot-org/spot-traces (`*.json.gz` or `*.json`: `metadata.gap_seconds` and `data`,
how many of the machines could be had at each tick; spot counts as available where all of them could). Nothing but the
clairvoyant sees more of a trace than the ticks so far. Each job has a length (4 to 48 hours, evenly in the logarithm),
a deadline (1.1 to 2 times the length), a changeover (2 to 12 minutes) and a price ratio (2 to 5) drawn from the seed; a
checkpoint holds it up for 10 s, and spot machines go without notice. The results depend on no machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import save
from cluster.spot.availability import Bools
from cluster.spot.game import Job, Machine, Policy, State, play
from cluster.spot.policy import ExpectedCost, UniformProgress, Watching, must_run

_FINEST_S = 60
SLACK = 1.1
"""Every job could be done by its deadline with 10 % to spare."""
INTERVALS_S = (60.0, 300.0, 1800.0, 7200.0)
"""Fixed checkpoint intervals, beside the chosen one."""


class SpotThenOnDemand(Watching):
    """Spot where there is spot, else wait; on-demand machines when it would otherwise be late."""

    def choose(self, state: State) -> Machine:
        """Return the machines of this step."""
        self.see(state)
        if must_run(state):
            return "on-demand"
        return "spot" if state.is_available else "none"


POLICIES: dict[str, Callable[[], Policy]] = {
    "expected cost": ExpectedCost,
    "uniform progress": UniformProgress,
    "spot, then on-demand": SpotThenOnDemand,
}


@dataclass(frozen=True)
class Trace:
    """Whether spot machines could be had, step by step."""

    name: str
    available: Bools
    step_s: float

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file; ticks of whole minutes are cut into steps of a minute, so that changeovers differ."""
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        tree = json.loads(text)
        gap_s, counts = tree["metadata"]["gap_seconds"], np.asarray(tree["data"])
        parts = int(gap_s // _FINEST_S) if gap_s % _FINEST_S == 0 else 1
        return cls(path.name.split(".")[0], np.repeat(counts >= max(1, counts.max()), parts), gap_s / parts)


def draw_jobs(traces: list[Trace], count: int, seed: int) -> Iterator[tuple[Trace, Job, Bools]]:
    """Draw jobs, each on a stretch of a trace as long as its deadline is away; times are whole steps."""
    rng = random.Random(seed)
    for _ in range(count):
        trace = rng.choice(traces)
        step_s = trace.step_s
        longest_h = min(48.0, len(trace.available) * step_s / 3600 / 2.2)
        work = max(1, round(math.exp(rng.uniform(math.log(min(4.0, longest_h)), math.log(longest_h))) * 3600 / step_s))
        changeover = max(1, round(rng.uniform(120, 720) / step_s))
        steps = math.ceil(max(work * rng.uniform(SLACK, 2.0), SLACK * (work + changeover)))
        if steps > len(trace.available):
            raise ValueError(f"{trace.name} is too short: {len(trace.available)} steps, of which a job needs {steps}")
        begin = rng.randrange(len(trace.available) - steps + 1)
        ratio = rng.uniform(2.0, 5.0)
        job = Job(work * step_s, steps * step_s, changeover * step_s, 1.0, ratio, checkpoint_s=10.0)
        yield trace, job, trace.available[begin : begin + steps]


def clairvoyant_usd(job: Job, available: Bools, step_s: float) -> float:
    """Return the least dollars for which the job can be done in time by one who knows the availability.

    Exact, by dynamic programming from the deadline over steps, machines and steps of work left. The clairvoyant loses
    no work and pays for no checkpoint: it writes one when it leaves machines, which counts as part of the changeover.
    """
    boot, work = round(job.changeover_s / step_s), round(job.work_s / step_s)
    assert boot >= 1
    spot, demand = job.spot_usd_per_hour * step_s / 3600, job.on_demand_usd_per_hour * step_s / 3600
    done = np.full(work + 1, np.inf)
    done[0] = 0.0
    idle, on_spot, on_demand = done, deque([done] * boot, boot), deque([done] * boot, boot)  # the next `boot` steps
    up = 0  # steps from here on with spot machines
    for is_up in available[::-1]:
        up = up + 1 if is_up else 0
        stay_spot, stay_demand = done.copy(), done.copy()
        if is_up:
            stay_spot[1:] = spot + on_spot[0][:-1]
        stay_demand[1:] = demand + on_demand[0][:-1]
        idle = np.minimum(idle, demand * boot + on_demand[-1])
        if up >= boot:
            idle = np.minimum(idle, spot * boot + on_spot[-1])
        idle[0] = 0.0
        on_spot.appendleft(np.minimum(stay_spot, idle))
        on_demand.appendleft(np.minimum(stay_demand, idle))
    return float(idle[-1])


def replay(traces: list[Trace], count: int, seed: int) -> list[dict[str, Any]]:
    """Do each job under each policy, and with each interval; a row a job."""
    rows = []
    for trace, job, available in draw_jobs(traces, count, seed):
        best_usd = clairvoyant_usd(job, available, trace.step_s)
        row: dict[str, Any] = {
            "trace": trace.name,
            "slack": job.deadline_s / job.work_s,
            "hours": job.work_s / 3600,
            "on_demand": job.on_demand_usd / best_usd,
        }
        for name, make in POLICIES.items():
            out = play(job, available, trace.step_s, make())
            row[name] = {"cost": out.usd / best_usd, "late": out.end_s > job.deadline_s + 1e-6}
            row[name]["above_on_demand"] = out.usd / job.on_demand_usd - 1
        # With the simpler policy, whose choice of machines hardly depends on the interval.
        for interval_s in (None, *INTERVALS_S):
            out = play(replace(job, interval_s=interval_s), available, trace.step_s, SpotThenOnDemand())
            row[f"interval {'chosen' if interval_s is None else f'{interval_s:g} s'}"] = out.usd / best_usd
        rows.append(row)
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Cost in units of the clairvoyant's: means, quantiles, and what went against the goals."""
    found: dict[str, Any] = {"jobs": len(rows), "on_demand": _spread([row["on_demand"] for row in rows])}
    for name in POLICIES:
        costs, above = [row[name]["cost"] for row in rows], [row[name]["above_on_demand"] for row in rows]
        found[name] = _spread(costs) | {
            "late": sum(row[name]["late"] for row in rows),
            "above_on_demand": sum(one > 1e-9 for one in above),
            "most_above_on_demand": max(above),
            "below_1.15": float(np.mean(np.asarray(costs) <= 1.15)),
        }
    found["by_slack"] = {
        f"{low} to {low + 0.3:.1f}": {
            name: float(np.mean([row[name]["cost"] for row in rows if low <= row["slack"] < low + 0.3] or [math.nan]))
            for name in POLICIES
        }
        for low in (1.1, 1.4, 1.7)
    }
    found["by_trace"] = {
        trace: {name: float(np.mean([row[name]["cost"] for row in rows if row["trace"] == trace])) for name in POLICIES}
        for trace in sorted({row["trace"] for row in rows})
    }
    found["intervals"] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if "interval" in key}
    return found


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high, most = np.quantile(values, [0.05, 0.5, 0.95, 1.0])
    return {"mean": float(np.mean(values)), "p5": low, "median": median, "p95": high, "max": most}


def main(argv: list[str] | None = None) -> None:
    """All traces of a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="directory of *.json.gz or *.json")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args(argv)
    paths = sorted([*given.traces.glob("*.json.gz"), *given.traces.glob("*.json")])
    if not paths:
        parser.error(f"{given.traces} holds no *.json.gz and no *.json")
    found = summarize(replay([Trace.read(path) for path in paths], given.jobs, given.seed))
    print(f"{found['jobs']} jobs, cost / clairvoyant's; on-demand alone {found['on_demand']['mean']:.2f}")
    for name in POLICIES:
        row = found[name]
        spread = f"mean {row['mean']:.3f}, 5 to 95 % {row['p5']:.2f} to {row['p95']:.2f}, worst {row['max']:.2f}"
        above = f"above on-demand {row['above_on_demand']} (by {row['most_above_on_demand']:.1%} at most)"
        print(f"  {name:22} {spread}; late {row['late']}, {above}")
    for title in ("by_slack", "by_trace"):
        for key, means in found[title].items():
            print(f"  {key:52} " + "  ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    print("  " + "  ".join(f"{key} {mean:.3f}" for key, mean in found["intervals"].items()))
    print(f"kept in {save('spot', found | {'seed': given.seed}, given.keep)}")


if __name__ == "__main__":
    main()
