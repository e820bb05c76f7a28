"""The GPU benchmarks in miniature, on the CPU: whole rows, right arithmetic, and what is dropped is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import guides, ladder, resident
from benchmarks.__main__ import FULL, GPU, SHORT, due, share
from benchmarks.ladder import Row, Rung, break_even_steps, compare, expected_s, rungs
from benchmarks.runs import Budget, Runs, Work, example, matmul_flops, unfused
from trainers.step.train_step import TrainStep

CPU = torch.device("cpu")
BLOBS = """
task: tests.tasks:Blobs
task_args: {fits: 100}
optimizer: {name: adamw, lr: 0.01}
global_batch_size: 8
epochs: 1
"""


@pytest.fixture(autouse=True)
def threads_come_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def blobs(tmp_path: Path) -> Work:
    file = tmp_path / "train.yaml"
    file.write_text(BLOBS)
    return Work(file, 8)


class Clock:
    """Told what time it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("name", ladder.SMALL)
def test_every_rung_of_a_model_is_a_row(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    only = ["fp32", "tf32", "bf16", "channels_last", "bf16 again"]
    found = ladder.measure({name: ladder.SMALL[name]}, only, CPU, 0.02, Budget(None), n=64)
    work = found["works"][name]
    rows = {row["rung"]: row for row in work["rows"]}
    convolutions = name in ladder.CONVOLUTIONS
    assert list(rows) == [rung for rung in only if convolutions or rung != "channels_last"], "the ladder's order"
    refused = rows.pop("tf32")
    assert refused["status"] == "failed"
    assert "tf32" in refused["message"]
    base = rows["fp32"]["figures"]
    for row in rows.values():
        it = row["figures"]
        assert (row["status"], row["message"]) == ("done", "")
        assert it["n"] >= 5
        assert it["samples_per_s"] == pytest.approx(work["batch"] / it["step_time_s"])
        matmul = found["matmul_tflops"][row["changes"]["precision"]]
        assert it["mfu_matmul"] == pytest.approx(it["tflops"] / matmul)
        assert it["mfu_data_sheet"] is None, "no data sheet of a CPU is known"
        assert it["of_ceiling"] == pytest.approx(it["ceiling_step_time_s"] / it["step_time_s"])
        assert it["ceiling_step_time_s"] > 0
        assert it["ratio_to_fp32"] == pytest.approx(it["samples_per_s"] / base["samples_per_s"])
    again = rows["bf16 again"]["figures"]["samples_per_s"] / rows["bf16"]["figures"]["samples_per_s"]
    assert work["floor"] == pytest.approx(abs(again - 1))
    assert json.loads(json.dumps(found)) == found, "kept as JSON"
    assert str(Path.cwd()) not in json.dumps(found)
    assert capfd.readouterr().out.count("failed: ConfigError") == 1


def test_the_models_flops_are_those_of_a_hand_count() -> None:
    """The guides' CNN: a weight's product counts in the forward pass, for its gradient, and (but for the first layer)
    for the gradient of its input; two FLOPs a multiplication.
    """
    first = 26 * 26 * 32 * 9
    others = 24 * 24 * 64 * 32 * 9 + 64 * 12 * 12 * 128 + 128 * 10
    by_hand = 2 * (2 * first + 3 * others)
    measured = Runs(ladder.SMALL["cnn"], CPU).run({"precision": "fp32"}, 0.01)
    assert measured.result.flops_per_sample == by_hand
    figures = ladder.figures_of(measured, matmul=1e12)
    assert figures["mfu_matmul"] == pytest.approx(by_hand * figures["samples_per_s"] / 1e12)
    assert figures["tflops"] == pytest.approx(by_hand * figures["samples_per_s"] / 1e12)


def test_a_product_is_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.health.matmul.measure", lambda run, wait, sample_s: [0.5, 0.25, 0.25])
    assert matmul_flops("fp32", CPU, 100) == 2 * 100**3 / 0.25


def test_what_does_not_fit_is_a_row_and_the_next_rung_runs(blobs: Work) -> None:
    runs = Runs(blobs, CPU)
    fits = Rung("fp32", {"precision": "fp32"}, False, None, 0)
    too_large = Rung("bf16", {"precision": "bf16", "global_batch_size": 150, "microbatch_size": 150}, True, "fp32", 0)
    found = {rung.name: ladder.climb(runs, rung, 0.01, {"fp32": 1e9}, 1e9) for rung in (too_large, fits)}
    assert found["bf16"].status == "out_of_memory"
    assert "150 samples" in found["bf16"].message
    assert found["fp32"].status == "done"
    rows, floor = compare([fits, too_large], found)
    assert [row.rung for row in rows] == ["fp32", "bf16"]
    assert floor is None


def test_the_language_model_trains_on_text_alone() -> None:
    """A line has 58 to 76 bytes: alone in a context of 1,024 it would be nine tenths of padding."""
    runs = Runs(ladder.WORKS["gpt"], CPU)
    [rows] = runs.task.dataset("train").tensors
    assert rows.shape[1] == 1024 + 1
    assert bool((rows != 0).all())


def test_a_ladder_changes_one_thing_a_rung() -> None:
    for convolutions in (True, False):
        by_name = {rung.name: rung for rung in rungs(convolutions, host_bound=False)}
        assert ("channels_last" in by_name) == convolutions
        for rung in by_name.values():
            if rung.stands_on is None:
                assert rung.name == "fp32"
                continue
            below = by_name[rung.stands_on]
            keys = rung.changes.keys() | below.changes.keys()
            changed = [key for key in keys if rung.changes.get(key) != below.changes.get(key)]
            assert len(changed) + (rung.fused != below.fused) == (rung.name != "bf16 again"), rung.name


def test_steps_until_compiling_has_paid() -> None:
    assert break_even_steps(30.0, before_s=0.5, after_s=0.25) == 120
    assert break_even_steps(1.0, before_s=0.5, after_s=0.2) == 4
    assert break_even_steps(0.0, before_s=0.5, after_s=0.25) == 0
    assert break_even_steps(30.0, before_s=0.25, after_s=0.25) is None
    assert break_even_steps(30.0, before_s=0.25, after_s=0.5) is None


def row(rung: str, step_s: float, first_s: float = 0.0, memory: int = 100) -> Row:
    figures = {"samples_per_s": 8 / step_s, "step_time_s": step_s, "first_step_s": first_s, "peak_memory_bytes": memory}
    return Row(rung, {}, "done", figures=figures)


def test_a_rung_is_compared_with_the_first_and_with_the_one_it_stands_on() -> None:
    steps = {"fp32": 0.8, "bf16": 0.2, "fused": 0.16, "bf16 again": 0.25}
    found = {name: row(name, step_s, first_s=2.0) for name, step_s in steps.items()}
    found["compile"] = row("compile", 0.08, first_s=42.0, memory=60)
    rows, floor = compare(rungs(convolutions=False, host_bound=False), found)
    figures = {one.rung: one.figures for one in rows}
    assert figures["compile"]["ratio_to_fp32"] == pytest.approx(10)
    assert figures["compile"]["ratio_to_rung_below"] == pytest.approx(2)
    assert figures["compile"]["memory_to_fp32"] == pytest.approx(0.6)
    assert figures["compile"]["compile_s"] == pytest.approx(40)
    assert figures["compile"]["break_even_steps"] == 500
    assert "break_even_steps" not in figures["fused"]
    assert floor == pytest.approx(0.2)


def test_the_least_important_rungs_are_dropped_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock, run = Clock(), []

    def climb(runs: Runs, rung: Rung, *_: Any) -> Row:
        run.append((runs.work.file.parent.name, rung.name))
        cost_s = 60.0 if rung.name == "compile" else 10.0
        clock.now += cost_s
        made = row(rung.name, 0.1)
        made.cost_s = cost_s
        made.figures |= {"tflops": None, "step_time_ci95_s": None, "n": 5}
        return made

    monkeypatch.setattr(ladder, "climb", climb)
    works = {name: ladder.SMALL[name] for name in ("gpt", "cnn")}
    budget = Budget(3.5, clock)
    found = ladder.measure(works, None, CPU, 0.01, budget, n=32)
    assert run[:4] == [("gpt", "fp32"), ("gpt", "bf16"), ("mnist", "fp32"), ("mnist", "bf16")]
    assert ("gpt", "compile") in run
    assert ("mnist", "compile") not in run, "170 s were gone, and the first had taken 60"
    assert clock.now <= 210
    statuses = {row["rung"]: row["status"] for row in found["works"]["cnn"]["rows"]}
    assert statuses["compile"] == "dropped"
    assert statuses["fp32"] == statuses["tf32"] == "done"
    assert "cnn compile" in found["dropped"]
    budget.say()
    printed = capfd.readouterr().out
    assert "cnn compile" in printed.split("DROPPED")[1]
    assert "compile        dropped: the budget is 3.5 minutes" in printed


def test_a_dropped_rung_says_nothing_of_what_the_next_costs() -> None:
    compiled = Rung("compile", {}, True, None, 0)
    seen = [Row("fp32", {}, "done", cost_s=8.0), Row("compile", {}, "dropped")]
    assert expected_s(compiled, seen, []) > 60
    assert expected_s(compiled, seen, [Row("compile", {}, "done", cost_s=33.0)]) == 33.0
    assert expected_s(Rung("fused", {}, True, None, 0), [], seen) == 8.0


def test_an_optimizer_that_is_not_fused_trains_the_same(blobs: Work) -> None:
    runs = Runs(blobs, CPU)
    changes = {"precision": "fp32", "max_steps": 20}
    losses = {fused: runs.run(changes, 60.0, fused).result.metrics["train_loss"] for fused in (True, False)}
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    config = blobs.config({"device": "cpu", **changes})
    model = runs.task.model()
    built: Any = unfused(runs.new_optimizer(model, config))
    assert not any(group["fused"] for group in built.param_groups)
    assert built.param_groups[0]["lr"] == config.optimizer.lr
    assert not getattr(built, "_step_supports_amp_scaling", False), "a loss scaler must not leave its work to it"


def test_runs_of_a_work_begin_alike(blobs: Work) -> None:
    """One set of data, and a copy of the same first weights for each."""
    runs = Runs(blobs, CPU)
    changes = {"precision": "fp32", "max_steps": 10}
    first, second = (runs.run(changes, 60.0).result.metrics["train_loss"] for _ in range(2))
    assert first == second
    assert runs.task.dataset("train") is runs.task.dataset("train")


def test_time_begins_after_the_warm_up(blobs: Work) -> None:
    measured = Runs(blobs, CPU).run({"precision": "fp32"}, 0.05)
    assert measured.result.status == "stopped"
    assert measured.looks[-1] - measured.looks[0] >= 0.05
    assert measured.looks[-2] - measured.looks[0] < 0.05
    assert measured.result.steps == 10 * len(measured.looks)


def test_the_bare_loop_trains_what_the_product_trains() -> None:
    found = resident.measure(resident.SMALL, CPU, rounds=1, steps=30, budget=Budget(None))
    assert found["rows"].keys() == {"bare", "paceline", "bare again"}
    losses = found["train_loss"]
    assert losses["paceline"] == pytest.approx(losses["bare"], rel=1e-6)
    assert found["met"] == (found["rows"]["paceline"]["ratio"] >= 0.95)


def test_other_training_than_the_bare_loops_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = resident.bare
    monkeypatch.setattr(resident, "bare", lambda *given: (honest(*given)[0], 1.0))
    with pytest.raises(AssertionError, match="not the same training"):
        resident.measure(resident.SMALL, CPU, rounds=1, steps=30, budget=Budget(None))


@pytest.mark.parametrize("name", guides.CLAIMS)
def test_every_claim_has_theirs_and_ours(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    setting = guides.Setting(CPU, small=True, rounds=1, seconds=0.01)
    lines, failed = guides.measure([name], setting, Budget(None))
    assert not failed
    assert lines
    for line in lines:
        assert line.tree()["n"] == len(line.ratios) >= 1
        assert line.theirs
        assert line.share or line.ours > 0
    guides.show(lines)
    printed = capfd.readouterr().out
    assert all(line.claim in printed and line.theirs in printed for line in lines)


def test_ours_is_the_median_of_the_rounds_with_its_spread(capfd: pytest.CaptureFixture[str]) -> None:
    faster = guides.Line("faster", "1.50 x", guides.over([90.0, 40.0, 60.0], [30.0, 20.0, 15.0]), floor=0.02)
    assert {key: faster.tree()[key] for key in ("ours", "min", "max", "n")} == {"ours": 3, "min": 2, "max": 4, "n": 3}
    smaller = guides.Line("smaller", "40 to 60%", [0.5, 0.25, 0.375], share=True)
    guides.show([faster, smaller])
    first, second = capfd.readouterr().out.splitlines()[-2:]
    assert first.split() == ["faster", "1.50", "x", "3.00", "x", "3", "[2.00", "x,", "4.00", "x]", "2.0%"]
    assert second.split() == ["smaller", "40", "to", "60%", "38%", "3", "[25%,", "50%]", "-"]


def test_a_claim_that_fails_or_has_no_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def fail(setting: guides.Setting) -> list[guides.Line]:
        clock.now += 50
        raise torch.OutOfMemoryError("CUDA out of memory\nmore words")

    monkeypatch.setattr(guides, "CLAIMS", {"first": (fail, 20.0), "second": (fail, 20.0)})
    budget = Budget(1.0, clock)
    lines, failed = guides.measure(["first", "second"], guides.Setting(CPU, False, 2, 0.01), budget)
    assert lines == []
    assert failed == {"first": "OutOfMemoryError: CUDA out of memory"}
    assert budget.dropped == ["second"]


def test_a_script_whose_figures_are_kept_today_is_not_run_again(tmp_path: Path) -> None:
    for name in ("input-2026-11-21-cpu", "sweep-noop-2026-11-21-cpu", "loop-2026-11-20-cpu"):
        (tmp_path / f"{name}.json").touch()
    left = [script.result for script in due(FULL, "2026-11-21", tmp_path)]
    assert left == [script.result for script in FULL if script.result not in ("input", "sweep-noop")]
    assert "sweep" in left, "the figures of another script that begins alike"


def test_the_scripts_are_there() -> None:
    for script in (*SHORT, *FULL, *(script for script, _ in GPU)):
        assert Path("benchmarks", f"{script.module}.py").is_file()
    # fmt: off
    assert {script.result for script in SHORT} == {
        "loop", "sweep", "startup", "input", "checkpoint", "sharded", "recovery", "scale",
    }
    # fmt: on


def test_the_gpus_share_one_budget() -> None:
    """Each gets its part of what is left, so that a late one makes the next ones shorter."""
    weights = [weight for _, weight in GPU]
    assert 60 * share(480, weights) + 15 == pytest.approx(480 / sum(weights))
    assert share(240, weights[2:]) == pytest.approx((240 - 15) / 60)
    assert share(-5, weights[2:]) == 0.1


def test_a_work_is_the_examples_own_file() -> None:
    """Only what a benchmark has to change is changed: the optimizer and the clipping are the example's."""
    config = example("bert", 16, geometry="tiny", synthetic=True).config({"precision": "fp32"})
    assert (config.clip_grad_norm, config.optimizer.name, config.epochs) == (1.0, "adamw", None)
    assert (config.global_batch_size, config.microbatch_size, config.launcher) == (16, 16, "local")


def test_a_step_of_a_run_is_the_products_step(blobs: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    original = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *given, **named: count.append(1) or original(*given, **named))
    measured = Runs(blobs, CPU).run({"precision": "fp32"}, 0.01)
    assert len(count) == measured.result.steps
