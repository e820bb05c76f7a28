"""How many trials Tune runs at a time, and which ends the mailbox holds back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tune.sweeps.progress import Pace


def parts() -> tuple[Any, Any, list[int]]:
    """A search with one trial at a time, a mailbox, and what that was told to expect."""
    expected: list[int] = []
    mailbox = SimpleNamespace(expect=SimpleNamespace(remote=expected.append))
    return SimpleNamespace(max_concurrent=1), mailbox, expected


def test_trials_come_with_the_lanes_that_are_up() -> None:
    search, mailbox, expected = parts()
    pace = Pace(search, mailbox, total=3)
    pace.lanes_started(4)
    assert search.max_concurrent == 1
    pace.lanes_up(2)
    pace.lanes_up(1)  # one of them starts again: its trial waits
    assert (search.max_concurrent, expected) == (2, [2, 2])


def test_no_end_is_held_when_the_last_trial_has_its_actor() -> None:
    """Random search may draw one configuration twice: Tune's trials count, not what they train."""
    search, mailbox, expected = parts()
    pace = Pace(search, mailbox, total=2)
    for trial in ("0001", "0001", "0002"):
        pace.trial_started(trial)
    assert expected == [0]
    pace.lanes_up(2)
    assert expected == [0, 0]


def test_nor_when_a_budget_has_ended_the_search() -> None:
    search, mailbox, expected = parts()
    pace = Pace(search, mailbox, total=8)
    pace.lanes_up(2)
    pace.over()
    pace.lanes_up(3)
    assert expected == [2, 0]


def test_a_search_that_learns_gets_all_lanes_at_once() -> None:
    search, mailbox, expected = parts()
    pace = Pace(search, mailbox, total=None)
    pace.lanes_started(4)
    pace.lanes_up(1)
    pace.trial_started("0001")
    assert (search.max_concurrent, expected) == (4, [])
