"""Several objectives: what the front is, what the answer says of it, and which trials are certain to be beaten."""

from __future__ import annotations

import functools
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.front import hypervolume
from tests.browser import LOOKS, chromium, look_at
from tests.unit.report_records import ENVIRONMENT, TRAIN, config, done
from tests.unit.test_tune_frontier import WHOLE, World, saturating
from trainers.config.model import build
from trainers.errors import ConfigError
from trainers.storage import Storage
from tune.config import SweepConfig
from tune.objective import Objective
from tune.report.answer import answer
from tune.report.page import contents, render
from tune.report.write import write_report
from tune.search.finalists import most_ahead
from tune.search.front import beaten_by, beats, front, steps, unbeaten
from tune.search.front_belief import FrontBelief
from tune.search.frontier import Choice, Ended, Seen, decide
from tune.search.time_model import Place
from tune.trials.record import make_record

METRICS = ["time_to_target", "peak_memory_bytes"]
ONE_LOOK = {"report-light": LOOKS["report-light"]}
GOAL = {"target": {"val_accuracy": 0.97}}


def several(**changes: Any) -> SweepConfig:
    return config().model_copy(update={"objective": Objective.model_validate({"metrics": METRICS, **GOAL, **changes})})


def running(time_s: float, memory: float, **more: float) -> list[dict[str, float]]:
    return [{"step": 1.0, "train_time_s": time_s, "peak_memory_bytes": memory, "val_accuracy": 0.5, **more}]


def test_the_front_holds_what_no_trial_beats_and_each_other_trial_is_beaten() -> None:
    records = done()
    members = front(several().objective, records)
    own = {
        (one.record.config["global_batch_size"], one.record.config["precision"]) for one in members if one.is_on_front
    }
    assert own == {(32, "bf16"), (64, "bf16")}  # the least memory, and the fastest
    figures = steps(
        several().objective, np.array([[r.time_to_target_s or math.nan, r.peak_memory_bytes] for r in records])
    )
    figures = figures[np.isfinite(figures).all(axis=1)]
    front_rows = unbeaten(figures)
    for row in set(range(len(figures))) - set(front_rows):
        assert any(beats(figures[one], figures[row]) for one in front_rows)


def test_a_difference_below_a_step_decides_nothing() -> None:
    first, *_ = done()
    other = replace(
        first,
        id="x",
        config={**first.config, "precision": "bf16"},
        peak_memory_bytes=int(first.peak_memory_bytes * 0.97),
    )
    slower = replace(
        other,
        id="y",
        config={**first.config, "precision": "fp16"},
        time_to_target_s=first.time_to_target_s * 3,
        curve=[],
    )
    members = front(several().objective, [first, other, slower])
    assert {one.record.id for one in members} == {first.id, "x"}
    assert all(one.chance > 0.4 for one in members)


def test_the_answer_lists_the_front_and_weights_choose_its_best() -> None:
    records = done()
    by_time, by_memory = (answer(several(**more), records) for more in ({}, {"weights": {"peak_memory_bytes": 1}}))
    assert by_time.best
    assert by_time.best.config == {"global_batch_size": 64, "precision": "bf16"}
    assert by_memory.best
    assert by_memory.best.config == {"global_batch_size": 32, "precision": "bf16"}
    assert by_time.verdict == (
        "global_batch_size 64 with bf16 is the best of the front by time to target: 3.12 s, 297 MiB. "
        "2 of 8 trials are on it: no other beats one of them in all of time to target and peak memory."
    )
    assert "The lowest peak memory has 32, bf16: 4.02 s, 246 MiB. 1 more may be on it" in by_time.sentence
    assert "by the weights peak_memory_bytes 1" in by_memory.verdict


def test_a_trial_that_lacks_a_figure_is_never_the_best() -> None:
    records = [replace(one, time_to_target_s=None, status="stopped") for one in done()]
    found = answer(several(metrics=METRICS[::-1]), records)
    assert found.best is None
    assert "no finished one reached val_accuracy 0.97" in found.verdict


def test_the_page_weighs_by_the_one_script_that_its_policy_names(tmp_path: Any) -> None:
    sweep, given = several(), done()
    shown = contents(Storage(str(tmp_path)), sweep, {}, {}, given, {}, answer(sweep, given))
    page = render("report.html", **shown)
    assert page.count("<script>") == 1
    assert f"script-src '{shown['script_hash']}'" in page
    assert "src=" not in page
    assert json.loads(shown["weighing"]["rows"][0]["steps"])[0] == 0.0
    assert "best.yaml" in shown["weighing"]["rows"][0]["command"]
    assert "--precision bf16" in page
    assert "<script>" not in render(
        "report.html",
        **contents(Storage(str(tmp_path)), config(), {}, {}, given, {}, answer(config(), given)),
    )


