"""A race of repeats: who runs next, who leaves, and how often the truly fastest is lost."""

from __future__ import annotations

import math
import random

import pytest

from tune.search.race import LEVEL, LOOKS, Lap, Race, race


def run(true_s: list[float], spread: float, rng: random.Random, most: int = LOOKS[-1], luck: float = 0.0) -> Race:
    """A whole race; `luck` is what seeds differ by for all entrants alike."""
    laps: list[dict[int, Lap | None]] = [{} for _ in true_s]
    seeds = [rng.gauss(0, luck) for _ in range(most)]
    while (stands := race(laps, most)).runs_next:
        for entrant, lap in stands.runs_next:
            assert lap not in laps[entrant]
            laps[entrant][lap] = Lap(math.log(true_s[entrant]) + seeds[lap] + rng.gauss(0, spread))
    return stands


def laps(*logs: list[float], **apart: float) -> list[dict[int, Lap | None]]:
    return [{at: Lap(one, **apart) for at, one in enumerate(own)} for own in logs]


def test_all_run_in_turn_and_the_slower_leave() -> None:
    assert race([{}, {}], 16).runs_next == [(0, 0), (1, 0), (0, 1), (1, 1)]
    stands = race(laps([0.0, 0.0], [0.1, 0.1], [3.0, 3.0]), 16)
    assert [one is not None and one.is_slower for one in stands.standings] == [False, False, True]
    assert stands.runs_next == [(0, 2), (1, 2), (0, 3), (1, 3)]
    assert race(laps([0.0, 0.0], [3.0, 3.0]), 16).runs_next == []
    assert race([{}, {}], 1).runs_next == [(0, 0), (1, 0)]
    assert race(laps([0.0] * 3, [0.1] * 3), 16, 3).runs_next == []


def test_what_no_repeat_can_tell_is_not_repeated() -> None:
    """Both met their targets between the same two evaluations, or are equal to what is of interest."""
    assert race(laps([0.0] * 2, [0.2] * 2, early=1.0), 16).runs_next == []
    assert race(laps([0.0] * 2, [0.2] * 2, early=0.1), 16).runs_next != []
    assert race(laps([0.0, 0.0], [0.0, 0.0], early=math.inf), 16).runs_next == []


def test_an_entrant_without_a_time_is_out() -> None:
    stands = race([*laps([0.0, 0.0], [3.0, 3.0]), {0: None, 1: None}], 16)
    assert stands.standings[2] is None
    assert stands.runs_next == []
    assert race([{0: None, 1: None}] * 2, 16).standings == [None, None]


@pytest.mark.parametrize(("spread", "luck"), [(0.05, 0.0), (0.2, 0.0), (0.1, 0.3), (0.3, 0.0)])
def test_the_fastest_is_lost_in_less_than_the_share_of_error(spread: float, luck: float) -> None:
    rng, lost, made = random.Random(1), 0, 150
    for _ in range(made):
        true_s = [1.0, *(math.exp(rng.choice([0.0, 0.06, 0.3]) + 1e-9) for _ in range(rng.randint(1, 4)))]
        first = run(true_s, spread, rng, rng.choice([2, 4, 16]), luck).standings[0]
        lost += first is not None and first.is_slower
    assert lost <= LEVEL * made


def test_what_seeds_do_to_all_alike_tells_nothing_apart() -> None:
    """Pairs with the same seed: the noise that all share costs no repeats."""
    rng = random.Random(2)
    for _ in range(20):
        stands = run([1.0, 1.5], 0.05, rng, 16, luck=1.0)
        assert [one is not None and one.is_slower for one in stands.standings] == [False, True]
