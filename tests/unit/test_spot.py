"""Jobs with a deadline on machines that come and go: the accounts, the safety net, what is learned from observation."""

import math

import numpy as np
import pytest

from cluster.spot.availability import SpotRates, checkpoint_interval_s
from cluster.spot.game import Job, Machine, State, play
from cluster.spot.policy import ExpectedCost, UniformProgress

_JOB = Job(work_s=3600, deadline_s=7200, changeover_s=120, spot_usd_per_hour=1, on_demand_usd_per_hour=3)


class _Spot:
    """Spot or nothing."""

    mean_up_s = 3600.0

    def choose(self, state: State) -> Machine:
        return "spot" if state.is_available else "none"


def test_a_preemption_takes_the_work_since_the_checkpoint_and_costs_a_changeover() -> None:
    job = Job(1000, 7200, 120, 3.6, 36, checkpoint_s=20, interval_s=200)
    available = np.array([True] * 10 + [False] * 2 + [True] * 30)
    out = play(job, available, 60.0, _Spot())
    # 600 s: 120 s of start, two intervals and writes (440 s), 40 s lost; then 600 s of work and two writes.
    assert out.preemptions == 1
    assert out.lost_s == pytest.approx(40)
    assert out.spot_s == pytest.approx(600 + 120 + 640)
    assert out.usd == pytest.approx(out.spot_s * 3.6 / 3600)
    assert out.end_s == pytest.approx(720 + 120 + 640)


@pytest.mark.parametrize("policy", [UniformProgress, ExpectedCost])
@pytest.mark.parametrize("slack", [1.1, 1.5])
def test_no_job_is_late_that_on_demand_machines_could_do(policy: type, slack: float) -> None:
    rng = np.random.default_rng(1)
    for mean_up_s, mean_down_s, checkpoint_s in (
        (200.0, 300.0, 0.0),
        (3000.0, 900.0, 30.0),
        (1e9, 1.0, 30.0),
        (1, 1e9, 5.0),
    ):
        job = Job(7200, slack * 7320, 120, 1, 3, checkpoint_s)
        available = SpotRates(mean_up_s, mean_down_s).draw(math.ceil(job.deadline_s / 60), 60, rng)
        out = play(job, available, 60.0, policy())
        assert out.end_s <= job.deadline_s
        if policy is ExpectedCost:
            assert out.usd <= 1.1 * job.on_demand_usd + 1e-9


def test_without_spot_a_job_waits_and_then_costs_what_on_demand_machines_cost() -> None:
    never = np.zeros(120, bool)
    assert play(_JOB, never, 60.0, ExpectedCost()).usd == pytest.approx(_JOB.on_demand_usd)


def test_with_spot_all_the_time_nothing_else_is_used() -> None:
    always = np.ones(120, bool)
    for policy in (UniformProgress(), ExpectedCost()):
        out = play(_JOB, always, 60.0, policy)
        assert out.on_demand_s == 0
        assert out.usd == pytest.approx(3720 / 3600)


def test_the_policy_uses_what_it_is_told_of_the_rates() -> None:
    def first(mean_down_s: float) -> Machine:
        policy = ExpectedCost(SpotRates(3 * 3600, mean_down_s))
        return policy.choose(State(Job(36_000, 54_000, 300, 1, 3), 60.0, is_available=False))

    assert first(1200) == "none"
    # Where spot is dear, short and rare, waiting for it only loses the time; but waiting costs nothing either.
    expensive = Job(36_000, 54_000, 300, 2.99, 3)
    state = State(expensive, 60.0, is_available=True, running="on-demand", kept_s=3000)
    assert ExpectedCost(SpotRates(600, 36_000)).choose(state) == "on-demand"


@pytest.mark.parametrize("mean_up_h", [3, 30, 300, 3000])
def test_spot_that_is_rarely_taken_back_is_used(mean_up_h: int) -> None:
    policy = ExpectedCost(SpotRates(mean_up_h * 3600, 3600))
    out = play(Job(4 * 3600, 6 * 3600, 120, 1, 3, checkpoint_s=10), np.ones(400, bool), 60.0, policy)
    assert out.on_demand_s < 0.02 * out.spot_s


def test_rates_are_those_observed_beside_the_given() -> None:
    rates = SpotRates(mean_up_s=1000, mean_down_s=500)
    assert (rates.up, rates.down) == (1000, 500)
    rates = rates.observe(None, True, 4000).observe(True, False, 100).observe(False, True, 50)
    assert rates.up == pytest.approx((2000 + 4050) / 3)
    assert rates.down == pytest.approx(1100 / 3)
    drawn = SpotRates(3000, 1000).draw(200_000, 60, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(0.75, abs=0.02)
    with pytest.raises(ValueError, match="positive"):
        SpotRates(mean_up_s=0)


def test_the_interval_of_young_and_daly_costs_less_than_others() -> None:
    assert checkpoint_interval_s(10, 3600) == pytest.approx(268.3, abs=0.1)
    assert checkpoint_interval_s(4000, 3600) == 3600
    assert checkpoint_interval_s(10, 1e9) == pytest.approx(1000)
    available = SpotRates(3600, 1).draw(40_000, 30, np.random.default_rng(0))

    def usd(interval_s: float | None) -> float:
        job = Job(600_000, 1.2e6, 30, 1, 3, checkpoint_s=60, interval_s=interval_s)
        return play(job, available, 30.0, _Spot()).usd

    assert usd(None) < min(usd(150), usd(3000))
