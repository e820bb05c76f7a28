"""The head's host loses power in the middle of a sweep: with Redis lanes go on, without it the journal does.

Minutes each, so `make faults` runs them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator

import pytest

from tests.lab.fixtures import lab_of
from tests.lab.held_sweep import FIRST, LANES, RATES, RESUME, HeldSweep, start_redis
from tests.lab.hosts import Lab
from tests.lab.on_premises import HEAD, OnPremises
from tests.waits import until

pytestmark = [pytest.mark.campaign, pytest.mark.lab]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of(3) as lab:
        yield lab


def test_with_redis_lanes_go_on(lab: Lab) -> None:
    for needed in ("redis-server", "openssl"):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is not installed (apt-get install redis-server openssl)")
    start_redis(lab)
    cluster = OnPremises(lab, redis=True)
    cluster.up()
    sweep = HeldSweep(cluster, host="h1")
    lanes = sweep.workers()
    assert (cluster.driver(sweep.job)[0], {host for host, _ in lanes}) == ("h1", LANES)

    lab.power_cut(HEAD)
    cut, before = time.monotonic(), sweep.begun()
    sweep.go()
    until(lambda: sweep.trained() >= sweep.amid, "the last step of the trials in mid-run, without a head")
    trained_s = time.monotonic() - cut
    lab.start(HEAD)
    cluster.up()
    print(f"\ntrained on for {trained_s:.1f} s without a head; one was up {time.monotonic() - cut:.1f} s after the cut")
    sweep.finish(sweep.job)
    assert_done(sweep)
    after = {rate for rate, _ in sweep.begun()[len(before) :]}
    assert after == {*RATES} - FIRST - sweep.amid, "those in mid-run went on, and none that had ended began again"
    assert sweep.workers() <= lanes, "the same processes"


def test_without_redis_resume_goes_on(lab: Lab) -> None:
    cluster = OnPremises(lab)
    cluster.up()
    sweep = HeldSweep(cluster)
    ended = sweep.records()

    lab.power_cut(HEAD)
    before = sweep.begun()
    lab.start(HEAD)
    cluster.up()
    sweep.go()
    until(lambda: cluster.alive() == [HEAD, *sorted(LANES)], "all hosts", every_s=1)
    sweep.finish(cluster.submit(*RESUME.split(), wait=False))
    assert_done(sweep)
    assert sweep.records().items() >= ended.items(), "what had ended is as it was"
    after = {rate for rate, _ in sweep.begun()[len(before) :]}
    assert after == {*RATES} - FIRST, "none that had ended began again"


def assert_done(sweep: HeldSweep) -> None:
    """Every trial of the journal has ended well."""
    assert {json.loads(record)["status"] for record in sweep.records().values()} == {"done"}