def test_a_running_trial_is_beaten_only_where_all_of_its_bounds_are() -> None:
    objective, records = several().objective, done()
    fast = next(one for one in records if one.config == {"global_batch_size": 64, "precision": "bf16"})
    peak, time_s = float(fast.peak_memory_bytes or 0), fast.time_to_target_s or 0.0
    assert beaten_by(objective, running(2 * time_s, peak), [fast]) == fast
    assert beaten_by(objective, running(1.5 * time_s, peak), [fast]) is None  # repeats may differ by that
    assert beaten_by(objective, running(2 * time_s, 0.9 * peak), [fast]) is None
    assert beaten_by(objective, running(2 * time_s, peak, cpu_pressure=0.3), [fast]) is None  # alone it may be faster
    assert beaten_by(objective, running(2 * time_s, peak), [replace(fast, status="stopped")]) is None
    met = [{**running(0.5 * time_s, peak)[0], "val_accuracy": 0.98}, *running(9 * time_s, peak)]
    assert beaten_by(objective, met, [fast]) is None  # it met the target early, and trains on
    no_bound = several(metrics=[*METRICS, "val_loss"]).objective
    assert beaten_by(no_bound, running(99 * time_s, 9 * peak), [fast]) is None


def test_with_a_single_objective_a_trial_is_beaten_once_the_answer_excludes_it() -> None:
    objective, fast = config().objective, done()[0]
    time_s = 100.0
    fast = replace(fast, time_to_target_s=time_s, curve=[])
    assert beaten_by(objective, running(2.6 * time_s, 1.0), [fast]) == fast
    assert beaten_by(objective, running(2.4 * time_s, 1.0), [fast]) is None
    assert beaten_by(objective, running(2.6 * time_s, 1.0, cpu_pressure=0.1), [fast]) is None
    assert beaten_by(objective, running(2.6 * time_s, 1.0, val_accuracy=0.98), [fast]) is None, "it ends by itself"
    assert beaten_by(objective, running(9.0, 1.0), [replace(fast, time_to_target_s=1.0)]) is None, "not worth it"
    to_end = config(objective={**objective.model_dump(exclude_none=True), "train_to": "end"})
    assert beaten_by(to_end.objective, running(2.6 * time_s, 1.0), [fast]) is None
    assert (config().ends_beaten, to_end.ends_beaten) == (True, False)

    stopped = [
        replace(fast, id=str(number), status="stopped", time_to_target_s=None, curve=running(2.51 * time_s, 1.0))
        for number in range(80)
    ]
    assert most_ahead(config(), [fast, *stopped], []) == pytest.approx(1.0, abs=0.01)
    early = replace(stopped[0], curve=running(1.5 * time_s, 1.0))
    assert (most_ahead(config(), [fast, early], []) or 0) > 1.05


def test_dollars_and_energy_bound_a_trial_as_its_time_does() -> None:
    objective = several(metrics=["usd_to_target", "energy_j"]).objective
    finished = replace(done()[0], metrics={"usd_to_target": 1.0}, energy_j=100.0)
    assert beaten_by(objective, running(7200.0, 1.0, energy_j=200.0), [finished], usd_per_hour=1.0) == finished
    assert beaten_by(objective, running(7200.0, 1.0, energy_j=150.0), [finished], usd_per_hour=1.0) is None
    assert beaten_by(objective, running(7200.0, 1.0, energy_j=200.0), [finished]) is None


