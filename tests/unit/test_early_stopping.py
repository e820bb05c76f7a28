"""Early stopping: after which evaluation a run ends, that it is done then, and
that it stays so.
"""

import logging
import math

import pytest

from tests.specs import kept_result
from tests.unit.test_checkpoint_best import Scripted
from tests.unit.test_checkpoint_best import config as scripted
from tests.unit.test_loop import Context, Power, curve
from trainers.config.sections import EarlyStoppingConfig, ScheduleConfig
from trainers.loop._attempt import EarlyStopping
from trainers.loop.fit import fit


def config(steps, **stopping):
    chosen = EarlyStoppingConfig(
        **{"metric": "val_score", "patience": 2, **stopping}
    )
    every = {"every_steps": 2, "keep": 9, "best": None}
    return scripted(steps, **every).model_copy(
        update={"early_stopping": chosen, "log_every_steps": 1}
    )


def train(path, scores, steps, **stopping):
    return fit(
        Scripted([*scores, *[0.0] * 9]),
        config(steps, **stopping),
        Context(path),
    )


@pytest.mark.parametrize(
    ("stopping", "values", "ends_after"),
    [
        ({}, [0.1, 0.2, 0.15, 0.2], 4),
        ({}, [0.1, 0.2, 0.15, 0.3, 0.1, 0.1], 6),
        ({"mode": "min"}, [0.1, 0.2, 0.15], 3),
        ({"patience": 1}, [0.1, 0.1], 2),
        ({}, [math.nan, math.inf], 2),
        ({}, [0.1, 0.2, 0.3, 0.4], None),
        ({"metric": "val_mae"}, [0.1, 0.2, 0.3], 3),
    ],
)
def test_when_a_run_ends(stopping, values, ends_after):
    chosen = config(9, **stopping).early_stopping
    counted = EarlyStopping(chosen)
    for number, value in enumerate(values, 1):
        counted.take(number * 5, {str(chosen.metric): value})
        assert (counted.words is not None) is (number == ends_after)


def test_it_is_done_with_a_word_and_stays_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        result = train(tmp_path, [0.1, 0.5, 0.4, 0.3, 0.9], 100)
    words = "stopped early: val_score has not improved in 2 evaluations (the best is 0.5 at step 4)"
    assert (result.status, result.steps, result.message) == ("done", 8, words)
    assert kept_result(tmp_path).message == words
    assert caplog.text.count(words) == 1
    assert (
        sorted((tmp_path / "checkpoints").iterdir())[-1].name
        == f"step-{8:012d}"
    )
    again = train(tmp_path, [0.1, 0.5, 0.4, 0.3, 0.9], 200)
    assert (again.status, again.steps, again.message) == ("done", 8, words), (
        "longer, it has stopped as well"
    )
    patient = train(tmp_path, [0.1, 0.5, 0.4, 0.3, 0.9], 12, patience=3)
    assert (patient.status, patient.steps, patient.message) == (
        "done",
        12,
        "",
    ), "with more patience it goes on"
    assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 13))


@pytest.mark.parametrize("at", [2, 4, 6])
def test_a_resume_counts_on(at, tmp_path):
    scores = [0.1, 0.5, 0.4, 0.3, 0.9]
    with pytest.raises(Power):
        fit(Scripted(scores), config(100), Context(tmp_path, cut_at_step=at))
    result = train(tmp_path, scores, 100)
    assert (result.steps, "the best is 0.5 at step 4" in result.message) == (
        8,
        True,
    )


def test_a_run_that_has_stopped_is_not_logged_again(tmp_path):
    """Its last window is shorter than the others, and its learning rate is
    that of its last step.
    """

    def run(steps):
        made = config(steps).model_copy(
            update={
                "log_every_steps": 3,
                "lr_schedule": ScheduleConfig(warmup=20),
            }
        )
        scores = [0.1, 0.5, 0.4, 0.3, *[0.0] * 9]
        return fit(Scripted(scores), made, Context(tmp_path))

    assert run(100).steps == 8
    before = curve(tmp_path)
    assert [step for step, _, _ in before] == [3, 6, 8]
    assert run(200).metrics["train_loss"] == before[-1][2]
    assert curve(tmp_path) == before
