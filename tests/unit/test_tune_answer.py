"""What a sweep says, from hand-made records: which trial is best, by how much,
and why none is.
"""

import math
import random
from dataclasses import replace

import pytest

from tests.unit.report_records import config, done, failed, trial
from tune.report.answer import answer
from tune.report.words import shown
from tune.search.finalists import LEVEL
from tune.trials.record import BY_BUDGET


@pytest.mark.parametrize(
    ("metric", "batch", "precision"),
    [
        ("time_to_target", 64, "bf16"),
        ("samples_per_s", 256, "fp32"),
        ("step_time_s", 32, "bf16"),
        ("val_loss", 64, "bf16"),
        ("val_accuracy", 64, "bf16"),
    ],
)
def test_best_by_each_objective(metric, batch, precision):
    found = answer(config(metric), done() + failed())
    assert found.best.config == {
        "global_batch_size": batch,
        "precision": precision,
    }
    assert found.ranking[0] is found.best
    assert len(found.ranking) == (7 if metric == "time_to_target" else 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
def test_what_is_not_finite_never_wins(metric, value):
    odd = trial(
        0,
        "done",
        {"global_batch_size": 32, "precision": "fp16"},
        metrics={metric: value},
    )
    assert odd not in answer(config(metric), [odd, *done()]).ranking


def test_the_answer_is_one_line_with_those_that_are_as_good():
    found = answer(config(), done())
    assert found.line == (
        "Batch 64 in bf16: 3.12 s to val_accuracy 0.97 (one run); "
        "32 in bf16, 32 in fp32, 64 in fp32 and 3 more are as good."
    )
    assert len(found.equal) == 6
    assert (
        found.fastest
        == "Highest throughput: batch 256 in fp32, 12,300 samples/s; it needs 5.23 s."
    )
    assert [doubt.settled_by for doubt in found.doubts] == [
        "repeats (`finalists: 2` or more)"
    ]
    assert found.text.splitlines() == [
        found.line,
        found.fastest,
        f"- {found.doubts[0].text}",
    ]
    rates = answer(config("samples_per_s"), done())
    assert (
        rates.text
        == "Batch 256 in fp32: 12,300 samples/s (one run); 256 in bf16 is as good."
    )


@pytest.mark.parametrize(
    ("metric", "values", "margin"),
    [
        ("val_loss", (0.100, 0.104), None),
        ("val_loss", (0.10, 0.11), "1.1 times lower than"),
        ("val_loss", (-2.0, -1.0), "1 lower than"),
        ("val_loss", (0.0, 0.0), None),
        ("val_accuracy", (0.98, 0.95), "0.03 higher than"),
    ],
)
def test_the_margin(metric, values, margin):
    records = [
        trial(i, "done", {"precision": name}, metrics={metric: value})
        for i, (name, value) in enumerate(
            zip(("fp32", "bf16"), values, strict=True)
        )
    ]
    found = answer(
        config(metric, space={"precision": ["fp32", "bf16"]}), records
    )
    assert found.equal == ([records[1]] if margin is None else [])
    rest = (
        "; bf16 is as good."
        if margin is None
        else f", {margin} the next, bf16."
    )
    assert found.line == f"fp32: {metric} {values[0]:g} (one run){rest}"


@pytest.mark.parametrize("metric", ["val_accuracy", "samples_per_s"])
def test_what_the_budget_cut_off_is_ranked_with_a_doubt(metric):
    """A throughput is the same in a part of a trial."""
    first, *rest = done()
    cut = replace(first, status="stopped", message=BY_BUDGET)
    asked = config(metric)
    doubts = [doubt.text for doubt in answer(asked, [cut, *rest]).doubts]
    is_open = "Batch 32 in fp32 was cut off by the budget: how good it would have been is open. Settled by a larger `budget`."
    assert (is_open in doubts) is (metric == "val_accuracy")
    unknown = replace(cut, metrics={})
    again = replace(first, id="clone", purpose="clone")
    for records in ([unknown, *rest], [cut, again, *rest]):
        assert "cut off" not in answer(asked, records).text


SEEDS = range(4)


def seeded(losses):
    """Trials of each precision with each seed; without a loss it has diverged."""
    records = []
    for precision, values in losses.items():
        for seed, loss in zip(SEEDS, values, strict=False):
            settings = {"precision": precision, "seed": seed}
            metrics = {} if loss is None else {"val_loss": loss}
            records.append(
                trial(
                    len(records),
                    "diverged" if loss is None else "done",
                    settings,
                    metrics=metrics,
                )
            )
    return records


def by_seeds(losses):
    space = {"precision": list(losses), "seed": list(SEEDS)}
    return answer(config("val_loss", space=space), seeded(losses))


def test_a_seed_is_a_repeat_and_never_a_choice():
    """The lowest loss of all is bf16's, by luck."""
    found = by_seeds(
        {
            "fp32": [0.50, 0.51, 0.495, 0.50],
            "bf16": [0.49, 0.60, 0.60, 0.61],
            "fp16": [0.51, 0.50, 0.50, 0.51],
        }
    )
    assert (found.best.config, found.value) == (
        {"precision": "fp32"},
        pytest.approx(0.50125),
    )
    assert [record.config for record in found.equal] == [{"precision": "fp16"}]
    assert found.line.startswith("fp32: val_loss 0.5012 (")
    assert "4 seeds); fp16 is as good." in found.line
    assert len({record.id for record in found.ranking}) == 12
    assert not found.doubts


@pytest.mark.parametrize("some", [0.5, None])
def test_a_configuration_of_which_more_seeds_failed_comes_later(some):
    found = by_seeds(
        {"fp32": [some, 0.5, 0.51, 0.5], "bf16": [0.1, None, None, 0.1]}
    )
    assert found.best.config == {"precision": "fp32"}
    assert not found.equal


@pytest.mark.parametrize("lost", [0.1, 0.5, 0.51])
def test_a_lost_seed_is_why_a_configuration_is_behind(lost):
    """Its mean may be the better one, or as good: that is no ratio to be proud of."""
    found = by_seeds({"fp32": [0.5] * 4, "bf16": [lost, None, lost, lost]})
    assert "more seeds than the next, bf16" in found.line
    assert "times" not in found.line
    assert not found.equal


def test_one_seed_each_is_judged_by_one_run_each():
    found = by_seeds({"fp32": [0.5], "bf16": [0.51], "fp16": [5.0]})
    assert [record.config for record in found.equal] == [{"precision": "bf16"}]
    assert "One seed each" in found.text


def test_a_space_of_seeds_alone_has_an_answer_with_a_name():
    records = [
        trial(seed, "done", {"seed": seed}, metrics={"val_loss": 0.5})
        for seed in (0, 1)
    ]
    line = answer(config("val_loss", space={"seed": [0, 1]}), records).line
    assert line.startswith("The run as it is: val_loss ")


def test_means_over_seeds_claim_no_more_than_they_show():
    """All configurations are the same: how often is another called worse than the best?"""
    rng = random.Random(3)
    made = 150
    claims = 0
    for _ in range(made):
        losses = {
            precision: [rng.gauss(1.0, 0.1) for _ in SEEDS]
            for precision in ("fp32", "tf32", "bf16", "fp16")
        }
        claims += len(by_seeds(losses).equal) < 3
    assert claims <= 2 * LEVEL * made


def test_why_there_is_no_best():
    slow = [record for record in done() if record.time_to_target_s is None]
    assert answer(config(), slow).line == (
        "There is no best trial: no finished trial reached val_accuracy 0.97; "
        "the closest, batch 256 in bf16, came to 0.9652."
    )
    misspelt = answer(config("val_acc", objective={"mode": "max"}), done())
    assert misspelt.best is None
    assert (
        "has a val_acc (metrics reported: train_loss, val_loss, val_accuracy)"
        in misspelt.line
    )
    assert answer(config(), []).line == "There is no best trial: none has run."
    lost = [trial(0, "done", {"seed": 0}, metrics={"val_accuracy": math.nan})]
    assert "none reported a finite val_accuracy" in answer(config(), lost).line


@pytest.mark.parametrize(("rate", "is_said"), [(104.0, False), (106.0, True)])
def test_the_throughputs_winner_is_said_where_the_best_is_slower(
    rate, is_said
):
    records = [
        trial(
            0,
            "done",
            {"precision": "fp32"},
            samples_per_s=100.0,
            metrics={"val_loss": 1.0},
        ),
        trial(
            1,
            "done",
            {"precision": "bf16"},
            samples_per_s=rate,
            metrics={"val_loss": 2.0},
        ),
    ]
    found = answer(
        config("val_loss", space={"precision": ["fp32", "bf16"]}), records
    )
    assert bool(found.fastest) == is_said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-3.00001, "-3.0"),
        (2e20, "2e+20"),
        ("1e-3", "'1e-3'"),
        ("true", "'true'"),
        ("null", "'null'"),
        ("bf16", "bf16"),
        (0.000123456, "0.0001235"),
        ("", "''"),
        ("é \x1b[31m\n\u202e\ud800", r"é \x1b[31m\n\u202e\ud800"),
        ([1, [2.5, None]], "[1, [2.5, null]]"),
        ({"name": "sgd", "lr": 1e-5, 1: []}, "{name: sgd, lr: 1e-05, 1: []}"),
    ],
)
def test_values_are_shown_in_one_line(value, text):
    assert shown(value) == text
