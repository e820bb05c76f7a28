"""The line of a run, and when the run will be over."""

import os

import pytest

from trainers import terminal
from trainers.output import Output
from trainers.terminal import Course

EACH_S = 0.5
EVALUATION_S = 3.0
INTERVAL = 40
START_S = 7.0


@pytest.fixture
def now(monkeypatch):
    """The clock, which stands until a test moves it."""
    found = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: found[0])
    return found


def tell(course, total, until, first=0, **start):
    """Tell of a run until a step; each step, evaluation and window takes as
    long as all others.

    Its wall time.
    """
    wall_s = START_S
    train_s = 100.0 * (first > 0)
    position = {"step": first, "train_time_s": train_s}
    course.take(
        {
            "record": "start",
            **position,
            "wall_time_s": 0.0,
            "total_steps": total,
            "max_time_s": None,
            **start,
        }
    )
    for step in range(first + 1, until + 1):
        wall_s = wall_s + EACH_S
        train_s = train_s + EACH_S
        position = {"step": step, "train_time_s": train_s}
        if step % 10 == 0:
            figures = {"train_loss": 0.25, "samples_per_s": 1234.0, "lr": 0.1}
            course.take(
                {
                    "record": "train",
                    **position,
                    "wall_time_s": wall_s,
                    **figures,
                }
            )
        if step % INTERVAL == 0:
            wall_s += EVALUATION_S
            course.take(
                {
                    "record": "evaluation",
                    **position,
                    "wall_time_s": wall_s,
                    "val_loss": 0.125,
                }
            )
    return wall_s


@pytest.mark.parametrize(
    ("first", "until"), [(0, 200), (400, 600), (400, 630)]
)
def test_the_rest_takes_as_long_as_what_was_with_its_evaluations(
    now, first, until
):
    course = Course("run")
    tell(course, 1000, until, first)
    newest = until // 10 * 10
    expected = (1000 - newest) * (EACH_S + EVALUATION_S / INTERVAL)
    left_s = course.left_s()
    assert left_s == pytest.approx(expected, rel=0.02)
    now[0] += 5
    assert course.left_s() == pytest.approx(left_s - 5)
    now[0] += 1e6
    assert course.left_s() == 0.0


def test_what_is_no_json_is_told_as_null_and_no_secret_is(monkeypatch, capfd):
    monkeypatch.setenv("MY_TOKEN", "hidden-hidden")
    with Output(as_json=True) as output:
        os.write(1, b"to standard error\n")  # as a library in C does
        output.record(
            {
                "record": "train",
                "loss": float("nan"),
                "of": [float("inf"), 1, True, "hidden-hidden"],
            }
        )
    shown = capfd.readouterr()
    assert (
        shown.out
        == '{"record": "train", "loss": null, "of": [null, 1, true, "***"]}\n'
    )
    assert shown.err == "to standard error\n"
