"""The clairvoyant is the optimum, and the replay runs on traces of the published form."""

import gzip
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks import spot
from cluster.spot.availability import Bools
from cluster.spot.game import Job, Machine, State, play


class _Plan:
    """Machines written down beforehand, as far as they can be had."""

    mean_up_s = 100.0

    def __init__(self, machines: tuple[Machine, ...]) -> None:
        self.machines = machines

    def choose(self, state: State) -> Machine:
        wanted = self.machines[round(state.now_s)]
        return "none" if wanted == "spot" and not state.is_available else wanted


def _least_usd(job: Job, available: Bools) -> float:
    machines: tuple[Machine, ...] = ("none", "spot", "on-demand")
    plans = itertools.product(machines, repeat=len(available))
    outcomes = (play(job, available, 1.0, _Plan(plan)) for plan in plans)
    return min(out.usd for out in outcomes if out.end_s <= job.deadline_s)


@pytest.mark.parametrize("seed", range(6))
def test_the_clairvoyant_pays_the_least_of_all_plans(seed: int) -> None:
    rng = random.Random(seed)
    steps = 8
    available = np.array([rng.random() < 0.7 for _ in range(steps)])
    job = Job(rng.choice([3.0, 4.0]), float(steps), float(rng.choice([1, 2])), 360.0, 3600 * rng.uniform(0.15, 0.5))
    # Checkpoints of an instant after each step: the plan that is best loses nothing by preemptions.
    foreseen = Job(**(vars(job) | {"interval_s": 1.0}))
    assert spot.clairvoyant_usd(job, available, 1.0) == pytest.approx(_least_usd(foreseen, available))


def test_the_replay_of_small_traces_keeps_its_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    flags = np.repeat(rng.integers(0, 5, 60), rng.integers(1, 9, 60)).tolist()
    tree = {"metadata": {"gap_seconds": 600}, "data": flags}
    (tmp_path / "zone.json.gz").write_bytes(gzip.compress(json.dumps(tree).encode()))
    trace = spot.Trace.read(tmp_path / "zone.json.gz")
    assert trace.step_s == 60
    assert len(trace.available) == 10 * len(flags)
    assert trace.available[::10].tolist() == [flag == 4 for flag in flags]
    rows = spot.replay([trace], 3, 0)
    for row in rows:
        for name in spot.POLICIES:
            assert not row[name]["late"]
            assert 1 <= row[name]["cost"] < math.inf
    assert spot.summarize(rows)["by_trace"]["zone"]["expected cost"] >= 1
    with pytest.raises(SystemExit):
        spot.main(["--traces", str(tmp_path / "none")])
    assert "holds no" in capsys.readouterr().err
