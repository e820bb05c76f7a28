"""What a sweep says, from hand-made records: which trial is best, by how much, and why none is."""

import math
from typing import Any

import pytest

from tests.unit.report_records import config, done, failed, trial
from tune.objective import Objective
from tune.report.answer import answer, objective_value
from tune.report.words import shown


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
def test_best_by_each_objective(metric: str, batch: int, precision: str) -> None:
    found = answer(config(metric), done() + failed())
    assert found.best.config == {"global_batch_size": batch, "precision": precision}
    assert found.ranking[0] is found.best
    assert len(found.ranking) == (7 if metric == "time_to_target" else 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
def test_what_is_not_finite_never_wins(metric: str, value: float) -> None:
    odd = trial(0, "done", {"global_batch_size": 32, "precision": "fp16"}, metrics={metric: value})
    assert objective_value(Objective(metric=metric), odd) is None
    assert odd not in answer(config(metric), [odd, *done()]).ranking


def test_the_sentence_says_the_margin_and_the_throughputs_winner() -> None:
    assert answer(config(), done()).sentence == (
        "global_batch_size 64 with bf16 reaches val_accuracy 0.97 in 3.12 s of training, but the next (32, bf16) needs "
        "4.02 s: one run each cannot tell the first 7 apart, and they count as equal. "
        "The highest throughput, 12,300 samples/s, has global_batch_size 256 with fp32, which needs 5.23 s. "
        "Another trial may still be up to 1.53 times as fast (95 % confidence)."
    )
    assert answer(config("val_accuracy"), done()).sentence.startswith(
        "global_batch_size 64 with bf16 has the highest val_accuracy, 0.9819, "
        "but the next (64, fp32) has 0.9805: one run each cannot tell the first 6 apart, and they count as equal. "
        "The highest throughput"
    )
    assert answer(config("samples_per_s"), done()).sentence == (
        "global_batch_size 256 with fp32 has the highest throughput, 12,300 samples/s, but the next (256, bf16) has "
        "12,000 samples/s: one run each cannot tell the two apart, and they count as equal."
    )


@pytest.mark.parametrize(
    ("metric", "values", "words"),
    [
        ("val_loss", (0.100, 0.104), "has 0.104: one run each cannot tell the two apart"),
        ("val_loss", (0.10, 0.11), "0.1, in one run each 1.1 times lower than the next"),
        ("val_loss", (-2.0, -1.0), "-2, in one run each 1 lower than the next"),
        ("val_loss", (0.0, 0.0), "they count as equal"),
        ("val_accuracy", (0.98, 0.95), "0.98, in one run each 0.03 higher than the next"),
    ],
)
def test_the_margin(metric: str, values: tuple[float, float], words: str) -> None:
    records = [
        trial(i, "done", {"precision": name}, metrics={metric: value})
        for i, (name, value) in enumerate(zip(("fp32", "bf16"), values, strict=True))
    ]
    sentence = answer(config(metric, space={"precision": ["fp32", "bf16"]}), records).sentence
    assert sentence.startswith("precision fp32 has")
    assert words in sentence


def test_why_there_is_no_best() -> None:
    slow = [record for record in done() if record.time_to_target_s is None]
    assert answer(config(), slow).sentence.startswith(
        "There is no best trial: no finished one reached val_accuracy 0.97; "
        "the closest, global_batch_size 256 with bf16, came to 0.9652."
    )
    misspelt = answer(config("val_acc", objective={"mode": "max"}), done())
    assert misspelt.best is None
    assert "has a val_acc (metrics reported: train_loss, val_loss, val_accuracy)" in misspelt.sentence
    assert answer(config(), []).sentence == "There is no best trial: none has run."


@pytest.mark.parametrize(("rate", "is_said"), [(104.0, False), (106.0, True)])
def test_the_throughputs_winner_is_said_where_the_best_is_slower(rate: float, is_said: bool) -> None:
    records = [
        trial(0, "done", {"precision": "fp32"}, samples_per_s=100.0, metrics={"val_loss": 1.0}),
        trial(1, "done", {"precision": "bf16"}, samples_per_s=rate, metrics={"val_loss": 2.0}),
    ]
    found = answer(config("val_loss", space={"precision": ["fp32", "bf16"]}), records)
    assert bool(found.fastest) == is_said
    assert found.sentence == f"{found.verdict} {found.fastest}".rstrip()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (0.000123456, "0.0001235"),
        ("", "''"),
        ("é \x1b[31m\n\u202e\ud800", r"é \x1b[31m\n\u202e\ud800"),
        ([1, [2.5, None]], "[1, [2.5, null]]"),
        ({"name": "sgd", "lr": 1e-5, 1: []}, "{name: sgd, lr: 1e-05, 1: []}"),
    ],
)
def test_values_are_shown_in_one_line(value: Any, text: str) -> None:
    assert shown(value) == text
