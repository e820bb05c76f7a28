"""A short campaign of fixed cases, a role and a kind of fault each; those that
need a cluster are in tests/on_ray.
"""

import pytest

from tests.faults.cases import Case, Fault, draw
from tests.faults.runner import run_case
from tests.faults.scenarios import SCENARIOS, WORKSPACE

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

_AT = {"number": 57, "rank": 0}
CASES = {
    "local killed at a storage operation": (
        Fault(
            "storage: killed",
            "signal",
            "worker",
            "SIGKILL",
            event="storage",
            number=90,
            rank=0,
            victim=0,
        ),
    ),
    "local disk": (
        Fault(
            "storage: full",
            "errno",
            "worker",
            "ENOSPC",
            event="storage",
            number=70,
            rank=0,
        ),
    ),
    "local stalled": (
        Fault("storage: stalled", "stall", event="storage", number=70, rank=0),
    ),
    "loader": (
        Fault(
            "SIGKILL: loader",
            "signal",
            "loader",
            "SIGKILL",
            "collate",
            20,
            role="loader",
        ),
    ),
    "torchrun worker": (
        Fault(
            "SIGKILL: worker", "signal", "worker", "SIGKILL", victim=1, **_AT
        ),
    ),
    "torchrun agent": (
        Fault("SIGKILL: torchrun", "signal", "torchrun", "SIGKILL", **_AT),
    ),
}

MARKS = {
    name: [pytest.mark.campaign] for name in CASES if name != "torchrun worker"
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [])) for name in CASES]
)
def test_it_holds(name):
    row = run_case(
        Case("short", SCENARIOS[name.partition(" ")[0]], CASES[name]),
        WORKSPACE,
    )
    assert row.landed, "the fault did not happen"
    assert row.held, "\n".join(row.violations)


def test_a_case_is_its_seed_and_number():
    assert draw(1, 37) == draw(1, 37)
    assert len({draw(1, number).faults for number in range(1, 60)}) > 40
    assert draw(1, 5, only="spawn").scenario.name == "spawn"


def test_every_role_and_signal_is_drawn():
    drawn = [
        draw(seed, number) for seed in (1, 2, 3) for number in range(1, 501)
    ]
    hit = {
        (case.scenario.name, fault.target)
        for case in drawn
        for fault in case.faults
        if fault.act == "signal"
    }
    assert hit >= {
        (name, role) for name, one in SCENARIOS.items() for role in one.roles
    }
