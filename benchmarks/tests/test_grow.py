"""The growing batch's benchmark: what it makes of curves and pilot runs, and one work in miniature."""

from __future__ import annotations

import pytest

from benchmarks.grow import CONSTANT, SHARES, WORKS, Work, cabs, smith, to_target, train, two_sizes
from trainers.config.batch import ScheduledSize, check_schedule

ROWS = [
    {"epoch": 0.5, "train_time_s": 1.0, "val_accuracy": 0.5, "val_loss": 1.0},
    {"epoch": 1.0, "train_time_s": 2.0, "val_accuracy": 0.9, "val_loss": 0.5},
    {"epoch": 1.5, "train_time_s": 3.0, "samples": 170, "val_accuracy": 0.8, "val_loss": 0.1},
]


@pytest.mark.parametrize(
    ("metric", "target", "met"),
    [
        ("val_accuracy", 0.7, (75.0, 1.5)),
        ("val_accuracy", 0.4, (50.0, 1.0)),
        ("val_accuracy", 0.95, None),
        ("val_loss", 0.2, (152.5, 2.75)),
    ],
)
def test_a_target_is_met_on_the_line_between_two_evaluations(
    metric: str, target: float, met: tuple[float, float] | None
) -> None:
    assert to_target(ROWS, metric, target, 100) == (met if met is None else pytest.approx(met))


def test_the_schedules_of_the_literature_are_schedules() -> None:
    assert smith(64, 1000) == [
        {"until_samples": 300, "size": 64},
        {"until_samples": 600, "size": 320},
        {"until_samples": 800, "size": 1600},
        {"size": 8000},
    ]
    # tr(Sigma) / loss doubles, rises fourfold, and falls.
    windows = [
        ((number + 0.5) / 12, [1.0, 1.0, 2.0][number // 4], [1.0, 0.5, 2.0][number // 4]) for number in range(12)
    ]
    found = cabs(windows, [16, 32, 64], 1200)
    assert found == [{"until_samples": 400, "size": 16}, {"until_samples": 800, "size": 32}, {"size": 16}]
    for schedule in (found, cabs([], [16, 64], 1200)):
        check_schedule([ScheduledSize(**one) for one in schedule])


def test_the_bound_is_of_every_growth_by_one_step() -> None:
    schedules = [
        one["batch_schedule"] for one in two_sizes(Work("digits", [8, 16, 64], "val_accuracy", 0.5, 2), 1000).values()
    ]
    grown = [(8, 16), (8, 64), (16, 64)]
    assert [(first["size"], then["size"]) for first, then in schedules] == 2 * [pair for pair in grown for _ in SHARES]
    assert {first["until_samples"] for first, _ in schedules} == {1000 * share for share in SHARES}


def test_a_pilot_run_measures_what_cabs_goes_by() -> None:
    work = Work("digits", [64, 256], "val_accuracy", 0.5, 2)
    pieces = {"global_batch_size": 64, "microbatch_size": 32, "noise_scale": True, "log_every_steps": 10}
    watched, result, length = train(work, pieces, whole=True)
    assert result is not None
    assert result.status == "done"
    assert length == 1438
    assert len(watched.windows) >= 3
    assert all(0 < progress <= 1 and loss > 0 for progress, _, loss in watched.windows)
    assert sum(noise for _, noise, _ in watched.windows) > 0
    assert to_target(watched.rows, work.metric, work.target, length) is not None


def test_a_run_ends_when_it_has_met_its_target() -> None:
    work = Work("digits", [64], "val_accuracy", 0.5, 50)
    watched, result, length = train(work, {"global_batch_size": 64, **CONSTANT})
    assert result is not None
    assert result.status == "stopped"
    assert to_target(watched.rows, work.metric, work.target, length) is not None


def test_the_works_may_grow() -> None:
    for work in WORKS:
        assert work.config({"global_batch_size": "auto", **CONSTANT})[0].grows_batch
