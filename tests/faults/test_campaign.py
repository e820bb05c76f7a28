"""A short campaign of fixed cases, a role and a kind of fault each; those that need a cluster are in tests/on_ray."""

from __future__ import annotations

import random

import pytest

from tests.faults.cases import Case, Fault, draw
from tests.faults.runner import run_case
from tests.faults.scenarios import SCENARIOS, WORKSPACE
from tests.faults.soak import Samples

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

_AT = {"number": 57, "rank": 0}
CASES = {
    "local killed at a storage operation": (
        Fault("storage: killed", "signal", "worker", "SIGKILL", event="storage", number=90, rank=0, victim=0),
    ),
    "local disk": (Fault("storage: full", "errno", "worker", "ENOSPC", event="storage", number=70, rank=0),),
    "local stalled": (Fault("storage: stalled", "stall", event="storage", number=70, rank=0),),
    "loader": (Fault("SIGKILL: loader", "signal", "loader", "SIGKILL", "collate", 20, role="loader"),),
    "torchrun worker": (Fault("SIGKILL: worker", "signal", "worker", "SIGKILL", victim=1, **_AT),),
    "torchrun agent": (Fault("SIGKILL: torchrun", "signal", "torchrun", "SIGKILL", **_AT),),
}

LONG = ("local killed at a storage operation", "local stalled", "loader", "torchrun agent")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.campaign] * (name in LONG)) for name in CASES])
def test_it_holds(name: str) -> None:
    row = run_case(Case("short", SCENARIOS[name.partition(" ")[0]], CASES[name]), WORKSPACE)
    assert row.landed, "the fault did not happen"
    assert row.held, "\n".join(row.violations)


def test_a_case_is_its_seed_and_number() -> None:
    assert draw(1, 37) == draw(1, 37)
    assert len({draw(1, number).faults for number in range(1, 60)}) > 40
    assert draw(1, 5, only="spawn").scenario.name == "spawn"
    assert {draw(3, number, plain=True).scenario.plain for number in range(20)} == {True}


def test_every_role_and_signal_is_drawn() -> None:
    drawn = [draw(seed, number) for seed in (1, 2, 3) for number in range(1, 501)]
    hit = {(case.scenario.name, fault.target) for case in drawn for fault in case.faults if fault.act == "signal"}
    assert hit >= {(name, role) for name, one in SCENARIOS.items() if not one.plain for role in one.roles}


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