def test_a_record_keeps_what_was_used_beside_its_metrics() -> None:
    outcome = {"status": "done", "result": {"peak_memory_bytes": 7, "energy_j": 3.5, "metrics": {"val_accuracy": 0.98}}}
    objective = several(metrics=[*METRICS, "energy_j"]).objective
    curve = [{"step": 1.0, "train_time_s": 1.0, "val_accuracy": 0.98, "peak_memory_bytes": 5.0, "energy_j": 2.0}]
    record = make_record("t", {}, objective, 0.0, curve, outcome)
    assert (record.status, record.peak_memory_bytes, record.energy_j) == ("done", 7, 3.5)
    assert set(record.metrics) == {"step", "train_time_s", "val_accuracy"}
    stopped = make_record("t", {}, objective, 0.0, curve, {"status": "stopped"})
    assert (stopped.peak_memory_bytes, stopped.energy_j) == (5, 2.0)
    del outcome["result"]["energy_j"]  # type: ignore[attr-defined]
    rows = [{name: value for name, value in curve[0].items() if name != "energy_j"}]
    without = make_record("t", {}, objective, 0.0, rows, outcome)
    assert without.status == "error"
    assert "energy_j" in without.message


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"objective": {"metrics": ["time_to_target", "peak_memory_bytes"]}}, "objective.target", "counts to"),
        ({"objective": {"metrics": METRICS, **GOAL, "mode": "min"}}, "objective.mode", "no effect"),
        ({"objective": {"metrics": [*METRICS, METRICS[0]], **GOAL}}, "objective.metrics", "twice"),
        ({"objective": {"metrics": ["val_loss", "odd"]}}, "objective.metrics", "direction"),
        ({"objective": {"metric": "val_loss", "weights": {"val_loss": 1}}}, "objective.weights", "needs"),
        ({"objective": {"metrics": METRICS, **GOAL, "weights": {"val_loss": 1}}}, "objective.weights", "not among"),
        ({"objective": {"metrics": METRICS, **GOAL, "weights": {METRICS[0]: 0}}}, "objective.weights", "above 0"),
        ({"objective": {"metrics": METRICS, **GOAL, "metric": METRICS[1]}}, "objective.metric", "the first"),
        ({"objective": {"metrics": METRICS, **GOAL}, "scheduler": "asha"}, "scheduler", "one metric"),
        ({"objective": {"metrics": ["usd_to_target", "val_loss"], **GOAL}}, "usd_per_hour", "usd_to_target"),
        (
            {"objective": {"metrics": ["time_to_target", "val_loss"], **GOAL}, "search": "frontier"},
            "search",
            "val_loss",
        ),
    ],
)
def test_what_cannot_be_several_objectives(changes: dict[str, Any], field: str, words: str) -> None:
    tree = {"train": {"task": "task:Digits"}, "space": {"global_batch_size": [8, 16]}, **changes}
    with pytest.raises(ConfigError, match=words) as error:
        build(SweepConfig, tree, "f")
    assert error.value.field == field


@pytest.mark.parametrize("metrics", [METRICS, ["peak_memory_bytes", "energy_j", "usd_to_target"]])
def test_the_frontier_finds_the_front_for_part_of_the_grid(metrics: list[str]) -> None:
    shares, costs, ends = [], [], set()
    for seed in range(3):
        world = saturating(seed)

        def peak(place: Place) -> float:
            return (3e6 if place.setting == "fp32" else 2e6) + 1e4 * place.size

        def spent(place: Place, world: World = world) -> list[float]:
            return [world.time_s(place), peak(place), world.time_s(place) * (100 + place.size / 4)]

        seen: list[Seen] = []
        make = functools.partial(FrontBelief, metrics)
        while isinstance(step := decide(world.places, seen, [], (), make), Choice):
            found = replace(world.run(step), peak_memory_bytes=peak(step.place), power_w=100 + step.place.size / 4)
            seen.append(found)
        assert isinstance(step, Ended)
        ends.add(step.reason)
        own = [place for place in world.places if any(one.place == place and one.samples_to_target for one in seen)]
        at = [0, 1] if metrics is METRICS else [1, 2]
        volumes = []
        for places in (own, world.places):
            rows = np.log([[spent(place)[column] for column in at] for place in places])
            worst = np.log([max(spent(place)[column] for place in world.places) * 1.1 for column in at])
            volumes.append(hypervolume(rows, worst))
        shares.append(volumes[0] / volumes[1])
        costs.append(sum(one.samples for one in seen) / (WHOLE * len(world.places)))
    assert statistics.mean(shares) > 0.97
    assert max(costs) < 0.4
    assert any("hypervolume" in why for why in ends)


def test_hypervolumes_of_boxes_that_are_known() -> None:
    reference = np.array([3.0, 3.0, 3.0])
    assert hypervolume(np.array([[1.0, 1.0, 1.0]]), reference) == 8.0
    assert hypervolume(np.array([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [4.0, 0.0, 0.0]]), reference) == 3.0
    assert hypervolume(np.empty((0, 3)), reference) == 0.0


@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
def test_the_reader_weighs_the_front_without_a_network(tmp_path: Path) -> None:
    write_report(Storage(str(tmp_path / "digits-sweep")), several(), TRAIN, done(), ENVIRONMENT, task_dir=None)
    first = "document.querySelector('#front tbody tr').innerText + document.querySelector('#chosen').textContent"
    weigh = """(() => { document.querySelectorAll('#weigh input').forEach((input, at) => {
        input.value = at ? 10 : 0; input.dispatchEvent(new Event('input', {bubbles: true})); }); return 1; })()"""
    page = look_at(tmp_path / "digits-sweep" / "report.html", first, weigh, f"'then ' + {first}", looks=ONE_LOOK)
    assert page.asked == []
    assert page.said == []
    (before, _, after) = page.found.values()
    assert "64, bf16" in before
    assert "--global_batch_size 64" in before
    assert "32, bf16" in after
    assert "--global_batch_size 32" in after
