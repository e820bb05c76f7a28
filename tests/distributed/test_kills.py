"""Killed at random steps, and resumed with 1, 2 and 3 workers in turn: every
sample once, the same curve.
"""

import pytest

from tests.distributed.kills import EPOCHS, STEPS_PER_EPOCH
from tests.distributed.processes import printed_by

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return printed_by(
        "tests.distributed.kills", tmp_path_factory.mktemp("kills")
    )


@pytest.mark.parametrize(("name", "kills"), [("moved", 3), ("fixed 2", 2)])
def test_each_kill_killed_and_the_run_came_to_its_end(found, name, kills):
    *killed, last = found[name]["ends"]
    assert len(killed) == kills
    for end in killed:
        assert end["codes"][end["kill_rank"]] == -9, end
        assert all(end["codes"]), (
            f"no rank may take a broken group's step for a good one: {end}"
        )
    assert set(last["codes"]) == {0}


def test_every_sample_is_trained_exactly_once_an_epoch(found):
    for name, run in found.items():
        assert run["once"] == [True] * EPOCHS, name


def test_the_curve_is_the_unbroken_one(found):
    unbroken = found["unbroken 1"]
    for name, run in found.items():
        assert run["losses"] == pytest.approx(unbroken["losses"], rel=1e-12), (
            name
        )
        assert len(run["losses"]) == EPOCHS * STEPS_PER_EPOCH
        for ours, theirs in zip(
            run["evaluations"], unbroken["evaluations"], strict=True
        ):
            assert ours == pytest.approx(theirs, rel=1e-10), name


def test_at_a_fixed_number_of_workers_it_is_bit_equal(found):
    broken = found["fixed 2"]
    unbroken = found["unbroken 2"]
    assert broken["losses"] == unbroken["losses"]
    assert broken["evaluations"] == unbroken["evaluations"]
