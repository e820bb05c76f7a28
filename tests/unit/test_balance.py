"""Ranks side by side: who is named and who is not, with which figures, and the table."""

from __future__ import annotations

from typing import Any

from trainers.measure.ranks import RankFigures, findings


def row(rank: int, **changes: Any) -> RankFigures:
    even: dict[str, Any] = {
        "rank": rank, "host": f"node-{rank}", "device": "cuda:0", "steps": 100, "train_time_s": 4.0,
        "samples_per_s": 800.0, "samples_per_step": 32.0, "step_time_s": 0.04, "data_wait_share": 0.02,
        "idle_share": 0.0, "backward_s": 0.01, "allocated_bytes": 2**30, "reserved_bytes": 2**31,
        "peak_bytes": 3 * 2**30, "total_bytes": 80 * 2**30, "gpu": None,
    }  # fmt: skip
    return even | changes  # type: ignore[return-value]


def said(*rows: RankFigures) -> list[str]:
    return [words for _, words in findings(list(rows))]


def test_even_ranks_are_not_named() -> None:
    assert said(row(0), row(1, data_wait_share=0.05, backward_s=0.0115), row(2)) == []
    assert said(row(0, data_wait_share=0.9)) == [], "one rank has nobody to be compared with"


def test_a_rank_that_waits_for_data_is_named() -> None:
    words = "rank 3 (node-3) waits 41% of its time for data, the others 2%"
    assert said(row(0), row(1), row(2), row(3, data_wait_share=0.41)) == [words]
    assert said(*(row(rank, data_wait_share=0.41) for rank in range(4))) == [], "all wait alike: slow, but even"


def test_a_slow_rank_is_named() -> None:
    words = "rank 1 (node-1) takes 31% longer for a backward pass (13.10 ms, the others 10.00)"
    assert said(row(0), row(1, backward_s=0.0131), row(2)) == [words]
    assert said(row(0), row(1, backward_s=0.0131, samples_per_step=40.0), row(2)) == [
        words + "; it has 40 samples a step, the others 32"
    ]


def test_a_difference_that_costs_nothing_is_not_named() -> None:
    assert said(row(0, backward_s=0.001), row(1, backward_s=0.002)) == [], "1 ms of a 40 ms step"
    short = {"train_time_s": 0.4}
    assert said(row(0, **short), row(1, backward_s=0.03, data_wait_share=0.9, **short)) == [], "too little is measured"
    assert said(row(0, backward_s=None), row(1, backward_s=0.02)) == []


def test_an_idle_rank_is_named_and_not_called_slow_or_fast() -> None:
    (words,) = said(row(0), row(1, idle_share=1.0, samples_per_step=0.0, backward_s=0.02, train_time_s=0.1))
    assert words.startswith("rank 1 has no sample in 100% of its steps")
    assert said(row(0), row(1, idle_share=0.04)) == [], "the short last step of an epoch"


def test_heat_is_named_and_a_power_cap_is_not() -> None:
    assert said(row(0, gpu={"slowed_by": ["power cap"]}), row(1, gpu={"slowed_by": ["heat", "power cap"]})) == [
        "the GPU of rank 1 (node-1) is slowed by heat"
    ]
