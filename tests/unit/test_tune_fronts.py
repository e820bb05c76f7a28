"""The boundary, the front of time and memory, and what search frontier expects, as the report draws them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.report_records import config, curve, done, failed, trial
from tune.config import SweepConfig
from tune.report.answer import answer
from tune.report.canvas import Figure
from tune.report.figures import figures
from tune.search.finalists import contenders
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

FRONT, EXPECTED = "Time to target against memory", "Expected time to target"
TRAIN = {"task": "task:Digits", "epochs": 30, "optimizer": {"name": "adamw", "lr": 0.002}}


@pytest.fixture(autouse=True)
def no_warning(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    assert not list(recwarn)


def draw(found: SweepConfig, records: list[TrialRecord], train: dict[str, Any] | None = None) -> dict[str, Figure]:
    return {figure.title: figure for figure in figures(found, records, answer(found, records).best, train)}


def dotted_lines(figure: Figure) -> int:
    return len(re.findall(r"stroke-dasharray: 2\.2", figure.svg))


def test_a_line_stands_where_memory_runs_out() -> None:
    oom = failed()[0]  # fp32 at 512; 256 fitted
    without, drawn = draw(config(), done()), draw(config(), [*done(), oom])
    for title in ("Throughput", "Peak memory"):
        assert dotted_lines(without[title]) == 0
        assert dotted_lines(drawn[title]) == 1
    both = [*done(), oom, dataclasses.replace(oom, config={"global_batch_size": 256, "precision": "bf16"}, id="x")]
    assert dotted_lines(draw(config(), both)["Throughput"]) == 2


def test_the_front_has_every_trial_and_its_interval_where_it_was_repeated() -> None:
    drawn = draw(config(), done())[FRONT]
    assert drawn.svg.count("<title>") == 7  # those that reached the target
    assert "95 %" not in drawn.caption
    asked = config(finalists={"count": 3})
    repeats = [
        dataclasses.replace(
            record, id=trial_id(record.config, "repeat", seed), purpose="repeat", seed=seed, time_to_target_s=4.0
        )
        for record in contenders(asked, done())
        for seed in (1, 2)
    ]
    drawn = draw(asked, done() + repeats)[FRONT]
    assert drawn.svg.count("<title>") == 7
    assert "64, bf16: 4 s, 297 MiB" in drawn.svg
    assert "95 % intervals" in drawn.caption


def test_dollars_have_an_axis_where_they_have_a_price() -> None:
    priced = [
        dataclasses.replace(record, metrics={**record.metrics, "usd_to_target": (record.time_to_target_s or 0) / 9})
        for record in done()
    ]
    assert "USD to target" in draw(config(), priced)[FRONT].svg
    assert "USD to target" not in draw(config(), done())[FRONT].svg


def test_what_the_search_expects_is_drawn_for_every_size() -> None:
    sizes = [32, 64, 128, 256]
    found = config(search="frontier", space={"global_batch_size": sizes, "precision": ["fp32", "bf16"]})
    records = [
        trial(
            number,
            "stopped",
            {"global_batch_size": size, "precision": precision},
            samples_per_s=1000.0 * size / (size + 60),
            step_time_s=(size + 60) / 1000,
            time_to_target_s=4.0 + number,
            curve=[{**row, "step": row["epoch"] * 20_000 / size} for row in curve(0.98, 0.1, 10.0, 3)],
        )
        for number, (size, precision) in enumerate([(32, "fp32"), (128, "fp32"), (64, "bf16")])
    ]
    drawn = draw(found, records, TRAIN)[EXPECTED]
    assert drawn.svg.count("<title>") == 3
    assert {"32", "64", "128", "256"} <= set(re.findall(r"<text [^>]*>([^<]*)<", drawn.svg))
    assert EXPECTED not in draw(found, records)
    assert "Of 8 configurations 3 reached the target" in answer(found, records, TRAIN).sentence


def test_the_course_of_a_populations_values() -> None:
    """A line a trial, the values of which change where its weights came from another; none without a population."""
    space = {"optimizer.lr": {"loguniform": [1e-4, 1e-1]}}
    population = config("val_loss", space=space, scheduler="pbt", search="random", budget={"trials": 3})
    first = {"trial": "a", "step": 0, "epoch": 0.0, "config": {"optimizer.lr": 1e-2}}
    then = {"trial": "b", "step": 40, "epoch": 10.0, "config": {"optimizer.lr": 1e-3}}
    records = [
        dataclasses.replace(record, id=name, config=(schedule or [first])[-1]["config"], schedule=schedule)
        for record, name, schedule in zip(done(), "abc", ([first], [first, then], []), strict=False)
    ]
    drawn = draw(population, records)["Course of lr"]
    tips = re.findall(r"<title>(.*?)</title>", drawn.svg)
    assert len(tips) == 2
    assert any("from trial a" in tip for tip in tips)
    assert "mathdefault" not in drawn.svg
    assert draw(population, [records[0], records[2]]).keys().isdisjoint({"Course of lr"}), "one value has no course"
    assert "Course of lr" not in draw(config(), done())
