"""What every benchmark shares: rounds, medians, and the floor of a difference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks import measure
from benchmarks.measure import aa_floor, ahead, earlier, interleave, summarize


def test_rounds_are_interleaved_and_the_first_is_a_warm_up():
    counter = itertools.count()
    found = interleave(
        {"a": lambda: float(next(counter)), "b": lambda: float(next(counter))},
        2,
    )
    assert found == {"a": [2, 4], "b": [3, 5]}


def test_with_a_seed_each_round_has_its_own_order():
    orders = []
    peers = {
        name: lambda name=name: float(bool(orders.append(name)))
        for name in "abcd"
    }
    interleave(peers, 9, seed=0)
    rounds = ["".join(orders[start : start + 4]) for start in range(0, 40, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len(set(rounds)) > 5


def test_one_outlier_among_many_rounds_is_not_the_floor():
    assert aa_floor(
        [1.01, 0.99, 1.0, 0.7, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.0]
    ) == pytest.approx(0.01)


@pytest.mark.parametrize("ratios", [[0.8], [0.8, 1.1]])
def test_of_one_or_two_rounds_the_largest_deviation_is(ratios):
    assert aa_floor(ratios) == pytest.approx(0.2)


def test_the_floor_holds_what_it_says():
    """Of things without a difference, some 5 % are called different.

    Medians of few rounds err a little more.
    """
    generator = np.random.default_rng(1)
    twins, others = generator.normal(1, 0.1, (2, 400, 11))
    different = [
        abs(np.median(other) - 1) > aa_floor(list(twin))
        for twin, other in zip(twins, others, strict=True)
    ]
    assert 0.01 < np.mean(different) < 0.12


def test_a_bias_of_the_twin_is_in_the_floor():
    assert aa_floor([1.2] * 9) == pytest.approx(0.2)


def test_ratios_are_taken_round_by_round():
    found = {
        "plain": [10.0, 100.0, 1.0],
        "ours": [20.0, 200.0, 2.0],
        "plain again": [10.0, 100.0, 1.0],
    }
    summary = summarize(found, "plain", "plain again")
    assert (summary["rows"]["ours"]["ratio"], summary["floor"]) == (2.0, 0.0)
    assert summary["rows"]["ours"]["n"] == 3


def test_a_peer_is_met_round_by_round_without_the_baselines_noise():
    generator = np.random.default_rng(2)
    pace = generator.lognormal(
        0, 0.5, 31
    )  # what slows a round slows all of it
    found = {
        "plain": list(generator.lognormal(0, 0.5, 31)),
        "ours": list(1.05 * pace),
        "peer": list(pace),
    }
    found["peer"][7] /= 3
    against = ahead(found, "ours")
    assert set(against) == {"plain", "peer"}
    assert list(against["peer"].values()) == pytest.approx([1.05, 1.05, 1.05])
    assert (
        against["plain"]["low"]
        < against["plain"]["ratio"]
        < against["plain"]["high"]
    )


def test_the_interval_of_a_lead_holds_what_it_says():
    """Of things without a difference, some 5 % are said to lead or to trail."""
    generator = np.random.default_rng(3)
    pairs = generator.normal(1, 0.1, (400, 2, 15))
    leads = [
        ahead({"ours": list(ours), "peer": list(peer)}, "ours")["peer"]
        for ours, peer in pairs
    ]
    assert (
        0.01
        < np.mean([lead["low"] > 1 or lead["high"] < 1 for lead in leads])
        < 0.12
    )


def test_a_benchmark_goes_on_with_what_was_asked_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SCRATCH", tmp_path)
    asked = {"seed": 7, "cases": 30, "only": None}
    assert earlier("what", asked) == {}
    measure.save(
        "what", {**asked, "rows": [{"plant": "transform"}]}, keep=False
    )
    measure.save("what-not", asked, keep=False)
    assert earlier("what", asked)["rows"] == [{"plant": "transform"}]
    assert (
        earlier("what", {**asked, "seed": 8})
        == earlier("what", {**asked, "only": ["lengths"]})
        == {}
    )
    assert earlier("not", asked) == {}
