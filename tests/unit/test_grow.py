"""What benchmarks/grow.py compares: where a run met its target, and the schedules of its peers."""

from __future__ import annotations

import pytest

from benchmarks.grow import WORKS, Work, cabs, smith, to_target, two_sizes

ACCURACIES = [
    {"epoch": 0.5, "train_time_s": 1.0, "val_accuracy": 0.5},
    {"epoch": 1.0, "train_time_s": 3.0, "val_accuracy": 0.9},
]
LOSSES = [
    {"epoch": 0.1, "samples": 10.0, "train_time_s": 1.0},
    {"epoch": 0.2, "samples": 20.0, "train_time_s": 2.0, "val_loss": 0.5},
]


def test_the_target_is_met_where_the_line_between_two_evaluations_meets_it() -> None:
    samples, time_s = to_target(ACCURACIES, "val_accuracy", 0.8, 100) or (0, 0)
    assert (samples, time_s) == (pytest.approx(87.5), pytest.approx(2.5))
    assert to_target(ACCURACIES, "val_accuracy", 0.95, 100) is None
    assert to_target(LOSSES, "val_loss", 0.5, 100) == (20.0, 2.0), "the first evaluation meets it"


@pytest.mark.parametrize(("metric", "values", "meets"), [("val_loss", [0.4, 0.6], False), ("accuracy", [0.6], True)])
def test_a_run_ends_when_its_newest_evaluation_meets_the_target(metric: str, values: list[float], meets: bool) -> None:
    work = Work("any", [8], metric, 0.5, 1)
    assert work.meets([{metric: value} for value in values]) is meets
    assert not work.meets([])
    assert not work.meets([{"other": 1.0}])


def test_smith_multiplies_the_batch_by_five_where_others_divide_the_rate() -> None:
    assert smith(32, 1000) == [
        {"size": 32, "until_samples": 300},
        {"size": 160, "until_samples": 600},
        {"size": 800, "until_samples": 800},
        {"size": 4000},
    ]


def test_cabs_grows_with_the_noise_over_the_loss_in_powers_of_two_and_within_the_grid() -> None:
    windows = [(number / 12, noise, 1.0) for number, noise in enumerate([1.0] * 4 + [4.0] * 4 + [64.0] * 4, 1)]
    expected = [{"until_samples": 40, "size": 8}, {"until_samples": 80, "size": 32}, {"size": 64}]
    assert cabs(windows, [8, 16, 32, 64], 120) == expected


def test_every_schedule_of_two_sizes_grows_once() -> None:
    found = two_sizes(Work("any", [8, 16, 32], "val_loss", 0.5, 1), 100.0)
    assert len(found) == 3 * 3
    assert found["8-32 at 30%"]["batch_schedule"] == [{"until_samples": 30, "size": 8}, {"size": 32}]


def test_the_examples_are_what_is_trained() -> None:
    for work in WORKS:
        assert work.config({"global_batch_size": "auto"})[0].grows_batch
