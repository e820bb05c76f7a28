"""The report's figures: what is drawn, and that any records can be."""

import math
import re
import warnings
from dataclasses import replace

import pytest

from tests.unit.report_records import config, done, failed, trial
from trainers.storage import Storage
from tune.report._figures import figures
from tune.report.answer import answer
from tune.report.table import table
from tune.report.write import contents
from tune.trials.record import trial_id

TITLES = ["Time to target", "Throughput", "Peak memory", "Learning curves"]
CURVE = [
    {"train_time_s": 1.0, "val_loss": 0.5},
    {"train_time_s": 2.0, "val_loss": 0.4},
]


@pytest.fixture(autouse=True)
def no_warning():
    """matplotlib says with a warning that a figure came out wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draw(found, records):
    return {
        figure.title: figure
        for figure in figures(found, records, answer(found, records).best)
    }


def draw_values(key, values):
    records = [
        trial(
            number,
            "done",
            {key: value},
            samples_per_s=100.0 + number,
            peak_memory_bytes=2**31,
            curve=CURVE,
        )
        for number, value in enumerate(values)
    ]
    return draw(
        config(
            "samples_per_s", space={key: values}, objective={"target": None}
        ),
        records,
    )


def texts(figure):
    return re.findall(r"<text [^>]*>([^<]*)<", figure.svg)


def test_the_figures_stand_in_one_page():
    drawn = draw(config(), done() + failed())
    assert list(drawn) == TITLES
    text = "".join(figure.svg for figure in drawn.values())
    assert len(re.findall(r"<svg\s", text)) == 5, (
        "the objective by batch size and by precision"
    )
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(ids)
    assert not re.search(r"#0a0[bc]", text)
    assert "var(--s1)" in text
    assert {"32", "64", "128", "256", "512"} <= {
        word for figure in drawn.values() for word in texts(figure)
    }
    assert "<title>batch 512 in fp32: out of memory</title>" in text
    assert (
        "4 of 11 did not reach the target" in drawn["Time to target"].caption
    )


def test_nothing_is_drawn_of_nothing():
    assert draw(config(), []) == {}
    assert draw(config(), [trial(0, "error", {"precision": "fp32"})]) == {}


@pytest.mark.parametrize(
    "settings",
    [
        lambda n: {
            "global_batch_size": 2 ** (n % 20),
            "optimizer.lr": 0.5 ** (n // 20),
        },
        lambda n: {"task_args.kind": f"kind {n}"},
    ],
)
def test_hundreds_of_trials(settings, tmp_path):
    records = [
        trial(
            number,
            "out_of_memory" if number % 7 == 0 else "done",
            settings(number),
            samples_per_s=100.0 + number,
            peak_memory_bytes=2**30 + number,
            metrics={"val_loss": 1.0 / (number + 1)},
            curve=CURVE,
        )
        for number in range(400)
    ]
    space = {
        key: list(dict.fromkeys(record.config[key] for record in records))
        for key in settings(0)
    }
    found = config(
        "val_loss", space=space, objective={"target": {"val_loss": 0.5}}
    )
    said = answer(found, records)
    shown = contents(Storage(tmp_path), found, {}, records, {}, said)
    drawn = {figure.title: figure for figure in shown["figures"]}
    assert shown["left_out"] == 42
    assert list(drawn) == ["val_loss", *TITLES[1:]]
    assert drawn["val_loss"].num_panels == len(space)
    assert all(
        len(texts(figure)) / figure.num_panels < 90
        for figure in drawn.values()
    )
    assert table(found, records, said).row_count == 50, (
        "the best of them, and some that failed"
    )


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1.0, math.inf], ["1.0", "inf"]),
        ([float("nan"), float("-nan")], ["nan"]),
        ([1, 10**400], ["1", "1" + "0" * 22 + "..."]),
        ([-1, 0, 5], ["-1", "0", "5"]),
        ([True, 1, "1", None], ["true", "1", "'1'", "null"]),
        (
            [{"name": "sgd"}, {"name": "adamw", "lr": 0.1}],
            ["{name: sgd}", "{name: adamw, lr: 0.1}"],
        ),
    ],
)
def test_any_value_has_a_place(values, ticks):
    found = texts(draw_values("task_args.x", values)["Throughput"])
    assert [text for text in found if text in ticks][: len(ticks)] == ticks


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_figures_without_what_is_not_finite(value):
    odd = trial(
        11,
        "done",
        {"global_batch_size": 32, "precision": "fp16"},
        samples_per_s=value,
        time_to_target_s=value,
        metrics={"val_accuracy": value},
        curve=[
            {"train_time_s": value, "val_accuracy": 0.5},
            {"train_time_s": 1.0, "val_accuracy": value},
        ],
    )
    assert [
        figure.svg.count("32, fp16:")
        for figure in draw(config(), [*done(), odd]).values()
    ] == [0] * 4
    assert draw(config(), [odd]) == {}


def test_only_the_worst_of_a_curve_is_off_the_axis_whoever_says_what_is_better():
    def drawn(name, metric, mode):
        records = []
        for found in done():
            curve = [
                {
                    "train_time_s": row["train_time_s"],
                    name: row["val_accuracy"],
                }
                for row in found.curve
            ]
            metrics = {name: found.metrics["val_accuracy"]}
            records.append(replace(found, curve=curve, metrics=metrics))
        wanted = config(metric, objective={"target": None, "mode": mode})
        return draw(wanted, records)["Learning curves"]

    def lines(figure):
        return re.findall(r' d="(M[^"]+)"', figure.svg)

    said = drawn("val_skill", "val_skill", "max")
    assert lines(said) == lines(drawn("val_accuracy", "val_accuracy", None))
    assert "off the axis" in said.caption
    assert (
        "off the axis" not in drawn("val_skill", "samples_per_s", None).caption
    )


def test_how_sure_a_time_to_the_target_is():
    """Of one run between two evaluations, of finalists the interval of their repeats."""
    before = {"step": 1.0, "train_time_s": 2.5, "val_accuracy": 0.9}
    records = [
        replace(
            one,
            curve=[
                before,
                {**before, "train_time_s": one.time_to_target_s or 0.0},
            ],
        )
        for one in done()[:4]
    ]
    figure = draw(config(), records)["Time to target"]
    assert "<title>batch 64 in bf16: 2.5 to 3.12 s</title>" in figure.svg
    assert "95 %" not in figure.caption

    repeats = [
        replace(
            one,
            id=trial_id(one.config, "repeat", seed),
            purpose="repeat",
            seed=seed,
        )
        for one in records
        for seed in (1, 2)
    ]
    figure = draw(config(finalists=4), records + repeats)["Time to target"]
    assert "95 % intervals" in figure.caption
    assert re.search(
        r"<title>batch 64 in bf16: [\d.]+ s, 95 % interval [\d.]+ s to [\d.]+ s</title>",
        figure.svg,
    )
