"""The GPU benchmarks in miniature, on a GPU: every rung runs there, captured
and compiled ones too.
"""

import pytest

from benchmarks import ladder, peers
from benchmarks.runs import Budget
from tests.gpu.runs import CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.real_gpu("speed")]


@pytest.mark.parametrize("name", ladder.SMALL)
def test_every_rung_but_the_compiled_is_done(name):
    only = [
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        "channels_last",
        "fused",
        "bf16 again",
    ]
    found = ladder.measure(
        {name: ladder.SMALL[name]}, only, CUDA, 0.1, Budget(None), n=1024
    )
    rows = {row["rung"]: row for row in found["works"][name]["rows"]}
    assert {
        rung: row["message"]
        for rung, row in rows.items()
        if row["status"] != "done"
    } == {}
    assert all(0 < row["figures"]["mfu_matmul"] < 1 for row in rows.values())


def test_the_small_models_compiled_and_captured_rungs_are_done():
    only = ["fused", "compile", "cuda_graph"]
    found = ladder.measure(
        {"cnn": ladder.SMALL["cnn"]}, only, CUDA, 0.2, Budget(None), n=1024
    )
    rows = {row["rung"]: row for row in found["works"]["cnn"]["rows"]}
    assert {
        rung: row["message"]
        for rung, row in rows.items()
        if row["status"] != "done"
    } == {}
    compiled = rows["compile"]["figures"]
    assert compiled["compile_s"] > 0
    assert (compiled["break_even_steps"] is None) == (
        compiled["ratio_to_rung_below"] <= 1
    )


@pytest.mark.parametrize("name", peers.SMALL)
def test_the_loop_and_its_peers_train_as_the_bare_one(name):
    found = peers.measure(peers.SMALL[name], CUDA, rounds=1, steps=60)
    assert {"bare", "uncaptured", "paceline", "bare again"} <= found[
        "rows"
    ].keys()
