"""Each check of the oracle notices a build that is deliberately broken in its own way; and lets the sound one pass."""

from __future__ import annotations

import random

import pytest

from tests.faults.breaks import BREAKS
from tests.faults.cases import Case, Fault
from tests.faults.oracle import CHECKS
from tests.faults.runner import run_case
from tests.faults.scenarios import SCENARIOS, WORKSPACE
from tests.faults.soak import Samples

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

_AT = {"number": 57, "rank": 0}
KILLED = Fault("SIGKILL: worker", "signal", "worker", "SIGKILL", victim=0, **_AT)
STOPPED = Fault("SIGTERM: worker", "signal", "worker", "SIGTERM", victim=0, **_AT)
RAISED = Fault("exception: forward", "raise", event="forward", **_AT)
STARTED = Fault("a second start beside it", "start", **_AT)
DRIVER_KILLED = Fault("SIGKILL: driver", "signal", "driver", "SIGKILL", number=45, rank=0, trial=4)
SHOWN_BY = {
    "samples": KILLED,
    "weights": KILLED,
    "redone": KILLED,
    "hang": KILLED,
    "left": KILLED,
    "left files": KILLED,
    "status": STOPPED,
    "exit code": RAISED,
    "exit code beside": STARTED,
    "one sentence": RAISED,
    "cause": RAISED,
    "traceback": Fault("NaN", "nan", event="loss", **_AT),
    "trials": DRIVER_KILLED,
    "trials again": DRIVER_KILLED,
}


def check_of(name: str) -> str:
    """The check that notices a broken build; some have two."""
    return next(check for check in CHECKS if name.startswith(check))


def test_every_check_has_its_broken_build() -> None:
    assert {check_of(name) for name in BREAKS} == set(CHECKS)
    assert set(SHOWN_BY) == set(BREAKS)


@pytest.mark.campaign  # it judges the campaign, not Paceline
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_build_is_noticed(name: str) -> None:
    scenario = SCENARIOS["sweep" if name.startswith("trials") else "local"]
    limit_s = 20.0 if name == "hang" else None
    row = run_case(Case("broken", scenario, (SHOWN_BY[name],)), WORKSPACE, broken=name, limit_s=limit_s)
    assert row.landed
    assert any(words.startswith(f"{check_of(name)}: ") for words in row.violations), row.violations


@pytest.mark.campaign
@pytest.mark.parametrize("fault", [KILLED, STOPPED, RAISED, STARTED], ids=lambda fault: fault.name)
def test_the_sound_build_passes(fault: Fault) -> None:
    row = run_case(Case("sound", SCENARIOS["local"], (fault,)), WORKSPACE)
    assert row.landed
    assert row.held, row.violations


def test_the_soak_notices_what_grows() -> None:
    samples, chance = Samples(), random.Random(1)
    for second in range(600):
        noise = chance.gauss(0.0, 1.0)
        samples.add(
            second,
            {
                "memory_bytes of worker": 400e6 + noise * 5e6 + 2e5 * second,
                "memory_bytes of driver": 400e6 + noise * 5e6 + 1e8 * (second < 150),  # only while it warms up
                "descriptors of gcs": 80 + second // 30,
                "threads of gcs": 80 + second % 3,
                "files": second // 100,
            },
        )
    flat = {name: row["flat"] for name, row in samples.judged().items()}
    assert flat == {
        "memory_bytes of worker": False,
        "memory_bytes of driver": True,
        "descriptors of gcs": False,
        "threads of gcs": True,
        "files": False,
    }
