"""The head's host loses power in mid-sweep: how long until trials run again, and which are run again?

Run as: python -m benchmarks.head [ROUNDS] [--off-s 20] [--only paceline-redis] [--keep]     (root; 15 minutes a round)
Four ways in turn, each on a cluster of its own that `ray up cluster/onprem.yaml` makes of three hosts on this machine
(tests/lab): Paceline and plain Ray (benchmarks/head_plain.py), each with the driver on the head and no Redis, and with
the driver on a worker and cluster/onprem-redis.patch. Of eight trials two have ended and two are in mid-run when the
power goes; it comes back after `--off-s`, then `ray up` is typed, and, where the sweep's job is lost, `resume`, or
plain Ray's `Tuner.restore`. Seconds are from the power cut. A trial `lost` was in mid-run and began again, one `rerun`
had ended and began again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.head_plain import COMMAND, RECORDS
from benchmarks.measure import save
from tests.lab import held_sweep
from tests.lab.held_sweep import FIRST, LANES, HeldSweep, start_redis
from tests.lab.hosts import Lab, missing
from tests.lab.on_premises import HEAD, OnPremises, wait_for


@dataclass(frozen=True)
class Way:
    """How the sweep is run."""

    with_redis: bool
    command: str
    resume: str
    records: str


_PACELINE = held_sweep.START, held_sweep.RESUME, held_sweep.RECORDS
_PLAIN = COMMAND, COMMAND, RECORDS
WAYS = {
    "paceline": Way(False, *_PACELINE),
    "plain": Way(False, *_PLAIN),
    "paceline-redis": Way(True, *_PACELINE),
    "plain-redis": Way(True, *_PLAIN),
}


@dataclass(frozen=True)
class Outcome:
    """What the power cut cost."""

    head_s: float
    """Until a head was up, `ray up` and all."""
    next_trial_s: float
    """Until a trial began, one of those in mid-run or another."""
    ended_s: float
    """Until the sweep had ended."""
    job_lived: bool
    """Whether the sweep's job went on by itself."""
    lost: int
    rerun: int


def cut(way: Way, off_s: float) -> Outcome:
    """One sweep, and one power cut."""
    with Lab(num_hosts=3) as lab:
        if way.with_redis:
            start_redis(lab)
        cluster = OnPremises(lab, redis=way.with_redis)
        cluster.up()
        sweep = HeldSweep(cluster, "h1" if way.with_redis else HEAD, way.command, way.records)
        lab.power_cut(HEAD)
        cut_s, before = time.time(), len(sweep.begun())
        sweep.go()
        time.sleep(off_s)
        lab.start(HEAD)
        cluster.up()
        head_s = time.time() - cut_s
        job, lives = sweep.job, way.with_redis
        if lives:
            wait_for(lambda: cluster.job(job) != "RUNNING", 300, "the end of the sweep's job", every_s=0.5)
            lives = cluster.job(job) == "SUCCEEDED"
        if not lives:
            wait_for(lambda: cluster.alive() == [HEAD, *sorted(LANES)], 240, "all hosts", every_s=0.5)
            job = cluster.submit(*way.resume.split(), wait=False)
        sweep.finish(job)
        ended_s, begun = time.time() - cut_s, sweep.begun()[before:]
        rates = [rate for rate, _ in begun]
        next_s = min(time_s for _, time_s in begun) - cut_s
        return Outcome(
            head_s, next_s, ended_s, lives, *(sum(rate in group for rate in rates) for group in (sweep.amid, FIRST))
        )


def main() -> None:
    """Print a row for each power cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=3)
    parser.add_argument("--off-s", type=float, default=20.0)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    if why := missing():
        raise SystemExit(f"there can be no lab here: {why}")
    rows: list[dict[str, Any]] = []
    for number in range(given.rounds):
        for name in [given.only] if given.only else WAYS:
            outcome = cut(WAYS[name], given.off_s)
            rows.append({"way": name, **asdict(outcome)})
            print(f"round {number + 1}: {name:15} {outcome}", flush=True)
    print(f"kept in {save('head', {'off_s': given.off_s, 'rows': rows}, given.keep)}")


if __name__ == "__main__":
    main()
