"""The report's figures: what is drawn, and that any records can be."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.report_records import config, done, failed, trial
from tune.config import SweepConfig
from tune.report.answer import answer
from tune.report.canvas import Figure
from tune.report.figures import _closer, figures
from tune.search.finalists import contenders
from tune.trials.journal import trial_id
from tune.trials.record import Spent, TrialRecord

FRONT = "Time to target against memory"
CURVE = [{"train_time_s": 1.0, "val_loss": 0.5}, {"train_time_s": 2.0, "val_loss": 0.4}]


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """matplotlib says with a warning that a figure came out wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draw(found: SweepConfig, records: list[TrialRecord]) -> dict[str, Figure]:
    return {figure.title: figure for figure in figures(found, records, answer(found, records).best)}


def draw_values(key: str, values: list[Any], metric: str = "samples_per_s") -> dict[str, Figure]:
    records = [
        trial(number, "done", {key: value}, samples_per_s=100.0 + number, peak_memory_bytes=2**31, curve=CURVE)
        for number, value in enumerate(values)
    ]
    return draw(config(metric, space={key: values}, objective={"target": None}), records)


def texts(figure: Figure) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)<", figure.svg)


def test_the_figures_stand_in_one_page() -> None:
    drawn = draw(config(), done() + failed())
    assert list(drawn) == ["Throughput", "Peak memory", "Learning curves", "Time to target", FRONT]
    text = "".join(figure.svg for figure in drawn.values())
    assert len(re.findall(r"<svg\s", text)) == 5
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(ids)
    assert not re.search(r"#0a0[bc]", text)
    assert "var(--s1)" in text
    assert {"32", "64", "128", "256", "512"} <= {word for figure in drawn.values() for word in texts(figure)}
    assert "<title>512, fp32: out of memory</title>" in text


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw(config(), []) == {}
    assert draw(config(), [trial(0, "error", {"precision": "fp32"})]) == {}


def test_the_series_are_values_that_are_few() -> None:
    legend = texts(draw(config(), done())["Throughput"])
    assert {"fp32", "bf16"} <= set(legend)
    one = [record for record in done() if record.config["precision"] == "bf16"]
    assert "bf16" not in texts(draw(config(), one)["Throughput"])


@pytest.mark.parametrize(
    "settings",
    [
        lambda n: {"global_batch_size": 2 ** (n % 20), "optimizer.lr": 0.5 ** (n // 20)},
        lambda n: {"optimizer.lr": (n + 1) / 1e4, "optimizer.weight_decay": n % 30 / 300},
        lambda n: {"task_args.kind": f"kind {n}"},
    ],
)
def test_hundreds_of_trials(settings: Callable[[int], dict[str, Any]]) -> None:
    records = [
        trial(
            number,
            "out_of_memory" if number % 7 == 0 else "done",
            settings(number),
            samples_per_s=100.0 + number,
            peak_memory_bytes=2**30 + number,
            time_to_target_s=1.0 + number,
            metrics={"val_loss": 1.0 / (number + 1)},
            curve=CURVE,
        )
        for number in range(300)
    ]
    space = {key: list(dict.fromkeys(record.config[key] for record in records)) for key in settings(0)}
    drawn = draw(config("val_loss", space=space, objective={"target": {"val_loss": 0.5}}), records)
    assert ("Every key" in drawn) == (len(space) > 1)
    assert len(drawn) == 5 + (len(space) > 1)
    assert all(len(texts(figure)) / figure.num_panels < 90 for figure in drawn.values())
    assert "The first 24 of 300 trials." in drawn["Time to target"].caption


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1.0, math.inf], ["1", "inf"]),
        ([math.nan, 2.0], ["nan", "2"]),
        ([float("nan"), float("-nan")], ["nan"]),
        ([2**70, 1], ["1"]),
        ([1, 10**400], ["1", "1" + "0" * 22 + "..."]),
        ([-1, 0, 5], ["-1", "0", "5"]),
        ([1e-5], ["1e-05"]),
        ([1e99], ["1e+99"]),
        ([True, 1, "1", None], ["true", "1", "1", "null"]),
        ([[1, 2], [3]], ["[1, 2]", "[3]"]),
        ([{"name": "sgd"}, {"name": "adamw", "lr": 0.1}], ["{name: sgd}", "{name: adamw, lr: 0.1}"]),
    ],
)
def test_any_value_has_a_place(values: list[Any], ticks: list[str]) -> None:
    drawn = draw_values("task_args.x", values)
    assert len(drawn) == 3
    found = texts(drawn["Throughput"])
    assert [text for text in found if text in ticks][: len(ticks)] == ticks


