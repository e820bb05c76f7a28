"""The GPU benchmarks in miniature, on the CPU: whole rows, right arithmetic,
and what is dropped is said.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import ladder, peers
from benchmarks.__main__ import FULL, due
from benchmarks.ladder import Row, Rung, break_even_steps, compare, rungs
from benchmarks.runs import Budget, Runs, Work, unfused

CPU = torch.device("cpu")
BLOBS = """
task: tests.tasks:Blobs
task_args: {fits: 100}
optimizer: {name: adamw, lr: 0.01}
global_batch_size: 8
epochs: 1
"""


@pytest.fixture(autouse=True)
def threads_come_back():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def blobs(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(BLOBS)
    return Work(file, 8)


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_every_rung_of_a_model_is_a_row(name, capfd):
    only = ["fp32", "tf32", "bf16", "channels_last", "bf16 again"]
    found = ladder.measure(
        {name: ladder.SMALL[name]}, only, CPU, 0.02, Budget(None), n=64
    )
    work = found["works"][name]
    rows = {row["rung"]: row for row in work["rows"]}
    convolutions = name in ladder.CONVOLUTIONS
    assert list(rows) == [
        rung for rung in only if convolutions or rung != "channels_last"
    ], "the ladder's order"
    refused = rows.pop("tf32")
    assert refused["status"] == "failed"
    assert "tf32" in refused["message"]
    base = rows["fp32"]["figures"]
    for row in rows.values():
        it = row["figures"]
        assert (row["status"], row["message"]) == ("done", "")
        assert it["n"] >= 5
        assert it["samples_per_s"] == pytest.approx(
            work["batch"] / it["step_time_s"]
        )
        matmul = found["matmul_tflops"][row["changes"]["precision"]]
        assert it["mfu_matmul"] == pytest.approx(it["tflops"] / matmul)
        assert it["mfu_data_sheet"] is None, "no data sheet of a CPU is known"
        assert it["ratio_to_fp32"] == pytest.approx(
            it["samples_per_s"] / base["samples_per_s"]
        )
    again = (
        rows["bf16 again"]["figures"]["samples_per_s"]
        / rows["bf16"]["figures"]["samples_per_s"]
    )
    assert work["floor"] == pytest.approx(abs(again - 1))
    assert json.loads(json.dumps(found)) == found, "kept as JSON"
    assert str(Path.cwd()) not in json.dumps(found)
    assert capfd.readouterr().out.count("failed: ConfigError") == 1


def test_the_models_flops_are_those_of_a_hand_count():
    """The guides' CNN: a weight's product counts in the forward pass, for its
    gradient, and (but for the first layer) for the gradient of its input; two
    FLOPs a multiplication.
    """
    first = 26 * 26 * 32 * 9
    others = 24 * 24 * 64 * 32 * 9 + 64 * 12 * 12 * 128 + 128 * 10
    by_hand = 2 * (2 * first + 3 * others)
    measured = Runs(ladder.SMALL["cnn"], CPU).run({"precision": "fp32"}, 0.01)
    assert measured.result.flops_per_sample == by_hand
    figures = ladder.figures_of(measured, matmul=1e12)
    assert figures["mfu_matmul"] == pytest.approx(
        by_hand * figures["samples_per_s"] / 1e12
    )
    assert figures["tflops"] == pytest.approx(
        by_hand * figures["samples_per_s"] / 1e12
    )


def test_what_does_not_fit_is_a_row_and_the_next_rung_runs(blobs):
    runs = Runs(blobs, CPU)
    fits = Rung("fp32", {"precision": "fp32"}, False, None, 0)
    too_large = Rung(
        "bf16",
        {
            "precision": "bf16",
            "global_batch_size": 150,
            "microbatch_size": 150,
        },
        True,
        "fp32",
        0,
    )
    found = {
        rung.name: ladder.climb(runs, rung, 0.01, {"fp32": 1e9})
        for rung in (too_large, fits)
    }
    assert found["bf16"].status == "out_of_memory"
    assert "150 samples" in found["bf16"].message
    assert found["fp32"].status == "done"
    rows, floor = compare([fits, too_large], found)
    assert [row.rung for row in rows] == ["fp32", "bf16"]
    assert floor is None


def test_a_ladder_changes_one_thing_a_rung():
    for convolutions in (True, False):
        by_name = {
            rung.name: rung for rung in rungs(convolutions, host_bound=False)
        }
        assert ("channels_last" in by_name) == convolutions
        for rung in by_name.values():
            if rung.stands_on is None:
                assert rung.name == "fp32"
                continue
            below = by_name[rung.stands_on]
            keys = rung.changes.keys() | below.changes.keys()
            changed = [
                key
                for key in keys
                if rung.changes.get(key) != below.changes.get(key)
            ]
            assert len(changed) + (rung.fused != below.fused) == (
                rung.name != "bf16 again"
            ), rung.name


def row(rung, step_s, first_s=0.0, memory=100):
    figures = {
        "samples_per_s": 8 / step_s,
        "step_time_s": step_s,
        "first_step_s": first_s,
        "peak_memory_bytes": memory,
    }
    return Row(rung, {}, "done", figures=figures)


def test_a_rung_is_compared_with_the_first_and_with_the_one_it_stands_on():
    steps = {"fp32": 0.8, "bf16": 0.2, "fused": 0.16, "bf16 again": 0.25}
    found = {
        name: row(name, step_s, first_s=2.0) for name, step_s in steps.items()
    }
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


def test_an_optimizer_that_is_not_fused_trains_the_same(blobs):
    runs = Runs(blobs, CPU)
    changes = {"precision": "fp32", "max_steps": 20}
    losses = {
        fused: runs.run(changes, 60.0, fused).result.metrics["train_loss"]
        for fused in (True, False)
    }
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    config = blobs.config({"device": "cpu", **changes})
    model = runs.task.model()
    built = unfused(runs.new_optimizer(model, config))
    assert not any(group["fused"] for group in built.param_groups)
    assert built.param_groups[0]["lr"] == config.optimizer.lr
    assert not getattr(built, "_step_supports_amp_scaling", False), (
        "a loss scaler must not leave its work to it"
    )


def test_time_begins_after_the_warm_up(blobs):
    measured = Runs(blobs, CPU).run({"precision": "fp32"}, 0.05)
    assert measured.result.status == "stopped"
    assert measured.looks[-1] - measured.looks[0] >= 0.05
    assert measured.looks[-2] - measured.looks[0] < 0.05
    assert measured.result.steps == 10 * len(measured.looks)


@pytest.mark.parametrize("name", peers.SMALL)
def test_the_bare_loop_trains_what_the_product_trains(name):
    found = peers.measure(peers.SMALL[name], CPU, rounds=1, steps=30)
    assert {"bare", "paceline", "bare again"} <= found["rows"].keys()
    losses = found["train_loss"]
    assert losses["paceline"] == pytest.approx(losses["bare"], rel=1e-6)


def test_a_script_whose_figures_are_kept_today_is_not_run_again(tmp_path):
    for name in (
        "input-2026-11-21-cpu",
        "sweep-noop-2026-11-21-cpu",
        "loop-2026-11-20-cpu",
    ):
        (tmp_path / f"{name}.json").touch()
    left = [script.result for script in due(FULL, "2026-11-21", tmp_path)]
    assert left == [
        script.result
        for script in FULL
        if script.result not in ("input", "sweep-noop")
    ]
    assert "sweep" in left, "the figures of another script that begins alike"


def test_what_there_is_no_time_for_is_dropped_and_named(
    capfd,
):
    budget = Budget(0.0)
    found = ladder.measure(
        {"cnn": ladder.SMALL["cnn"]}, ["fp32", "bf16"], CPU, 0.01, budget, n=32
    )
    assert [row["status"] for row in found["works"]["cnn"]["rows"]] == [
        "dropped",
        "dropped",
    ]
    budget.say()
    assert budget.dropped == ["cnn fp32", "cnn bf16"]
    assert "cnn bf16" in capfd.readouterr().out.split("DROPPED")[1]


@pytest.mark.parametrize(
    ("compile_s", "before_s", "after_s", "steps"),
    [
        (30.0, 0.5, 0.25, 120),
        (1.0, 0.5, 0.2, 4),
        (0.0, 0.5, 0.25, 0),
        (30.0, 0.25, 0.25, None),
        (30.0, 0.25, 0.5, None),
    ],
)
def test_steps_until_compiling_has_paid(compile_s, before_s, after_s, steps):
    assert break_even_steps(compile_s, before_s, after_s) == steps
