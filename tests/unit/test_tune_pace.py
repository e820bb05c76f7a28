"""How many trials Tune runs at a time, and which ends the mailbox holds back."""

from types import SimpleNamespace

import pytest

from tune.sweeps import _progress as progress
from tune.sweeps._progress import Pace


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that is put forward by ten seconds when it is read."""
    clock = SimpleNamespace(now=0.0, step=10.0)

    def read():
        clock.now += clock.step
        return float(clock.now)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=read))
    return clock


def parts():
    """A search with one trial at a time, a mailbox, and what that was told to expect."""
    expected = []
    mailbox = SimpleNamespace(expect=SimpleNamespace(remote=expected.append))
    return SimpleNamespace(max_concurrent=1), mailbox, expected


def test_trials_come_with_the_lanes_that_are_up():
    search, mailbox, expected = parts()
    pace = Pace(search, mailbox, total=3)
    pace.lanes_started(4)
    assert search.max_concurrent == 1
    pace.lanes_up(1)
    pace.trial_started("0001")
    pace.lanes_up(2)
    pace.lanes_up(1)  # one of them starts again: its trial waits
    assert (search.max_concurrent, expected) == (2, [1, 2, 2])


def test_no_end_is_held_when_the_last_trial_has_its_actor():
    """Random search may draw one configuration twice: Tune's trials count, not
    what they train.
    """
    search, mailbox, expected = parts()
    pace = Pace(search, mailbox, total=2)
    for trial in ("0001", "0001", "0002"):
        pace.trial_started(trial)
    assert expected == [0]
    pace.lanes_up(1)
    assert expected == [0, 0]


@pytest.mark.parametrize(
    ("total", "ended", "known", "at_a_time"),
    [
        (24, 20, 0, 1),
        (24, 8, 0, 2),
        (2, 0, 0, 2),
        (24, 2, 20, 2),
        (24, 0, 24, 1),
    ],
    ids=[
        "short ones",
        "many are left",
        "none has ended",
        "most were known",
        "all were known",
    ],
)
def test_another_actor_starts_where_it_pays(
    total, ended, known, at_a_time, clock
):
    """Ten seconds after the first trial's start: left are 4 x 0.5 s, 16 x 1.25
    s, 2 x 10 s, 2 x 5 s, nothing.
    """
    search, mailbox, _ = parts()
    pace = Pace(search, mailbox, total)
    pace.lanes_up(2)
    pace.trial_started("0001")
    for was_known in [False] * ended + [True] * known:
        pace.trial_ended(was_known)
    pace.lanes_up(2)
    assert search.max_concurrent == at_a_time