def test_long_values_below_the_axis_are_turned() -> None:
    for length, is_turned in ((5, False), (25, True)):
        svg = draw_values("task_args.x", [f"{letter * length}" for letter in "abc"])["Throughput"].svg
        assert bool(re.search(r"rotate\(-25\b[^<]*>a", svg)) == is_turned


def test_the_axis_is_a_key_that_varies() -> None:
    space = {"global_batch_size": [64], "optimizer.lr": [0.1, 0.2]}
    records = [trial(n, "done", {"global_batch_size": 64, "optimizer.lr": 0.1 * n}, samples_per_s=1.0) for n in (1, 2)]
    assert "lr" in texts(draw(config("samples_per_s", space=space), records)["Throughput"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_figures_without_what_is_not_finite(value: float) -> None:
    odd = trial(
        11,
        "done",
        {"global_batch_size": 32, "precision": "fp16"},
        samples_per_s=value,
        time_to_target_s=value,
        metrics={"val_accuracy": value},
        curve=[{"train_time_s": value, "val_accuracy": 0.5}, {"train_time_s": 1.0, "val_accuracy": value}],
    )
    assert [figure.svg.count("32, fp16:") for figure in draw(config(), [*done(), odd]).values()] == [0] * 5
    assert draw(config(), [odd]) == {}


def test_a_target_that_is_reached_at_once_has_a_bar() -> None:
    records = [trial(0, "done", {"precision": "fp32"}, time_to_target_s=0.0)]
    assert "0 s" in texts(draw(config(), records)["Time to target"])


@pytest.mark.parametrize(
    "text", ["#0a0b01", 'url(#x) id="a" href="#b"', "<b>&", "$\\frac{", "\u6279\u91cf", "\x00\x1b[1m"]
)
def test_text_stays_text(text: str) -> None:
    drawn = draw_values(f"task_args.{text}", [text, "b"])
    for figure in drawn.values():
        assert "<b>" not in figure.svg
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", figure.svg)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = escaped.replace("\x00", r"\x00").replace("\x1b", r"\x1b")
    assert escaped in texts(drawn["Throughput"])


@pytest.mark.parametrize(("first", "last", "target"), [(0.2, 0.99, 0.97), (2.0, 0.1, 0.3)])
def test_the_way_up_to_the_target_is_on_the_axis(first: float, last: float, target: float) -> None:
    """Runs that are past the target at nearly every evaluation: where they cross it must still be seen."""
    points = [(float(at), last + (first - last) * 0.2**at) for at in range(1, 30)]
    low, high = _closer([points], target)
    past, before = (high - target, target - low) if last > first else (target - low, high - target)
    assert past > 0
    assert 0.2 * past < before < 0.6 * past
    assert low < points[-1][1] < high


def spread_out(space: dict[str, list[Any]], count: int) -> list[TrialRecord]:
    """Trials that go through each key's values side by side."""
    return [
        trial(
            n,
            "done",
            {key: values[n // (at + 1) % len(values)] for at, (key, values) in enumerate(space.items())},
            samples_per_s=100.0 + n,
            peak_memory_bytes=2**30,
            metrics={"val_loss": 1.0 / (n + 1)},
            curve=CURVE,
        )
        for n in range(count)
    ]


def test_every_swept_key_is_in_a_figure() -> None:
    """Colour, panels, and the figure of all keys for what is left."""
    space: dict[str, list[Any]] = {
        "global_batch_size": [32, 64, 128],
        "precision": ["fp32", "bf16"],
        "optimizer.name": ["sgd", "adamw", "lion"],
        "optimizer.lr": [0.001 * 2**n for n in range(9)],
        "task_args.width": [1, 2],
        "strategy": ["ddp"],
    }
    drawn = draw(config("val_loss", space=space, objective={"target": None}), spread_out(space, 36))
    assert list(drawn) == ["Throughput", "Peak memory", "Learning curves", "Every key"]
    for title in ("Throughput", "Peak memory", "Learning curves"):
        assert drawn[title].num_panels == 3
        found = texts(drawn[title])
        assert {"fp32", "bf16", "name sgd", "name adamw", "name lion"} <= set(found)
        ids = re.findall(r'\sid="([^"]*)"', drawn[title].svg)
        assert len(ids) == len(set(ids))
    keys = ("name", "lr", "width", "global_batch_size", "precision")
    assert [text for text in texts(drawn["Every key"]) if text in keys] == list(keys)
    assert drawn["Every key"].num_panels == 5
    assert "for each precision and name" in drawn["Throughput"].caption


def test_many_numbers_are_a_scale_of_colours() -> None:
    space = {"global_batch_size": [32, 64], "optimizer.lr": [1e-4 * 3**n for n in range(8)]}
    drawn = draw(config("val_loss", space=space, objective={"target": None}), spread_out(space, 16))
    assert {"lr 0.0001", "lr 0.2187"} <= set(texts(drawn["Throughput"]))
    for share in (0, 100):
        assert f"color-mix(in oklab, var(--low), var(--high) {share}%)" in drawn["Throughput"].svg


def test_a_bar_is_pale_where_the_target_was_met_and_the_lanes_tell_starting_from_training() -> None:
    row = {"step": 1.0, "val_accuracy": 0.9}
    ended = [
        replace(
            one,
            curve=[{**row, "train_time_s": 2.5}, {**row, "train_time_s": one.time_to_target_s or 0.0}],
            spent=Spent(100.0 + 20 * n, 4.0, 5.0, 10.0, 0.5),
        )
        for n, one in enumerate(done()[:4])
    ]
    drawn = draw(config(), ended)
    assert "in the pale part of a bar, between two evaluations" in drawn["Time to target"].caption
    assert "<title>64, bf16: 2.5 to 3.12 s</title>" in drawn["Time to target"].svg
    figure = drawn["Starting and training"]
    assert "starting, 40% of the trials' time on their lanes; full colour: training, 50%; pale" in figure.caption
    assert {"lane 0", "lane 1"} <= set(texts(figure))
    assert figure.svg.count("starting 4 s, training 5 s, rest 1 s; first step 0.5 s") == 12


def dotted_lines(figure: Figure) -> int:
    return len(re.findall(r"stroke-dasharray: 2\.2", figure.svg))


def test_a_line_stands_where_memory_runs_out() -> None:
    oom = failed()[0]  # fp32 at 512; 256 fitted
    without, drawn = draw(config(), done()), draw(config(), [*done(), oom])
    for title in ("Throughput", "Peak memory"):
        assert dotted_lines(without[title]) == 0
        assert dotted_lines(drawn[title]) == 1
    both = [*done(), oom, replace(oom, config={"global_batch_size": 256, "precision": "bf16"}, id="x")]
    assert dotted_lines(draw(config(), both)["Throughput"]) == 2


def test_the_front_has_every_trial_and_its_interval_where_it_was_repeated() -> None:
    drawn = draw(config(), done())[FRONT]
    assert drawn.svg.count("<title>") == 7  # those that reached the target
    assert "95 %" not in drawn.caption
    asked = config(finalists={"count": 3})
    repeats = [
        replace(record, id=trial_id(record.config, "repeat", seed), purpose="repeat", seed=seed, time_to_target_s=4.0)
        for record in contenders(asked, done())
        for seed in (1, 2)
    ]
    drawn = draw(asked, done() + repeats)[FRONT]
    assert drawn.svg.count("<title>") == 7
    assert "64, bf16: 4 s, 297 MiB" in drawn.svg
    assert "95 % intervals" in drawn.caption


def test_dollars_have_an_axis_where_they_have_a_price() -> None:
    priced = [
        replace(record, metrics={**record.metrics, "usd_to_target": (record.time_to_target_s or 0) / 9})
        for record in done()
    ]
    assert "USD to target" in draw(config(), priced)[FRONT].svg
    assert "USD to target" not in draw(config(), done())[FRONT].svg
